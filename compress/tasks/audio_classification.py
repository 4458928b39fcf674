"""Sounds, each of one class."""

from __future__ import annotations

from compress.tasks.base import ACCURACY_GATE, INT8, Starter, TorchTask, read_classes

AUDIO_DATA = """  # audiofolder: one folder for each class; csv, jsonl: columns audio (paths) and label
  calibration: {source: "audiofolder:train", samples: 256}
  evaluation: {source: "audiofolder:test"}
"""

AUDIO_CLASSIFICATION = TorchTask(
    name="audio-classification",
    starter=Starter("dir:model", AUDIO_DATA, INT8, ACCURACY_GATE),
    loss="classes",
    auto_class="AutoModelForAudioClassification",
    outputs={"logits": ("batch", "classes")},
    read_labels=read_classes,
    uses_class_names=True,
)
