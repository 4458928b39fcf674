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
    """Format fields in order; a list is a repeated field (of scalars: in brackets), a mapping a message of its own."""
    return "\n".join(_format_lines(message)) + "\n"


def _format_lines(message: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in message.items():
        for item in _split_repeated(value):
            if isinstance(item, Mapping):
                yield f"{indent}{name} {{"
                yield from _format_lines(item, indent + "  ")
                yield f"{indent}}}"
            else:
                yield f"{indent}{name}: {_format_scalar(item)}"


def _split_repeated(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        return list(value)
    return [value]


def _format_scalar(value: Any) -> str:
    if isinstance(value, Word):
        return value.name
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[ {', '.join(map(_format_scalar, value))} ]"
    return json.dumps(value)
