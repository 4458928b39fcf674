"""Images, each of one class."""

from __future__ import annotations

from compress.tasks.base import ACCURACY_GATE, INT8, Starter, TorchTask, read_classes

IMAGE_CLASSIFICATION = TorchTask(
    name="image-classification",
    starter=Starter(
        "python:model.py:build",
        """  # npz: arrays image and label; imagefolder: one folder for each class
  calibration: {source: "npz:train.npz", samples: 512}
  evaluation: {source: "npz:test.npz"}
""",
        "  - {kind: fold_batchnorm}     # into the convolutions; exact\n" + INT8,
        ACCURACY_GATE,
    ),
    loss="classes",
    auto_class="AutoModelForImageClassification",
    outputs={"logits": ("batch", "classes")},
    read_labels=read_classes,
    uses_class_names=True,
)
