"""Sounds and texts, and the texts that go on from them: language models that also hear."""

from __future__ import annotations

from runtime.tasks.text_generation import TextGeneration


class AudioTextToText(TextGeneration):
    """Continue a text in which there may be sounds."""

    name = "audio-text-to-text"
    about = "text, token by token, by a model that also hears"
