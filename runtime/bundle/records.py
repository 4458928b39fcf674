"""Frozen dataclasses to JSON and back, with every type checked: a manifest comes from someone we do not know."""

from __future__ import annotations

import math
import types
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

PYDANTIC_CONFIG: dict[str, object] = {"extra": "forbid"}
"""How the build side's recipe reads the records that it embeds; a plain dict, because pydantic is not needed here."""


def check_file_name(field: str, name: str) -> None:
    """Raise ValueError where `name` is not that of a file, but a path or nothing."""
    if not name or "/" in name or "\\" in name or name in (".", ".."):
        raise ValueError(f"{field} is '{name}': give the name of a file inside the model's folder")


class Mismatch(ValueError):
    """The data does not describe the record: the message starts with the place and says what was expected."""


def to_json(value: Any) -> Any:
    """Return a record (or a tuple, dict, number, string, None) as what `json` writes: objects, lists, scalars."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


def from_json(cls: type[T], data: Any, where: str, measured: bool = False) -> T:
    """Return the record `cls` that `data` (parsed JSON) describes.

    `measured`: it is of what was measured: null where a number belongs is NaN, and keys that the record lacks, of a
    version that measures more, are left out.

    Raises Mismatch (a ValueError), its message starting with the place (`where.field[2]`), on a missing or unknown key,
    a wrong type, or a value that the record itself refuses.
    """
    if not isinstance(data, dict):
        raise Mismatch(f"{where}: expected an object, found {_name_kind(data)}")
    known = {f.name: f for f in fields(cls)}
    if measured:
        data = {name: item for name, item in data.items() if name in known}
    unknown = sorted(map(str, data.keys() - known.keys()))
    if unknown:
        raise Mismatch(f"{where}.{unknown[0]}: unknown key; known: {', '.join(known)}")
    required = [name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in required if name not in data]
    if missing:
        raise Mismatch(f"{where}.{missing[0]}: missing")
    hints = _read_hints(cls)
    values = {name: _read_value(hints[name], item, f"{where}.{name}", measured) for name, item in data.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise Mismatch(f"{where}: {error}") from error


@cache
def _read_hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _read_value(hint: Any, data: Any, where: str, measured: bool) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _read_union(args, data, where, measured)
    if origin is Literal:
        if type(data) is not str or data not in args:
            raise Mismatch(f"{where}: {data!r} is not one of {', '.join(map(repr, args))}")
        return data
    if origin is tuple:
        return _read_tuple(args, data, where, measured)
    if origin is dict:
        if not isinstance(data, dict):
            raise Mismatch(f"{where}: expected an object, found {_name_kind(data)}")
        return {key: _read_value(args[1], item, f"{where}[{key!r}]", measured) for key, item in data.items()}
    if is_dataclass(hint) and isinstance(hint, type):
        return from_json(hint, data, where, measured)
    if hint in (Any, object):
        return data
    if hint is float and data is None and measured:
        return math.nan
    if hint is float and type(data) is int:
        return float(data)
    if type(data) is not hint:  # bool is an int to isinstance
        raise Mismatch(f"{where}: expected {_KINDS[hint]}, found {_name_kind(data)}")
    return data


def _read_union(hints: tuple[Any, ...], data: Any, where: str, measured: bool) -> Any:
    """Read a value as the first alternative that fits; with one alternative besides None, errors are its own."""
    if data is None and type(None) in hints:
        return None
    alternatives = [hint for hint in hints if hint is not type(None)]
    if len(alternatives) == 1:
        return _read_value(alternatives[0], data, where, measured)
    problems = []
    for hint in alternatives:
        try:
            return _read_value(hint, data, where, measured)
        except ValueError as error:
            problems.append(str(error))
    raise Mismatch(" or ".join(problems))


def _read_tuple(hints: tuple[Any, ...], data: Any, where: str, measured: bool) -> tuple[Any, ...]:
    if not isinstance(data, (list, tuple)):
        raise Mismatch(f"{where}: expected a list, found {_name_kind(data)}")
    if hints[-1] is Ellipsis:
        hints = hints[:1] * len(data)
    if len(data) != len(hints):
        raise Mismatch(f"{where}: expected {len(hints)} items, found {len(data)}")
    return tuple(
        _read_value(hint, item, f"{where}[{i}]", measured)
        for i, (hint, item) in enumerate(zip(hints, data, strict=True))
    )


_KINDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


def _name_kind(data: Any) -> str:
    return _KINDS.get(type(data), "a list" if isinstance(data, (list, tuple)) else "an object")
