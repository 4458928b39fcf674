"""Images and texts, embedded so that those which belong together lie close."""

from __future__ import annotations

from compress.tasks.base import INT8, Starter, TorchTask

ZERO_SHOT_IMAGE_CLASSIFICATION = TorchTask(
    name="zero-shot-image-classification",
    starter=Starter(
        "dir:model",
        """  # columns image and text: pairs that belong together
  calibration: {source: "parquet:train.parquet", samples: 256}
  evaluation: {source: "parquet:test.parquet"}
""",
        "  - {kind: smoothquant}        # move activation outliers into the weights first\n" + INT8,
        "    - {metric: text_recall_at_1, max_drop: 0.01}   # of each image; image_recall_at_1: of each text\n",
    ),
    loss="outputs",
    auto_class="AutoModelForZeroShotImageClassification",
    outputs={"image_embeds": ("batch", "width"), "text_embeds": ("batch", "width")},
    usual_names={"text": ("caption", "captions")},
)
