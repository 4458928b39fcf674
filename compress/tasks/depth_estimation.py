"""Images, each pixel with its depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from compress.tasks.base import INT8, LabelReader, Starter, TorchTask


def _read_depths(reader: LabelReader, column: str, raw: Sequence[Any]) -> Any:
    """Read a map of depths a sample, 0 where none is known: float32 [N, H, W], or a list where sizes differ."""
    maps = [np.asarray(item) for item in raw]
    for row, depths in enumerate(maps):
        if depths.ndim != 2 or depths.dtype.kind not in "iuf" or not np.isfinite(depths).all():
            problem = f"found {depths.dtype} {list(depths.shape)}" if depths.ndim != 2 else "found others"
            raise reader.fail(column, row, f"depths are finite numbers [height, width], 0 for unknown ones; {problem}")
    floats = [depths.astype(np.float32) for depths in maps]
    return np.stack(floats) if len({depths.shape for depths in floats}) == 1 else floats


DEPTH_ESTIMATION = TorchTask(
    name="depth-estimation",
    starter=Starter(
        "dir:model",
        """  # npz: array image, and label where depths are known: [N, height, width] of the model's output
  calibration: {source: "imagefolder:train", samples: 128, columns: {image: image}}
  evaluation: {source: "imagefolder:test", columns: {image: image}}
""",
        INT8,
        "    - {metric: cosine, min: 0.99}       # of the float model's depths; with labels abs_rel and delta1\n",
    ),
    loss="outputs",
    auto_class="AutoModelForDepthEstimation",
    outputs={"predicted_depth": ("batch", "height", "width")},
    any_outputs=True,
    read_labels=_read_depths,
    usual_names={"label": ("depth", "depth_map")},
    tables=("MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",),
)
