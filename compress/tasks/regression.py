"""One number or several for each sample: of tensors, images, sounds or texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from compress.tasks.audio_classification import AUDIO_DATA
from compress.tasks.base import INT8, TEXT_DATA, TEXT_PASSES, LabelReader, Starter, TorchTask

GATE = "    - {metric: mae, max_drop: 0.01}           # in the label's unit; rmse and r2 are measured, too\n"
ARRAYS = """  # npz: an array for each input of the model, by its name, and label: [N] or [N, numbers]
  calibration: {source: "npz:train.npz", samples: 512}
  evaluation: {source: "npz:test.npz"}
"""
IMAGES = """  # npz: arrays image and label; csv, jsonl, parquet: columns of that name
  calibration: {source: "npz:train.npz", samples: 512}
  evaluation: {source: "npz:test.npz"}
"""
SOUNDS = AUDIO_DATA.replace("audiofolder: one folder for each class; csv", "csv").replace("audiofolder:", "jsonl:")
SOUNDS = SOUNDS.replace(':train"', ':train.jsonl"').replace(':test"', ':test.jsonl"')


def read_labels(reader: LabelReader, column: str, raw: Sequence[Any]) -> np.ndarray:
    """Read a number a sample, float64 [N], or a list of as many for each, float64 [N, K]."""
    rows = [item.tolist() if isinstance(item, np.ndarray) else item for item in raw]
    if not any(isinstance(item, (list, tuple)) for item in rows):
        return reader.read_numbers(column, rows).astype(np.float64)
    width = len(rows[0]) if isinstance(rows[0], (list, tuple)) else 0
    for row, item in enumerate(rows):
        if not isinstance(item, (list, tuple)) or len(item) != width or not width:
            found = f"{len(item)} numbers" if isinstance(item, (list, tuple)) else "one number"
            raise reader.fail(column, row, f"{found}, and the first row has {width or 'one'}; give each as many")
    flat = reader.at(np.repeat(np.arange(len(rows)), width))
    numbers = flat.read_numbers(column, [number for item in rows for number in item])
    return numbers.astype(np.float64).reshape(len(rows), width)


REGRESSIONS = (
    TorchTask(
        name="regression",
        starter=Starter("onnx:model.onnx", ARRAYS, INT8, GATE),
        loss="numbers",
        pipeline_tag="",
        read_labels=read_labels,
    ),
    *(
        TorchTask(
            name=f"{kind}-regression",
            starter=Starter(source, data, passes, GATE),
            loss="numbers",
            outputs={"logits": ()},
            model_task=f"{kind}-classification",
            problem_type="regression",
            read_labels=read_labels,
        )
        for kind, source, data, passes in (
            ("image", "python:model.py:build", IMAGES, INT8),
            ("audio", "dir:model", SOUNDS, INT8),
            ("text", "dir:model", TEXT_DATA, TEXT_PASSES),
        )
    ),
)
