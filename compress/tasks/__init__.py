"""Every task by name, as torch and data need it: one file each, then those of installed packages. Imports no torch."""

from __future__ import annotations

from functools import partial

from compress.tasks.audio_classification import AUDIO_CLASSIFICATION
from compress.tasks.audio_text_to_text import AUDIO_TEXT_TO_TEXT
from compress.tasks.automatic_speech_recognition import AUTOMATIC_SPEECH_RECOGNITION
from compress.tasks.base import TorchTask
from compress.tasks.ctc_speech_recognition import CTC_SPEECH_RECOGNITION
from compress.tasks.depth_estimation import DEPTH_ESTIMATION
from compress.tasks.feature_extraction import FEATURE_EXTRACTION
from compress.tasks.generic import GENERIC
from compress.tasks.image_classification import IMAGE_CLASSIFICATION
from compress.tasks.image_text_to_text import IMAGE_TEXT_TO_TEXT
from compress.tasks.multi_label_classification import MULTI_LABEL_TASKS
from compress.tasks.object_detection import OBJECT_DETECTION
from compress.tasks.question_answering import QUESTION_ANSWERING
from compress.tasks.regression import REGRESSIONS
from compress.tasks.semantic_segmentation import SEMANTIC_SEGMENTATION
from compress.tasks.text2text_generation import TEXT2TEXT_GENERATION
from compress.tasks.text_classification import TEXT_CLASSIFICATION
from compress.tasks.text_generation import TEXT_GENERATION
from compress.tasks.token_classification import TOKEN_CLASSIFICATION
from compress.tasks.zero_shot_image_classification import ZERO_SHOT_IMAGE_CLASSIFICATION
from runtime.plugins import TORCH_TASK_GROUP, PluginTable, check_entry

_OWN = {
    task.name: task
    for task in (
        IMAGE_CLASSIFICATION,
        AUDIO_CLASSIFICATION,
        OBJECT_DETECTION,
        SEMANTIC_SEGMENTATION,
        DEPTH_ESTIMATION,
        TEXT_CLASSIFICATION,
        TOKEN_CLASSIFICATION,
        QUESTION_ANSWERING,
        FEATURE_EXTRACTION,
        TEXT_GENERATION,
        IMAGE_TEXT_TO_TEXT,
        AUDIO_TEXT_TO_TEXT,
        TEXT2TEXT_GENERATION,
        AUTOMATIC_SPEECH_RECOGNITION,
        CTC_SPEECH_RECOGNITION,
        ZERO_SHOT_IMAGE_CLASSIFICATION,
        *MULTI_LABEL_TASKS,
        *REGRESSIONS,
        GENERIC,
    )
}

TORCH_TASKS: PluginTable[TorchTask] = PluginTable(TORCH_TASK_GROUP, _OWN, partial(check_entry, kind=TorchTask))

__all__ = ["TORCH_TASKS", "TorchTask", "find_torch_task"]


def find_torch_task(name: str) -> TorchTask:
    """Return the task of that name; KeyError where there is none: a recipe's has been checked."""
    return TORCH_TASKS[name]
