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


class CheckpointExport(Record):
    """A Hugging Face folder of safetensors, its quantized layers packed as inference engines read them."""

    kind: Literal["checkpoint"] = "checkpoint"
    target: TargetName | None = None
    """The engine that it is for; default: transformers."""
    format: Literal["compressed-tensors", "gptq"] = "compressed-tensors"
    """How quantized layers are stored; gptq holds weight-only integers of 2, 3, 4 and 8 bits, one scheme in a model."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of everything that stays float; default: what the source checkpoint has each tensor in."""
    max_shard_gib: Annotated[float, Field(gt=0)] = 5
    """The largest file."""


Export = OnnxExport | CheckpointExport
"""All of them; `kind` tells them apart."""
