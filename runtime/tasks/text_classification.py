"""Texts, or pairs of texts, each of one class."""

from __future__ import annotations

from runtime.tasks.classes import Classification
from runtime.tasks.texts import ReadsTexts


class TextClassification(Classification, ReadsTexts):
    """Choose one class for each text, or pair of texts."""

    name = "text-classification"
    about = "one class for each text, or pair of texts"
