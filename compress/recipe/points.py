"""Points of a recipe's search: the places that may hold other values, and the explicit recipe at each point."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from compress.errors import RecipeError
from compress.recipe import vocabulary
from compress.recipe.explain import explain
from compress.recipe.overrides import parse_path, set_value
from compress.recipe.places import Node, Path, Position, RecipeFindings, join_path, plain
from compress.recipe.schema import Recipe, Wording
from compress.recipe.search import Search, Space
from runtime.bundle.format import Judgement
from runtime.tasks.metrics import METRICS

SEARCH = "search"
Point = Mapping[str, Any]
"""Path of a space, as `search.space` writes it -> its value; of a named choice the name. Only what is active."""
NOWHERE = Position("", 0, 0)
DIGITS = 4
"""Of numbers that are chosen: more of them cost readability and decide nothing."""


@dataclass(frozen=True)
class SpaceDimension:
    """A place of the recipe that may hold other values.

    `key`: as `search.space` writes it; `path`: where it is once `given` holds, the names that choices around it must
    have. `whole`: it takes whole numbers alone.
    """

    key: str
    path: Path
    space: Space
    given: tuple[tuple[str, str], ...] = ()
    whole: bool = False

    def is_active(self, point: Point) -> bool:
        """Return whether the place is there, by the named choices of the point."""
        return all(point.get(key) == name for key, name in self.given)

    @property
    def labels(self) -> list[Any]:
        """Return what a point may hold for a choice: its values, or their names."""
        return list(self.space.choice or ())

    def value_of(self, label: Any) -> Any:
        """Return what stands in the recipe for a point's value."""
        return self.space.options[label] if self.space.options else label

    @cached_property
    def ends(self) -> tuple[float, float]:
        """Return the least number of a range, and the greatest that its steps reach."""
        assert self.space.range is not None
        low, high = self.space.range
        if self.step is None:
            return low, high
        return low, round(low + math.floor((high - low) / self.step + 1e-9) * self.step, 12)

    @property
    def step(self) -> float | None:
        """Return how far apart the numbers of a range are; None: as near as they like."""
        return self.space.step or (1 if self.whole else None)

    @property
    def n_values(self) -> float:
        """Return how many values the place may take; math.inf of a range without steps."""
        if self.space.range is None:
            return len(self.labels)
        return math.inf if self.step is None else round((self.ends[1] - self.ends[0]) / self.step) + 1

    def snap(self, number: float) -> Any:
        """Return the number of the range that is nearest, in few digits."""
        low, high = self.ends
        if self.step is not None:
            number = low + round((number - low) / self.step) * self.step
        number = min(max(number, low), high)
        if self.whole:
            return round(number)
        return round(number, 12) if self.step is not None else float(f"{number:.{DIGITS}g}")

    def list_values(self) -> list[Any]:
        """Return all values that the place may take, which are finitely many, as a point has them."""
        if self.space.range is None:
            return self.labels
        return [self.snap(self.ends[0] + i * (self.step or 0)) for i in range(int(self.n_values))]

    @property
    def middle(self) -> Any:
        """Return what is tried first where the recipe says nothing: the first of a choice, the middle of a range."""
        if self.space.range is None:
            return self.labels[0]
        low, high = self.space.range
        return self.snap(math.sqrt(low * high) if self.space.log else (low + high) / 2)

    def holds(self, value: Any) -> bool:
        """Return whether the value that stands in the recipe is one of the space."""
        if self.space.range is None:
            return any(_is_same(value, label) for label in self.labels)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        low, high = self.space.range
        return low <= value <= high and (self.step is None or math.isclose(value, self.snap(value)))


def _is_same(value: Any, label: Any) -> bool:
    """Compare as a record does: 1 may stand for 1.0, and true for neither."""
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (value, label))
    return value == label and (numbers or type(value) is type(label))


def list_dimensions(root: Node, spaces: Mapping[str, Space]) -> list[SpaceDimension]:
    """Return the places that the spaces are of, those of named choices before what is inside of them.

    `root`: the recipe's tree. Raises `overrides.BadPath` for a path that leads nowhere.
    """
    return sorted((enter(key, root, spaces)[0] for key in spaces), key=lambda found: len(found.given))


def enter(key: str, root: Node, spaces: Mapping[str, Space]) -> tuple[SpaceDimension, Node]:
    """Return the place that one space is of, and the tree in which it is there: with the choices around it made.

    Raises `overrides.BadPath` where the path leads nowhere.
    """
    words, space = key.split("."), spaces[key]
    owner, option = _find_owner(words, spaces)
    given: tuple[tuple[str, str], ...] = ()
    if owner:
        around, root = enter(owner, root, spaces)
        given = (*around.given, (owner, option))
        root = put(root, around.path, around.value_of(option))
        words = [*map(str, around.path), *words[len(owner.split(".")) + 1 :]]
    path = parse_path(".".join(words), root)
    alternatives = vocabulary.at(path, plain(root))
    whole = vocabulary.takes(alternatives, "integer") and not vocabulary.takes(alternatives, "number")
    return SpaceDimension(key, path, space, given, whole), root


def _find_owner(words: list[str], spaces: Mapping[str, Space]) -> tuple[str, str]:
    """Return the named choice nearest around a path, and the name in it; ("", "") where there is none."""
    for n in range(len(words) - 2, 0, -1):
        owner = spaces.get(".".join(words[:n]))
        if owner is not None and words[n] in owner.options:
            return ".".join(words[:n]), words[n]
    return "", ""


