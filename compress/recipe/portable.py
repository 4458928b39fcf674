"""A recipe's text without paths of this machine, so that two machines that build the same write the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from pydantic import BaseModel

from compress.recipe.places import Path
from compress.recipe.schema import Recipe, Wording
from compress.recipe.variables import escape, names_in
from compress.specs import NamesPlace
from runtime.bundle.format import Judgement
from runtime.tasks.metrics import is_own

_KIND = re.compile(r"([a-z]+:)?(.*)", re.DOTALL)
_PLAIN = ("data", "passes", "also", "source", "validate_", "gates")
"""Keys of a position that make no name for a folder."""


@dataclass
class Portable:
    """What the texts of a recipe that name places become.

    `texts`: position -> the text to write, with `${name}` where a folder of this machine would stand. `variables`: name
    -> what the recipe's `vars` say of it: the author's own words, or the bare name. `folders`: name -> the folder here.
    """

    texts: dict[Path, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)


def make_portable(recipe: Recipe) -> Portable:
    """Name every folder of this machine in the recipe's texts that name places.

    A text that its file words with variables is written so again; a path from the root or the home folder is worded
    with a new variable for its folder; any other text stays.
    """
    portable = Portable()
    for position, text in walk_places(recipe, ()):
        # a record's field may be called otherwise than its key, which pydantic keeps for itself: validate_
        worded = recipe.wording.texts.get((str(position[0]).rstrip("_"), *position[1:]))
        known = worded is not None and names_in(worded) <= recipe.wording.variables.keys()
        if worded is not None and known and not _is_absolute(worded):
            portable.texts[position] = worded
            _write_variables(names_in(worded), recipe.wording, portable)
        elif _is_absolute(text):
            portable.texts[position] = _name_folder(text, position, recipe, portable)
        else:
            portable.texts[position] = escape(text)
    return portable


def walk_places(value: Any, position: Path) -> Iterator[tuple[Path, str]]:
    """Yield every text of a record that names a place, with its position."""
    if isinstance(value, BaseModel):
        for name, about in type(value).model_fields.items():
            inner = getattr(value, name)
            if isinstance(inner, str) and any(isinstance(mark, NamesPlace) for mark in about.metadata):
                yield (*position, name), inner
            elif not isinstance(inner, str):
                yield from walk_places(inner, (*position, name))
    elif isinstance(value, Judgement):
        named: list[tuple[Path, str]] = [(("metrics", i), name) for i, name in enumerate(value.metrics)]
        named += [(("gates", i, "metric"), gate.metric) for i, gate in enumerate(value.gates)]
        yield from (((*position, *place), text) for place, text in named if is_own(text))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from walk_places(inner, (*position, key))
    elif isinstance(value, tuple | list):
        for number, inner in enumerate(value):
            yield from walk_places(inner, (*position, number))


def _is_absolute(text: str) -> bool:
    """Return whether this is a path from the root or the home folder, also behind `dir:` and its like."""
    match = _KIND.fullmatch(text)
    return match is not None and match[1] != "hf:" and match[2].startswith(("/", "~"))


def _write_variables(names: set[str], wording: Wording, portable: Portable) -> None:
    """Write the variables of these names, and those that they stand on."""
    for name in sorted(names - portable.variables.keys()):
        variable = wording.variables[name]
        absolute = _is_absolute(variable.written)
        portable.variables[name] = name if absolute else variable.written
        portable.folders[name] = variable.value
        if not absolute:
            _write_variables(names_in(variable.written), wording, portable)


def _name_folder(text: str, position: Path, recipe: Recipe, portable: Portable) -> str:
    """Word a path with a variable for the folder that it lies in."""
    kind, place, factory = split_place(text)
    folder, name = str(PurePosixPath(place).parent), PurePosixPath(place).name
    taken = {*recipe.wording.variables, *portable.variables}
    known = (n for n, f in portable.folders.items() if f == folder and portable.variables[n] == n)
    variable = next(known, None) or _free_name(position, taken)
    portable.variables[variable], portable.folders[variable] = variable, folder
    return f"{kind}${{{variable}}}/{escape(name + factory)}"


def split_place(text: str) -> tuple[str, str, str]:
    """Return the kind of a text that names a place ("onnx:", "" without one), its path, and ":factory" of Python."""
    match = _KIND.fullmatch(text)
    assert match is not None
    kind, path = match[1] or "", match[2]
    place, colon, factory = path.rpartition(":") if kind == "python:" else (path, "", "")
    return kind, place, colon + factory


def _free_name(position: Path, taken: set[str]) -> str:
    """Choose a variable's name after its position: model, weights, calibration, student, ..."""
    stem = [str(key) for key in position if isinstance(key, str) and key not in _PLAIN][-1]
    return next(name for name in (stem, *(f"{stem}_{i}" for i in range(2, len(taken) + 3))) if name not in taken)
