"""Texts, or pairs of texts, each of one class."""

from __future__ import annotations

from runtime.tasks.base import Classification, ReadsTexts


class TextClassification(Classification, ReadsTexts):
    """Choose one class for each text, or pair of texts."""

    name = "text-classification"
    about = "one class for each text, or pair of texts"
