"""Texts, continued token by token."""

from __future__ import annotations

from runtime.tasks.base import WritesText


class TextGeneration(WritesText):
    """Continue a text. Its outputs are scored as they come (`runtime.decode.scoring.score`)."""

    name = "text-generation"
    about = "text, token by token"
    columns = ("text",)
    preprocess = "language"
    outputs = "tokens"
    always = ("nll", "n_tokens")
