"""Where a value stands, what is wrong with it, and the list that collects everything that is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from compress.recipe.budget import Budget, OverBudget

Path = tuple[str | int, ...]
"""Keys and list indices from the top of the recipe: ("passes", 0, "bits")."""
OVERRIDE = "--set "
MOST_PROBLEMS = 100
"""After that many reading ends: each takes time to explain, and nobody reads more."""
MOST_SHOWN = 2000
"""Characters of a problem."""
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
Scalar = str | int | float | bool | None


@dataclass(frozen=True, order=True)
class Position:
    """A position, 1-based, in `source`: a file as the user named it, or `--set a.b`."""

    source: str
    line: int
    column: int

    @property
    def is_override(self) -> bool:
        return self.source.startswith(OVERRIDE)

    def __str__(self) -> str:
        return self.source if self.is_override or not self.line else f"{self.source}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong; its text is the line that the user sees."""

    place: Position
    path: Path
    rule: str

    def __str__(self) -> str:
        where = join_path(self.path)
        if not where or self.place.source == OVERRIDE + where:
            return printable(f"{self.place}: {self.rule}")
        return printable(f"{self.place}: {where}: {self.rule}")


class StopReading(Exception):
    """Nothing is gained by reading on: too much is wrong, or the recipe is too large."""


@dataclass
class RecipeFindings:
    """What is wrong so far, and what is spent. A path with a problem is not complained about again further on."""

    problems: list[Problem] = field(default_factory=list)
    settled: set[Path] = field(default_factory=set)
    incomplete: bool = False
    """An included file could not be read, so that keys may be missing which it would have given."""

    budget: Budget = field(default_factory=Budget)

    def add(self, place: Position, path: Path, rule: str) -> None:
        """Add a problem that settles its path. Raises StopReading where there are many."""
        self.settled.add(path)
        self.report(Problem(place, path, rule))

    def report(self, problem: Problem) -> None:
        """Add a problem. Raises StopReading where there are many."""
        self.problems.append(problem)
        if self.is_full:
            raise StopReading

    @contextmanager
    def count(self, place: Position, path: Path) -> Iterator[Budget]:
        """Lend the budget while the context is open; going over it is a problem at `place`, which ends reading."""
        try:
            yield self.budget
        except OverBudget as error:
            self.add(place, path, f"{error}: too much for a recipe")
            raise StopReading from error

    def covers(self, path: Path) -> bool:
        """Return whether `path`, or something that it is part of, has a problem already."""
        return any(path[:n] in self.settled for n in range(1, len(path) + 1))

    def lines(self) -> tuple[str, ...]:
        """Return the problems as the user sees them: by file (in the order met) and position, each once."""
        order = {source: n for n, source in enumerate(dict.fromkeys(p.place.source for p in self.problems))}
        ranked = sorted(self.problems, key=lambda p: (order[p.place.source], p.place.line, p.place.column))
        lines = tuple(dict.fromkeys(map(str, ranked)))
        return (*lines, f"and perhaps more: reading ended at {MOST_PROBLEMS} problems") if self.is_full else lines

    @property
    def is_full(self) -> bool:
        """Return whether reading ended for the number of problems."""
        return len(self.problems) >= MOST_PROBLEMS


def printable(text: str) -> str:
    """Return the text as one line of a message: control characters and half letters escaped, its middle left out."""
    if len(text) > MOST_SHOWN:
        text = f"{text[: MOST_SHOWN // 2]} [...] {text[-MOST_SHOWN // 2 :]}"
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def join_path(path: Path) -> str:
    """Join a path with dots: ("passes", 0, "bits") -> "passes.0.bits"."""
    return ".".join(map(str, path))


@dataclass(frozen=True)
class Node:
    """A value, where it stands and where its key does. `written` is its text before a variable took that place."""

    value: Scalar | dict[str, Node] | list[Node]
    place: Position
    key_place: Position | None = None
    written: str | None = None

    def child(self, key: str | int) -> Node | None:
        if isinstance(self.value, dict) and isinstance(key, str):
            return self.value.get(key)
        if isinstance(self.value, list) and isinstance(key, int) and 0 <= key < len(self.value):
            return self.value[key]
        return None

    def find(self, path: Path) -> Node:
        """Return the node at `path`, or the deepest one on the way to it."""
        node = self
        for key in path:
            child = node.child(key)
            if child is None:
                return node
            node = child
        return node

    def children(self) -> list[tuple[str | int, Node]]:
        if isinstance(self.value, dict):
            return list(self.value.items())
        return list(enumerate(self.value)) if isinstance(self.value, list) else []


def plain(node: Node) -> Any:
    """Turn the tree into ordinary dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def merge(under: Node, over: Node) -> Node:
    """Put `over` on top of `under`: mappings are merged key by key, everything else is replaced."""
    if not (isinstance(under.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(under.value)
    for key, child in over.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return Node(merged, over.place, over.key_place)
