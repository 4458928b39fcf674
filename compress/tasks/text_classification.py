"""Texts, or pairs of texts, each of one class."""

from __future__ import annotations

from compress.tasks.base import ACCURACY_GATE, TEXT_DATA, TEXT_PASSES, Starter, TorchTask, read_classes

TEXT_CLASSIFICATION = TorchTask(
    name="text-classification",
    starter=Starter("dir:model", TEXT_DATA, TEXT_PASSES, ACCURACY_GATE),
    loss="classes",
    auto_class="AutoModelForSequenceClassification",
    outputs={"logits": ("batch", "classes")},
    read_labels=read_classes,
    uses_class_names=True,
)
