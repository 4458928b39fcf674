"""Every task by name: one file each, listed here; then those of installed packages."""

from __future__ import annotations

from functools import partial

from runtime.errors import UsageError
from runtime.plugins import TASK_GROUP, PluginTable, check_entry
from runtime.tasks.audio_classification import AudioClassification
from runtime.tasks.audio_text_to_text import AudioTextToText
from runtime.tasks.automatic_speech_recognition import AutomaticSpeechRecognition
from runtime.tasks.base import Task
from runtime.tasks.ctc_speech_recognition import CtcSpeechRecognition
from runtime.tasks.depth_estimation import DepthEstimation
from runtime.tasks.feature_extraction import FeatureExtraction
from runtime.tasks.image_classification import ImageClassification
from runtime.tasks.image_text_to_text import ImageTextToText
from runtime.tasks.multi_label_classification import MULTI_LABEL_TASKS
from runtime.tasks.object_detection import ObjectDetection
from runtime.tasks.question_answering import QuestionAnswering
from runtime.tasks.regression import REGRESSIONS
from runtime.tasks.semantic_segmentation import SemanticSegmentation
from runtime.tasks.text2text_generation import Text2TextGeneration
from runtime.tasks.text_classification import TextClassification
from runtime.tasks.text_generation import TextGeneration
from runtime.tasks.token_classification import TokenClassification
from runtime.tasks.zero_shot_image_classification import ZeroShotImageClassification
from runtime.words import suggest

_OWN = {
    task.name: task
    for task in (
        ImageClassification(),
        AudioClassification(),
        ObjectDetection(),
        SemanticSegmentation(),
        DepthEstimation(),
        TextClassification(),
        TokenClassification(),
        QuestionAnswering(),
        FeatureExtraction(),
        TextGeneration(),
        ImageTextToText(),
        AudioTextToText(),
        Text2TextGeneration(),
        AutomaticSpeechRecognition(),
        CtcSpeechRecognition(),
        ZeroShotImageClassification(),
        *MULTI_LABEL_TASKS,
        *REGRESSIONS,
        Task(),
    )
}

TASKS: PluginTable[Task] = PluginTable(TASK_GROUP, _OWN, partial(check_entry, kind=Task))

__all__ = ["TASKS", "Task", "find_task"]


def find_task(name: str) -> Task:
    """Return the task of that name. UsageError with a near name where there is none."""
    if name not in TASKS:
        raise UsageError(f"unknown task '{name}'{suggest(name, TASKS)}")
    return TASKS[name]
