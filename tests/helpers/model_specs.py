"""Specs of small models and what they are fed with, and folders that differ from another in their config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compress.facts import SampleShapes
from compress.specs import ModelSpec
from compress.zoo.digits_resnet import DIGITS

DIGITS_SPEC = ModelSpec(
    source="python:compress.zoo.digits_resnet:digits_resnet",
    weights=str(DIGITS / "digits_resnet.safetensors"),
    task="image-classification",
)
DIGITS_FEEDS: SampleShapes = {"pixel_values": ((1, 8, 8), "float32")}
TEXT_FEEDS: SampleShapes = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), ((16,), "int64"))


def text_spec(folder: Path, task: Any = "text-classification") -> ModelSpec:
    return ModelSpec(source=f"dir:{folder}", task=task)


def changed_config(folder: Path, copy: Path, **changes: Any) -> Path:
    """A copy of a model folder with other values in config.json."""
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps(config))
    return copy
