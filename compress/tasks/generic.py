"""Models that are fed by the names of their inputs."""

from __future__ import annotations

from compress.tasks.base import INT8, Starter, TorchTask

GENERIC = TorchTask(
    name="generic",
    starter=Starter(
        "onnx:model.onnx",
        """  # npz: one array for each input of the model, by its name
  calibration: {source: "npz:train.npz", samples: 512}
  evaluation: {source: "npz:test.npz"}
""",
        INT8,
        "    - {metric: sqnr_db, min: 25}            # against the baseline's outputs\n",
    ),
    loss="outputs",
    pipeline_tag="",
)
