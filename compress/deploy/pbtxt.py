"""Protocol buffers in their text form, as Triton reads its configurations: written, never parsed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Word:
    """The name of an enumeration's value, which stands without quotation marks."""

    name: str


def to_pbtxt(message: Mapping[str, Any]) -> str:
    """Fields in their order; a list is a repeated field (of scalars: in brackets), a mapping a message of its own."""
    return "\n".join(_lines(message)) + "\n"


def _lines(message: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in message.items():
        for one in _repeated(value):
            if isinstance(one, Mapping):
                yield f"{indent}{name} {{"
                yield from _lines(one, indent + "  ")
                yield f"{indent}}}"
            else:
                yield f"{indent}{name}: {_scalar(one)}"


def _repeated(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)) and any(isinstance(one, Mapping) for one in value):
        return list(value)
    return [value]


def _scalar(value: Any) -> str:
    if isinstance(value, Word):
        return value.name
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[ {', '.join(map(_scalar, value))} ]"
    return json.dumps(value)
