"""The vocabulary of a recipe's `export:`. The exporters themselves are in `compress.export`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from compress.facts import LOWEST_OPSET
from compress.passes.base import Record
from compress.targets import TargetName


CHECKPOINT_TARGET: TargetName = "transformers"
"""What a checkpoint is for where the recipe does not say."""


class OnnxExport(Record):
    """An ONNX graph in the flavour that `target` is fast on (default: the recipe's target)."""

    kind: Literal["onnx"] = "onnx"
    target: TargetName | None = None
    """The runtime that the file is for; default: the recipe's target."""
    opset: Annotated[int, Field(ge=LOWEST_OPSET, le=23)] = 20
    """Of a torch model's export; an onnx: source keeps its own, raised to 17 if it is older."""
