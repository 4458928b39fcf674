"""Texts, continued token by token."""

from __future__ import annotations

from runtime.tasks.base import Task


class TextGeneration(Task):
    """Continue a text. Its outputs are scored as they come (`runtime.decode.scoring.score`)."""

    name = "text-generation"
    about = "text, token by token"
    columns = ("text",)
    preprocess = "language"
    outputs = "tokens"
    always = ("nll", "n_tokens")
    generates = True
    latency = "tpot"
