"""What is wrong with `search:`, said with the rest of the recipe: before anything is loaded, let alone tried."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

from pydantic import ValidationError

from compress.recipe import vocabulary
from compress.recipe.explain import explain
from compress.recipe.overrides import BadPath, set_value
from compress.recipe.places import Node, Path, RecipeFindings, join_path, plain
from compress.recipe.points import SEARCH, SpaceDimension, enter, is_there, put
from compress.recipe.schema import Recipe
from compress.recipe.search import Search, Space, find_direction
from runtime.bundle.format import Gate
from runtime.tasks.metrics import is_own

SPACE: Path = (SEARCH, "space")


def fill_in(root: Node, findings: RecipeFindings) -> Node:
    """Put into the tree what is tried first at each place of `search.space` that says nothing, inside choices too.

    So `{kind: prune_channels}` is complete where a space is of its ratio. Of a space that is wrong anything is put
    there, so that nothing is said to be missing; a path that leads nowhere is reported.
    """
    written = root.find(SPACE)
    if not isinstance(written.value, dict) or not is_there(root, SPACE):
        return root
    spaces = {key: _read_space(node) for key, node in written.value.items()}
    found = []
    for key, node in written.value.items():
        try:
            dimension, inside = enter(key, root, spaces)
        except BadPath as error:
            findings.add(node.key_place or node.place, (*SPACE, key), str(error))
            continue
        if problem := _find_type_problem(dimension, inside):
            findings.add(node.find(("range",)).place, (*SPACE, key, "range"), problem)
        else:
            found.append(dimension)
    for dimension in sorted(found, key=lambda each: -len(each.given)):  # what is inside of a choice first
        root = _fill_in_one(dimension, found, root)
    return root


def _fill_in_one(dimension: SpaceDimension, found: list[SpaceDimension], root: Node) -> Node:
    home, source = _find_home(dimension, found), root.find((*SPACE, dimension.key))
    if is_there(root, home) and root.find(home).value is not None:
        return root
    if dimension.space.options:  # the option's own nodes, with their places and what was filled in
        return set_value(root, home, source.find(("choice", dimension.middle)), source.place)
    defaults = [schema.get("default") for schema in vocabulary.at(home, plain(root))] if home[0] != SEARCH else []
    stands = dimension.middle is None or any(map(dimension.holds, defaults))
    return root if stands else put(root, home, dimension.middle, source.place)


def _read_space(node: Node) -> Space:
    """Return the space that stands there; of one that is not well formed, which the records report, some of it."""
    data = plain(node)
    try:
        return Space.model_validate_json(json.dumps(data), strict=True)
    except ValidationError:
        some = [data.get(key) for key in ("choice", "range")] if isinstance(data, dict) else []
        values = next((value for value in some if value and isinstance(value, dict | list)), [None])
        return Space.model_construct(choice=values if isinstance(values, dict) else tuple(values[:1]), range=None)


def _find_type_problem(dimension: SpaceDimension, base: Node) -> str:
    """Return why a range cannot be of this place; "" where it can."""
    alternatives = vocabulary.at(dimension.path, plain(base))
    numbers = any(vocabulary.takes(alternatives, kind) for kind in ("integer", "number")) or {} in alternatives
    if dimension.space.range is None or numbers:
        return ""
    expected = vocabulary.describe(alternatives)
    return f"a range is of numbers, and {join_path(dimension.path)} is {expected}; use choice"


def _find_home(dimension: SpaceDimension, found: list[SpaceDimension]) -> Path:
    """Return where the value of a place is written: in the recipe, or in the option of the choice around it."""
    if not dimension.given:
        return dimension.path
    owner, option = dimension.given[-1]
    around = next(each for each in found if each.key == owner)
    return (*SPACE, owner, "choice", option, *dimension.path[len(around.path) :])


def check_search(recipe: Recipe, root: Node, findings: RecipeFindings) -> None:
    """Report what is wrong with a recipe's search, each value tried in the recipe; `root`: its tree."""
    search = recipe.search
    if search is None:
        return
    base = replace(root, value={key: node for key, node in _entries(root).items() if key != SEARCH})
    for key in search.space:
        if not findings.covers((*SPACE, key, "range")):
            try:
                _check_dimension(*enter(key, base, search.space), root, findings)
            except BadPath as error:  # inside of an option that is wrong itself
                findings.add(root.find((*SPACE, key)).place, (*SPACE, key), str(error))
    _check_goals(search, recipe, root, findings)
    _check_conflicts(search, recipe, root, findings)