def put(root: Node, path: Path, value: Any, place: Position = NOWHERE) -> Node:
    """Return the tree with a plain value at a path, as if it stood at `place`."""
    return set_value(root, path, as_node(value, place), place)


def as_node(value: Any, place: Position = NOWHERE) -> Node:
    """Make a tree of plain values, all of them at one place."""
    if isinstance(value, Mapping):
        return Node({str(key): as_node(item, place) for key, item in value.items()}, place, place)
    if isinstance(value, list | tuple):
        return Node([as_node(item, place) for item in value], place)
    return Node(value, place)


def is_there(root: Node, path: Path) -> bool:
    """Return whether the tree has a value at the path."""
    return all(root.find(path[:n]).child(key) is not None for n, key in enumerate(path))


def find_start(dimension: SpaceDimension, root: Node) -> Any:
    """Return what a point holds first for a place: the value that stands there, or the middle of its space."""
    if dimension.space.options or not is_there(root, dimension.path):
        return dimension.middle
    written = plain(root.find(dimension.path))
    return written if dimension.holds(written) else dimension.middle


@dataclass(frozen=True)
class SearchSpace:
    """A recipe that says `search:`, and the places in it that may hold other values."""

    recipe: Recipe
    search: Search
    dimensions: tuple[SpaceDimension, ...]
    root: Node
    """The recipe as plain values, without `search`."""

    def start(self, chosen: Point | None = None) -> dict[str, Any]:
        """Return the point to try first: what stands in the recipe. `chosen`: some of its values, such as a chain.

        Raises RecipeError where one of these is not of the space.
        """
        point: dict[str, Any] = {}
        root, given = self.root, dict(chosen or {})
        for dimension in self.dimensions:
            if dimension.is_active(point):
                label = given.pop(dimension.key) if dimension.key in given else find_start(dimension, root)
                if not dimension.holds(label):
                    raise RecipeError(f"{dimension.key}: {label!r} is not in its space")
                point[dimension.key] = label
                root = put(root, dimension.path, dimension.value_of(label))
        if given:
            raise RecipeError(f"no place of the space that is there is called {', '.join(given)}")
        return point

    def recipe_at(self, point: Point) -> Recipe:
        """Return the explicit recipe at a point: no search, the constraints among its gates.

        Raises RecipeError where the values do not go together.
        """
        root, changed = self.root, []
        for dimension in self.dimensions:
            if dimension.is_active(point):
                root = put(root, dimension.path, dimension.value_of(point[dimension.key]))
                changed.append(dimension.path)
        recipe = validate_tree(root, f"the point {format_point(point)}")
        judged = add_goals(recipe.validate_, self.search)
        kept = {p: text for p, text in self.recipe.wording.texts.items() if not any(p[: len(c)] == c for c in changed)}
        wording = Wording(kept, self.recipe.wording.variables)
        return recipe.model_copy(update={"validate_": judged}).at_root(self.recipe.root, wording)


def open_space(recipe: Recipe) -> SearchSpace:
    """Return what a recipe lets be searched. Raises RecipeError for a recipe without `search:`."""
    if recipe.search is None:
        raise RecipeError("search: the recipe has no search section; add one, or use `compress apply`")
    data = recipe.model_dump(mode="json", by_alias=True)
    data.pop(SEARCH)
    root = as_node(data)
    return SearchSpace(recipe, recipe.search, tuple(list_dimensions(root, recipe.search.space)), root)


def first_recipe(recipe: Recipe) -> Recipe:
    """Return the explicit recipe that a search tries first; the recipe itself where it has no search."""
    if recipe.search is None:
        return recipe
    space = open_space(recipe)
    return space.recipe_at(space.start())


def validate_tree(root: Node, name: str) -> Recipe:
    """Return the typed recipe of a tree. Raises RecipeError, which says of `name` what is wrong."""
    try:
        return Recipe.model_validate_json(json.dumps(plain(root)), strict=True)
    except ValidationError as error:
        findings = RecipeFindings()
        explain(error, root, findings)
        rules = [f"{join_path(problem.path)}: {problem.rule}" for problem in findings.problems]
        raise RecipeError([f"{name}: {rule}" for rule in rules or [str(error)]]) from error


def add_goals(judged: Judgement, search: Search) -> Judgement:
    """Return the judgement with the constraints among its gates, and with the goals' metrics among what is reported.

    Models between the passes are not timed where the recipe leaves that open: it takes as long as the verdict.
    """
    asked = [metric for _, metric in search.split_goals() if metric in METRICS]
    more = judged.metrics or any(METRICS[metric].on_request for metric in asked)
    metrics = tuple(dict.fromkeys((*judged.metrics, *asked))) if more else ()
    gates = (*judged.gates, *(gate for gate in search.constraints if gate not in judged.gates))
    return replace(judged, gates=gates, metrics=metrics, steps=False if judged.steps == "auto" else judged.steps)


def format_point(point: Point) -> str:
    """Return a point as a line: "passes.0.ratio=0.4, passes.1.bits=4"."""
    return ", ".join(f"{key}={_format_value(value)}" for key, value in point.items()) or "(the recipe as it stands)"


def _format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
