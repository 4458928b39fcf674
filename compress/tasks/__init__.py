"""Every task by name, as torch and data need it: one file each, listed here. Nothing here imports torch."""

from __future__ import annotations

from compress.tasks.base import TorchTask
from compress.tasks.feature_extraction import FEATURE_EXTRACTION
from compress.tasks.generic import GENERIC
from compress.tasks.image_classification import IMAGE_CLASSIFICATION
from compress.tasks.text_classification import TEXT_CLASSIFICATION
from compress.tasks.text_generation import TEXT_GENERATION
from compress.tasks.token_classification import TOKEN_CLASSIFICATION

TORCH_TASKS: dict[str, TorchTask] = {
    task.name: task
    for task in (
        IMAGE_CLASSIFICATION,
        TEXT_CLASSIFICATION,
        TOKEN_CLASSIFICATION,
        FEATURE_EXTRACTION,
        TEXT_GENERATION,
        GENERIC,
    )
}

__all__ = ["TORCH_TASKS", "TorchTask", "find_torch_task"]


def find_torch_task(name: str) -> TorchTask:
    """Return the task of that name; KeyError where there is none: a recipe's has been checked."""
    return TORCH_TASKS[name]
