"""Texts and pairs of texts: what the tasks that read them share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.tasks.base import Task

TEXT, TEXT_PAIR = "text", "text_pair"
TEXT_COLUMNS = (TEXT, TEXT_PAIR)


class ReadsTexts(Task):
    """A task that reads a text, or two."""

    columns = TEXT_COLUMNS
    preprocess = "text"

    def to_columns(self, samples: Any) -> dict[str, Any]:
        """Return a list of texts, or of (text, text), as columns; columns as they are. UsageError."""
        columns = super().to_columns(samples)
        if isinstance(samples, Mapping):
            return columns
        texts = list(columns[TEXT])
        if texts and all(isinstance(text, (tuple, list)) and len(text) == 2 for text in texts):
            return {TEXT: [first for first, _ in texts], TEXT_PAIR: [second for _, second in texts]}
        return {TEXT: texts}
