"""YAML to a `Recipe` and back. Everything that is wrong with a recipe is said at once, with file, line and column."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path as File
from typing import Any

from pydantic import BaseModel, ValidationError

from compress.errors import RecipeError
from compress.reading.explain import explain
from compress.reading.includes import read_with_includes
from compress.reading.overrides import apply_overrides
from compress.reading.places import Findings, Path, suggest
from compress.reading.tree import Node, plain
from compress.reading.variables import escape, substitute
from compress.schema import Recipe


def load_recipe(path: File | str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in the file `path`: includes and variables put in, each `a.b.0.c=value` of `overrides` set on top.

    Raises RecipeError with one line for each problem: unknown key, wrong type, bad value, reference to nothing. Only
    the recipe's own files are read.
    """
    file = File(path)
    findings = Findings()
    written = read_with_includes(file, findings)
    root = substitute(apply_overrides(written, overrides, findings), findings)
    _check_patterns(root, findings)  # first: the records refuse these patterns too, in fewer words
    recipe = _validated(root, findings)
    _check_metrics(root, findings)
    if recipe is not None and not findings.problems:
        _check_gates(recipe, root, findings)
    if recipe is None or findings.problems:
        raise RecipeError(findings.lines())
    return recipe.at_root(file.absolute().parent)


def _validated(root: Node, findings: Findings) -> Recipe | None:
    """The typed recipe; None where `findings` says why not. In JSON a list may be a tuple, and "4" is still not 4."""
    try:
        return Recipe.model_validate_json(json.dumps(plain(root)), strict=True)
    except ValidationError as error:
        explain(error, root, findings)
    return None


def _check_metrics(root: Node, findings: Findings) -> None:
    """Every metric that is named exists."""
    from runtime.metrics import KNOWN_METRICS

    for path, node in _walk(root, ()):
        named = path[:2] == ("validate", "metrics") or (path[:2] == ("validate", "gates") and path[3:] == ("metric",))
        if named and isinstance(node.value, str) and node.value not in KNOWN_METRICS and not findings.covers(path):
            findings.add(node.place, path, f"unknown metric '{node.value}'{suggest(node.value, KNOWN_METRICS)}")


def _check_patterns(root: Node, findings: Findings) -> None:
    """Every `re:` pattern for layers is a regular expression."""
    for path, node in _walk(root, ()):
        selects = path[:1] == ("passes",) and path[-2:-1] in (("targets",), ("ignore",))
        if selects and isinstance(node.value, str) and node.value.startswith("re:") and not findings.covers(path):
            try:
                re.compile(node.value[3:])
            except re.error as error:
                findings.add(node.place, path, f"'{node.value[3:]}' is not a regular expression: {error}")


def _check_gates(recipe: Recipe, root: Node, findings: Findings) -> None:
    """Gates that could be judged on no data: a metric of another task, a rule that does not fit the metric."""
    from runtime.errors import UsageError
    from runtime.gates import check_gates

    wanted = recipe.validate_
    parts = {("gates", i): replace(wanted, gates=(gate,), metrics=()) for i, gate in enumerate(wanted.gates)}
    parts |= {("metrics", i): replace(wanted, gates=(), metrics=(name,)) for i, name in enumerate(wanted.metrics)}
    for part, judgement in parts.items():
        path: Path = ("validate", *part)
        try:
            check_gates(judgement, recipe.model.task, has_labels=True)
        except UsageError as error:
            for problem in error.problems:
                findings.add(root.find(path).place, path, problem)


def _walk(node: Node, path: Path) -> Iterator[tuple[Path, Node]]:
    yield path, node
    for step, child in node.children():
        yield from _walk(child, (*path, step))


def recipe_to_yaml(recipe: Recipe) -> str:
    """The recipe with every default written out, as YAML that `load_recipe` reads back; always the same text."""
    from ruamel.yaml import YAML

    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = None
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = 120
    out = io.StringIO()
    yaml.dump(_written(recipe), out)
    return out.getvalue()


def _written(value: Any) -> Any:
    """A record as mappings and lists; a key whose value is None is left out, since None is what it is by default."""
    if isinstance(value, BaseModel):
        named = {field.alias or name: getattr(value, name) for name, field in type(value).model_fields.items()}
        return {key: _written(item) for key, item in named.items() if item is not None}
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        return {key: _written(item) for key, item in named.items() if item is not None}
    if isinstance(value, dict):
        return {key: _written(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_written(item) for item in value]
    return escape(value) if isinstance(value, str) else value