def _entries(root: Node) -> dict[str, Node]:
    return root.value if isinstance(root.value, dict) else {}


def _check_dimension(dimension: SpaceDimension, base: Node, root: Node, findings: RecipeFindings) -> None:
    """Report values that may not stand where the space is; `base`: the recipe in which that place is."""
    place: Path = (*SPACE, dimension.key)
    if dimension.whole and isinstance(dimension.space.step, float):
        text = f"{join_path(dimension.path)} takes whole numbers; write a whole step"
        findings.add(root.find((*place, "step")).place, (*place, "step"), text)
    for where, value in _list_values(dimension):
        node = root.find((*place, *where))
        for rule in _find_refusals(put(base, dimension.path, value, node.place), dimension.path):
            findings.add(node.place, (*place, *where), rule)
    if not dimension.space.options and is_there(base, dimension.path):
        written = base.find(dimension.path)
        if not dimension.holds(plain(written)):
            text = f"{plain(written)!r} stands there, to be tried first, and is not in its space: put it in or drop"
            findings.add(written.place, dimension.path, f"{text} it")


def _list_values(dimension: SpaceDimension) -> Iterator[tuple[Path, Any]]:
    """Yield where each value of a space is written, and the value as the recipe would have it; of a range its ends."""
    space = dimension.space
    if space.range is not None:
        yield from ((("range", end), value) for end, value in enumerate(space.range))
    elif space.options:
        yield from ((("choice", name), value) for name, value in space.options.items())
    else:
        yield from ((("choice", index), value) for index, value in enumerate(dimension.labels))


def _find_refusals(tree: Node, path: Path) -> list[str]:
    """Return why the recipe would be refused with the value that stands at `path`; [] where it would not."""
    try:
        Recipe.model_validate_json(json.dumps(plain(tree)), strict=True)
    except ValidationError as error:
        found = RecipeFindings()
        explain(error, tree, found)
        return [p.rule if p.path == path else f"{join_path(p.path)}: {p.rule}" for p in found.problems] or [str(error)]
    return []


def _check_goals(search: Search, recipe: Recipe, root: Node, findings: RecipeFindings) -> None:
    """Report goals in the wrong direction, and metrics that the task does not have."""
    for index, (direction, metric) in enumerate(search.split_goals()):
        path: Path = (SEARCH, "goals", index)
        right = find_direction(metric)
        problems = _find_metric_problems(recipe, metrics=(metric,))
        if not problems and right not in (None, direction):
            problems = [f"{'lower' if right == 'minimize' else 'higher'} {metric} is better: write {right} {metric}"]
        for problem in problems:
            findings.add(root.find(path).place, path, problem)
    for index, gate in enumerate(search.constraints):
        path = (SEARCH, "constraints", index)
        for problem in [] if findings.covers(path) else _find_metric_problems(recipe, gates=(gate,)):
            findings.add(root.find(path).place, path, problem)


def _find_metric_problems(recipe: Recipe, metrics: tuple[str, ...] = (), gates: tuple[Gate, ...] = ()) -> list[str]:
    """Return why a metric or a gate could be judged on no data."""
    from runtime.errors import UsageError
    from runtime.judge.gates import check_gates

    asked = [name for name in metrics if not is_own(name)]
    judgement = replace(recipe.validate_, gates=gates, metrics=tuple(asked))
    try:
        check_gates(judgement, recipe.model.task, has_labels=True, postprocess=recipe.postprocess)
    except UsageError as error:
        return list(error.problems)
    return []


def _check_conflicts(search: Search, recipe: Recipe, root: Node, findings: RecipeFindings) -> None:
    """Report two gates, among constraints and `validate.gates`, that no model can keep together."""
    held = [((SEARCH, "constraints", i), gate) for i, gate in enumerate(search.constraints)]
    held += [(("validate", "gates", i), gate) for i, gate in enumerate(recipe.validate_.gates)]
    for (path, gate), (_, other) in combinations(held, 2):
        same = (gate.metric, gate.worst, gate.slice) == (other.metric, other.worst, other.slice)
        if not same or path[0] != SEARCH:
            continue
        floors = [(each.min, each) for each in (gate, other) if each.min is not None]
        caps = [(each.max, each) for each in (gate, other) if each.max is not None]
        for low, floor in floors:
            for high, cap in caps:
                if low > high and floor is not cap:
                    text = f"{gate.metric} is to be at least {low:g} and at most {high:g}, which nothing is; change one"
                    findings.add(root.find(path).place, path, text)
