"""The vocabulary of a recipe's `export:`. The exporters themselves are in `compress.export`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from compress.passes.base import Record
from compress.targets import TargetName


class OnnxExport(Record):
    """An ONNX graph in the flavour that `target` is fast on (default: the recipe's target)."""

    kind: Literal["onnx"] = "onnx"
    target: TargetName | None = None
    opset: Annotated[int, Field(ge=17, le=23)] = 20
