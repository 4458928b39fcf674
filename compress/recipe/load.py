"""YAML to a `Recipe` and back. Everything that is wrong with a recipe is said at once, with file, line and column."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path as File
from typing import Any

from pydantic import BaseModel, ValidationError

from compress.errors import RecipeError
from compress.recipe.budget import MOST_FILE_BYTES
from compress.recipe.check_search import check_search, fill_in
from compress.recipe.explain import explain
from compress.recipe.overrides import apply_overrides
from compress.recipe.places import Node, Path, Position, Problem, RecipeFindings, StopReading, plain
from compress.recipe.portable import Portable
from compress.recipe.schema import Recipe, Variable, Wording
from compress.recipe.variables import VARS, escape, substitute
from compress.recipe.yaml_source import IN_PYTHON, read_mapping, read_with_includes
from runtime.encode.images import ImagePreprocess


def load_recipe(given: File | str | Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe in a file, or given as a dict, with includes and variables, and each `a.b.0.c=value` of
    `overrides` on top. A dict's paths are sought in the working directory.

    Raises RecipeError with one line for each problem: unknown key, wrong type, bad value, reference to nothing. Only
    the recipe's own files are read.
    """
    findings = RecipeFindings()
    try:
        if isinstance(given, Mapping):
            recipe = _read_recipe(read_mapping(given, findings), File(IN_PYTHON), overrides, findings)
        else:
            recipe = _read_recipe(read_with_includes(File(given), findings), File(given), overrides, findings)
    except StopReading:
        recipe = None
    if recipe is None:
        raise RecipeError(findings.lines())
    return recipe


def _read_recipe(written: Node, file: File, overrides: Sequence[str], findings: RecipeFindings) -> Recipe | None:
    """Return the recipe, or None where `findings` has what is wrong."""
    root, values = substitute(apply_overrides(written, overrides, findings), findings)
    root = fill_in(root, findings)
    _check_patterns(root, findings)  # first: the records refuse these patterns too, in fewer words
    recipe = _validate_tree(root, findings)
    _check_metrics(root, findings)
    if recipe is not None and not findings.problems:
        _check_gates(recipe, root, findings)
        _check_scale(recipe, root, findings)
    if recipe is not None:
        check_search(recipe, root, findings)
    if recipe is None or findings.problems:
        return None
    recipe = recipe.at_root(file.absolute().parent, _record_wording(written, root, values))
    if findings.budget.may_outgrow_a_file:  # the bundle's copy of it is to be read again
        _check_written_size(recipe, Position(str(file), 1, 1), findings)
    return None if findings.problems else recipe


def _check_written_size(recipe: Recipe, place: Position, findings: RecipeFindings) -> None:
    size = len(recipe_to_yaml(recipe).encode())
    if size > MOST_FILE_BYTES:
        text = f"with all that its variables stand for it has {size} bytes, and a recipe has at most {MOST_FILE_BYTES}"
        findings.report(Problem(place, (), text))


def _record_wording(written: Node, root: Node, values: Mapping[str, str]) -> Wording:
    """Record how the file words texts that variables take part in.

    `written`: before overrides; `root`, `values`: after.
    """
    texts = {path: node.written for path, node in _walk(root, ()) if node.written is not None}
    variables = {}
    for name, value in values.items():
        as_filed = written.find((VARS, name)).value
        variables[name] = Variable(as_filed if isinstance(as_filed, str) else value, value)
    return Wording(texts, variables)


def _validate_tree(root: Node, findings: RecipeFindings) -> Recipe | None:
    """Return the typed recipe; None where `findings` says why not.

    In JSON a list may be a tuple, and "4" is still not 4.
    """
    try:
        return Recipe.model_validate_json(json.dumps(plain(root)), strict=True)
    except ValidationError as error:
        explain(error, root, findings)
    return None


def _check_metrics(root: Node, findings: RecipeFindings) -> None:
    """Report every named metric that does not exist."""
    from runtime.tasks.metrics import is_own, metric_names, suggest_metric

    known, task = metric_names(), root.find(("model", "task")).value
    for path, node in _walk(root, ()):
        of_gate = path[:2] in (("validate", "gates"), ("search", "constraints")) and path[3:] == ("metric",)
        named = path[:2] == ("validate", "metrics") or of_gate
        if named and isinstance(node.value, str) and node.value not in known and not findings.covers(path):
            if is_own(node.value):
                continue  # its form is checked with the gates, its file when the recipe is planned
            findings.add(node.place, path, f"unknown metric '{node.value}'{suggest_metric(node.value, task)}")


def _check_patterns(root: Node, findings: RecipeFindings) -> None:
    """Report every `re:` pattern for layers that is no regular expression."""
    for path, node in _walk(root, ()):
        selects = path[:1] == ("passes",) and path[-2:-1] in (("targets",), ("ignore",))
        if selects and isinstance(node.value, str) and node.value.startswith("re:") and not findings.covers(path):
            try:
                re.compile(node.value[3:])
            except re.error as error:
                findings.add(node.place, path, f"'{node.value[3:]}' is not a regular expression: {error}")


