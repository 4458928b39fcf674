"""What two bundles were asked for and what became of their layers, as far as it differs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from compress.errors import RecipeError
from compress.pages.layers import real_layers
from compress.pages.report import describe_sizes
from compress.recipe.places import RecipeFindings, plain
from compress.recipe.yaml_source import read_with_includes
from runtime.judge.findings import Findings
from runtime.tasks.manifest import read_manifest

ABSENT = "-"
"""In place of a value that one side has not."""
ERRORS = ("sqnr_db", "output_error", "error_after", "weight_error", "fit_after")
"""What passes measure of a layer's error, by their names in layers.json."""


@dataclass(frozen=True)
class RecipeChange:
    """A value of the resolved recipes that differs, each side as one line of YAML; `ABSENT` where there is none."""

    path: str
    before: str
    after: str


@dataclass(frozen=True)
class LayerState:
    """What became of a layer: its scheme in words, and its error where one was measured."""

    scheme: str = ABSENT
    error: str = ""
    """The name of what `value` is: sqnr_db, output_error, ..."""
    value: float | None = None
    size_bytes: int | None = None
    """Of its tensors in the candidate's file; None where that is not known."""


@dataclass(frozen=True)
class LayerChange:
    """A layer whose scheme or error differs."""

    layer: str
    before: LayerState
    after: LayerState


def compare_recipes(before: Path, after: Path) -> list[RecipeChange]:
    """Return what differs between the recipes of two bundles, both with every default written out.

    Passes are matched by their kind, so that one more in the middle is one change. Raises RecipeError for a file that
    is no mapping in YAML.
    """
    old, new = (_read_recipe(folder / "recipe.yaml") for folder in (before, after))
    return list(_find_changes("", old, new))


def _read_recipe(file: Path) -> Any:
    findings = RecipeFindings()
    tree = read_with_includes(file, findings)
    if findings.problems:
        raise RecipeError(findings.lines())
    return plain(tree)


def _find_changes(path: str, old: Any, new: Any) -> Iterator[RecipeChange]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            place = f"{path}.{key}" if path else str(key)
            if key not in old or key not in new:
                yield RecipeChange(place, _write(old.get(key), key in old), _write(new.get(key), key in new))
            else:
                yield from _find_changes(place, old[key], new[key])
    elif isinstance(old, list) and isinstance(new, list) and any(isinstance(item, dict) for item in (*old, *new)):
        for first, second in _match_items(old, new):
            place = f"{path}[{second if first is None else first}]"
            if first is None or second is None:
                item = new[second] if first is None else old[first]  # type: ignore[index]
                sides = (ABSENT, _write(item)) if first is None else (_write(item), ABSENT)
                yield RecipeChange(place, *sides)
            else:
                yield from _find_changes(place, old[first], new[second])
    elif old != new:
        yield RecipeChange(path, _write(old), _write(new))


def _match_items(old: Sequence[Any], new: Sequence[Any]) -> Iterator[tuple[int | None, int | None]]:
    """Yield which items of two lists belong together, by what they are: a pass by its kind, a gate by its metric."""
    before, after = ([_name_item(item) for item in items] for items in (old, new))
    for tag, first, last, start, end in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "equal":
            yield from zip(range(first, last), range(start, end), strict=True)
        else:
            yield from ((place, None) for place in range(first, last))
            yield from ((None, place) for place in range(start, end))


def _name_item(item: Any) -> str:
    if not isinstance(item, dict):
        return json.dumps(item)
    return next((f"{key} {item[key]}" for key in ("kind", "metric", "name", "source") if key in item), "")


def _write(value: Any, is_there: bool = True) -> str:
    """Return a value as one line of YAML, which JSON is."""
    if not is_there:
        return ABSENT
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def compare_layers(
    before: Findings, after: Findings, sizes: tuple[Mapping[str, int], Mapping[str, int]] = ({}, {})
) -> list[LayerChange]:
    """Return the layers whose scheme, size or measured error differs, those of `before` first.

    `sizes`: bytes of each layer in both candidates' files, as `measure_layers` gives them.
    """
    old, new = (_describe_layers(side.layers, known) for side, known in zip((before, after), sizes, strict=True))
    names = dict.fromkeys((*old, *new))
    changes = [LayerChange(name, old.get(name, LayerState()), new.get(name, LayerState())) for name in names]
    return [change for change in changes if _differs(change)]


def measure_layers(bundle: Path, report: Findings) -> dict[str, int]:
    """Return the bytes of each layer in the file of the bundle's candidate; nothing of what names no tensors.

    Raises BundleError for a damaged file.
    """
    sizes = describe_sizes(bundle, read_manifest(bundle), report, real_layers(report.layers))
    return {} if sizes is None else {size.name: size.after for size in sizes.layers}


def _describe_layers(rows: Sequence[Any], sizes: Mapping[str, int]) -> dict[str, LayerState]:
    layers = {str(row["layer"]): row for row in real_layers(rows)}
    return {name: replace(_describe_layer(row), size_bytes=sizes.get(name)) for name, row in layers.items()}


def _describe_layer(row: Mapping[str, Any]) -> LayerState:
    action, reason = (str(row.get(key, "")) for key in ("action", "reason"))
    scheme = f"{action} {reason if action == 'kept' else reason.partition(': ')[0]}".strip()
    for error in ERRORS:
        value = row.get(error)
        if isinstance(value, (int, float)) and math.isfinite(value):
            return LayerState(scheme, error, float(value))
    return LayerState(scheme)


def _differs(change: LayerChange) -> bool:
    before, after = change.before, change.after
    if before.value is None or after.value is None or before.error != after.error:
        return before != after
    # two errors of a layer within 1 % are no difference: calibration data differ by as much
    same_error = math.isclose(before.value, after.value, rel_tol=0.01)
    return not same_error or replace(before, value=after.value) != after
