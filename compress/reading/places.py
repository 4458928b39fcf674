"""Where a value stands, what is wrong with it, and the list that collects everything that is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches

Path = tuple[str | int, ...]
"""Keys and list indices from the top of the recipe: ("passes", 0, "bits")."""

OVERRIDE = "--set "


@dataclass(frozen=True, order=True)
class Place:
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

    place: Place
    path: Path
    rule: str

    def __str__(self) -> str:
        where = dotted(self.path)
        if not where or self.place.source == OVERRIDE + where:
            return f"{self.place}: {self.rule}"
        return f"{self.place}: {where}: {self.rule}"


@dataclass
class Findings:
    """What is wrong so far. A path with a problem is not complained about again further on."""

    problems: list[Problem] = field(default_factory=list)
    settled: set[Path] = field(default_factory=set)
    incomplete: bool = False
    """An included file could not be read, so that keys may be missing which it would have given."""

    def add(self, place: Place, path: Path, rule: str) -> None:
        self.problems.append(Problem(place, path, rule))
        self.settled.add(path)

    def covers(self, path: Path) -> bool:
        """True if `path`, or something that it is part of, has a problem already."""
        return any(path[:n] in self.settled for n in range(1, len(path) + 1))

    def lines(self) -> tuple[str, ...]:
        """The problems as the user sees them: by file (in the order met) and position, each once."""
        order = {source: n for n, source in enumerate(dict.fromkeys(p.place.source for p in self.problems))}
        ranked = sorted(self.problems, key=lambda p: (order[p.place.source], p.place.line, p.place.column))
        return tuple(dict.fromkeys(map(str, ranked)))


def dotted(path: Path) -> str:
    """("passes", 0, "bits") -> "passes.0.bits"."""
    return ".".join(map(str, path))


def did_you_mean(word: object, options: Iterable[object]) -> str:
    """ "; did you mean 'x'?" for the option nearest to `word`, or "" if none is near."""
    by_fold = {str(option).lower(): str(option) for option in options}
    near = get_close_matches(str(word).lower(), by_fold, n=1, cutoff=0.6)
    return f"; did you mean '{by_fold[near[0]]}'?" if near else ""


def suggest(word: object, options: Iterable[object]) -> str:
    """`did_you_mean`, or all the options where none is near."""
    known = list(options)
    return did_you_mean(word, known) or (f"; known: {', '.join(map(str, known))}" if known else "")