def _check_gates(recipe: Recipe, root: Node, findings: RecipeFindings) -> None:
    """Report gates that could be judged on no data: a metric of another task, a rule that does not fit the metric."""
    from runtime.errors import UsageError
    from runtime.judge.gates import check_gates
    from runtime.tasks import find_task

    wanted = recipe.validate_
    parts = {("gates", i): replace(wanted, gates=(gate,), metrics=()) for i, gate in enumerate(wanted.gates)}
    parts |= {("metrics", i): replace(wanted, gates=(), metrics=(name,)) for i, name in enumerate(wanted.metrics)}
    paths: dict[tuple[str, int], Path] = {part: ("validate", *part) for part in parts}
    for i, gate in enumerate(recipe.goal_gates):
        written: Path = ("goal",) if isinstance(root.find(("goal",)).value, str) else ("goal", i)
        parts["goal", i], paths["goal", i] = replace(wanted, gates=(gate,), metrics=()), written
    try:
        find_task(recipe.model.task).check_postprocess(recipe.postprocess)
    except UsageError as error:
        for problem in error.problems:
            place: Path = ("postprocess", problem.partition(":")[0].partition(".")[2])
            findings.add(root.find(place).place, place, problem.partition(": ")[2])
    for part, judgement in parts.items():
        path = paths[part]
        try:
            check_gates(judgement, recipe.model.task, has_labels=True, postprocess=recipe.postprocess)
        except UsageError as error:
            for problem in error.problems:
                findings.add(root.find(path).place, path, problem)


def _check_scale(recipe: Recipe, root: Node, findings: RecipeFindings) -> None:
    """Report means of pixels before their scaling: they leave nearly the same constant of every image."""
    image = recipe.preprocess
    if not isinstance(image, ImagePreprocess):
        return
    white, largest = 255 * abs(image.scale), max(abs(mean) for mean in image.mean)
    if largest > white:
        path: Path = ("preprocess", "mean")
        way = f"give {largest / 255:.3f}, or scale: 1" if white == 1 else "give means of scaled pixels"
        text = f"{largest:g} is subtracted from pixels that scale {image.scale:.3g} left between 0 and {white:g}; {way}"
        findings.add(root.find(path).place, path, text)


def _walk(node: Node, path: Path) -> Iterator[tuple[Path, Node]]:
    yield path, node
    for key, child in node.children():
        yield from _walk(child, (*path, key))


def recipe_to_yaml(recipe: Recipe, portable: Portable | None = None) -> str:
    """Return the recipe with every default written out, as YAML that `load_recipe` reads back; always the same text.

    `portable`: how texts that name places are worded, with the variables that they need; None: as they are here.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.representer import SafeRepresenter

    class Representer(SafeRepresenter):  # a class of its own: representers are kept by class, for the whole process
        """Writes text that would read back as something else between quotes, with escapes."""

    Representer.add_representer(str, _represent_text)
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Representer = Representer
    yaml.default_flow_style = None
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = 120
    out = io.StringIO()
    yaml.dump(recipe_to_dict(recipe), out) if portable is None else yaml.dump(_dump_portable(recipe, portable), out)
    return out.getvalue()


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return what `recipe_to_yaml` writes as JSON values."""
    written: dict[str, Any] = _dump_record(recipe, ())
    return written


def _represent_text(representer: Any, text: str) -> Any:
    # ruamel writes "\x85" and its like between single quotes, which read back as a blank, and [?a] and [: a] without
    # quotes, which read back as mappings.
    style = None if text.isprintable() and not text.startswith(("?", ":")) else '"'
    return representer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _dump_portable(recipe: Recipe, portable: Portable) -> dict[str, Any]:
    """Return the recipe's mapping with `vars` before the model, where its author would have put it."""
    before = ("version", "name", "description", "seed")
    written = _dump_record(recipe, (), portable.texts)
    head = {key: written.pop(key) for key in before if key in written}
    return head | ({VARS: portable.variables} if portable.variables else {}) | written


def _dump_record(value: Any, position: Path, worded: Mapping[Path, str] = {}) -> Any:
    """Turn a record into mappings and lists; a key whose value is None is left out, since None is its default.

    `worded`: position -> the text that stands there as it is; every other text is escaped.
    """
    if isinstance(value, BaseModel):
        named = [(field.alias or name, name) for name, field in type(value).model_fields.items()]
        values = [(key, getattr(value, name), (*position, name)) for key, name in named]
        return {key: _dump_record(item, place, worded) for key, item, place in values if item is not None}
    if is_dataclass(value) and not isinstance(value, type):
        named_values = {field.name: getattr(value, field.name) for field in fields(value)}
        return {
            key: _dump_record(item, (*position, key), worded) for key, item in named_values.items() if item is not None
        }
    if isinstance(value, dict):
        return {key: _dump_record(item, (*position, key), worded) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_dump_record(item, (*position, number), worded) for number, item in enumerate(value)]
    return worded.get(position, escape(value)) if isinstance(value, str) else value
