"""Any number of classes for each sample: of tensors, images, sounds or texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from compress.tasks.base import INT8, TEXT_PASSES, LabelReader, Starter, TorchTask

GATE = (
    "    - {metric: average_precision_macro, max_drop: 0.01}   # mAP; auc_macro and label_f1_macro are measured, too\n"
)
SEPARATORS = re.compile(r"\s*[|;,]\s*")
"""Between the names of classes in one text, as a csv file has them."""
DATA = """  # label: a list of class names or numbers for each sample (in csv: cat|dog), or 0 and 1 for each class
  calibration: {source: "KIND:train.KIND", samples: 512}
  evaluation: {source: "KIND:test.KIND"}
"""


def read_labels(reader: LabelReader, column: str, raw: Sequence[Any]) -> np.ndarray:
    """Read the classes of each sample as uint8 [N, C], 1 for those that it has.

    A sample's label is a list of class names or numbers, names in one text with | ; or , between them, or one 0 or 1
    for each class: a row of an array, or a list of booleans or floats.
    """
    n_classes = reader.count_classes()
    if isinstance(raw, np.ndarray) and raw.ndim == 2:
        return _read_flags(reader, column, list(raw), n_classes)
    rows = [_split(item) for item in raw]
    for row, item in enumerate(rows):
        if not isinstance(item, list):
            raise reader.fail(column, row, f"expected a list of classes, found {type(item).__name__}")
    if any(isinstance(value, (bool, float)) for item in rows for value in item):
        return _read_flags(reader, column, rows, n_classes)
    flat = [value for item in rows for value in item]
    at = reader.at(np.repeat(np.arange(len(rows)), [len(item) for item in rows]))
    ids = at.read_class_ids(column, at.read_numbers(column, flat), 0) if flat else np.zeros(0, np.int64)
    labels = np.zeros((len(rows), n_classes or int(ids.max(initial=0)) + 1), np.uint8)
    labels[np.repeat(np.arange(len(rows)), [len(item) for item in rows]), ids] = 1
    return labels


def _split(item: Any) -> Any:
    if isinstance(item, str):
        return [name for name in SEPARATORS.split(item.strip()) if name]
    if isinstance(item, (list, tuple, np.ndarray)):
        return [value.item() if isinstance(value, np.generic) else value for value in item]
    return item


def _read_flags(reader: LabelReader, column: str, rows: Sequence[Any], n_classes: int | None) -> np.ndarray:
    width = n_classes or len(rows[0])
    for row, flags in enumerate(rows):
        if len(flags) != width:
            raise reader.fail(column, row, f"{len(flags)} numbers for {width} classes; give a 0 or 1 for each")
        wrong = next((flag for flag in flags if flag not in (0, 1)), None)
        if wrong is not None:
            raise reader.fail(column, row, f"holds {wrong}; give a 0 or 1 for each of the {width} classes")
    return np.array(rows, np.uint8).reshape(len(rows), width)


MULTI_LABEL_TASKS = tuple(
    TorchTask(
        name=f"{kind}-multi-label-classification".removeprefix("-"),
        starter=Starter(source, DATA.replace("KIND", data), passes, GATE),
        loss="label sets",
        model_task=f"{kind}-classification" if kind else "",
        pipeline_tag=None if kind else "",
        problem_type="multi_label_classification",
        outputs={"logits": ("batch", "classes")},
        read_labels=read_labels,
        uses_class_names=True,
    )
    for kind, source, data, passes in (
        ("", "onnx:model.onnx", "npz", INT8),
        ("image", "dir:model", "parquet", INT8),
        ("audio", "dir:model", "jsonl", INT8),
        ("text", "dir:model", "jsonl", TEXT_PASSES),
    )
)
