"""Texts, each to another: a translation, a summary, an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.bundle.columns import Columns
from runtime.metrics.texts import unpack_texts
from runtime.tasks.base import TEXT, Tensors, WritesText


class WritesAnswers(WritesText):
    """A task of encoder-decoders: read a sample, and write a text.

    Outputs are what `runtime.decode.answers.score_answers` gives: sums over each reference's tokens, and the answers.
    """

    preprocess = "seq2seq"
    outputs = "texts"
    always = ("nll", "n_tokens", "answer")
    encodes = True

    def split_views(self, columns: Columns) -> list[dict[str, Any]]:
        """Return the columns with the labels, for they are what the decoder reads."""
        return [dict(columns)]

    def predict(self, outputs: Tensors, class_names: Sequence[str]) -> list[Any] | None:
        """Return {"label": what was written} for each sample."""
        return [{"label": text} for text in unpack_texts(outputs["answer"])]


class Text2TextGeneration(WritesAnswers):
    """Write a text for each text: T5, BART, Marian and the like."""

    name = "text2text-generation"
    about = "a text for each text, by an encoder and a decoder"
    columns = (TEXT,)
