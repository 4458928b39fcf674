"""Texts, each word of one class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.tasks.base import TEXT_PASSES, Columns, LabelReader, Starter, TorchTask
from runtime.errors import UsageError
from runtime.tasks.token_classification import UNLABELLED, join_words, mark_first_tokens

if TYPE_CHECKING:
    from runtime.encode.preprocess import Preprocessor


def _read_tags(reader: LabelReader, column: str, raw: Sequence[Any]) -> np.ndarray:
    """Read the tags of each text's words, by number or name, listed or with spaces between: int64 [N, most words]."""
    rows = [item.split() if isinstance(item, str) else item for item in raw]
    for row, tags in enumerate(rows):
        if not isinstance(tags, (list, tuple, np.ndarray)):
            raise reader.fail(column, row, f"expected a list of tags, one for each word, found {type(tags).__name__}")
    lengths = [len(tags) for tags in rows]
    at = reader.at(np.repeat(np.arange(len(rows)), lengths))
    flat = [tag.item() if isinstance(tag, np.generic) else tag for tags in rows for tag in tags]
    labels = np.full((len(rows), max(lengths, default=0)), UNLABELLED, np.int64)
    filled = np.arange(labels.shape[1]) < np.array(lengths)[:, None]
    if flat:
        labels[filled] = at.read_class_ids(column, at.read_numbers(column, flat), 0)
    return labels


def _find_misaligned(columns: Columns) -> tuple[int, str] | None:
    if "label" not in columns or "text" not in columns:
        return None
    for row, (text, labels) in enumerate(zip(columns["text"], columns["label"], strict=True)):
        n_words, n_tags = len(text.split()), int((labels != UNLABELLED).sum())
        if n_words != n_tags:
            return row, f"{n_tags} tags for {n_words} words (what stands between white space); give each word one"
    return None


def _label_first_tokens(columns: Columns, preprocessor: Preprocessor) -> np.ndarray | None:
    """Return for each token its word's label where it is the word's first, else UNLABELLED: int64 [n, most tokens]."""
    from runtime.encode.texts import TextEncoder

    if "label" not in columns:
        return None
    assert isinstance(preprocessor, TextEncoder)
    words = preprocessor.tokenize(columns, facts=("word_ids",))["word_ids"]
    if preprocessor.padding.left:  # a batch is as wide as its longest text, and places would move with it
        raise UsageError("the tokenizer pads on the left, where labels are counted from: set padding_side: right")
    labels = np.asarray(columns["label"])
    of_words = np.take_along_axis(labels, np.clip(words, 0, labels.shape[1] - 1), axis=1)
    return np.where(mark_first_tokens(words), of_words, UNLABELLED)


TOKEN_CLASSIFICATION = TorchTask(
    name="token-classification",
    starter=Starter(
        "dir:model",
        """  # text: words with spaces between, or a list of them; label: a list of tags, one for each word
  calibration: {source: "jsonl:train.jsonl", samples: 512}
  evaluation: {source: "jsonl:test.jsonl"}
""",
        TEXT_PASSES,
        "    - {metric: span_f1, max_drop: 0.01}\n",
    ),
    loss="token classes",
    auto_class="AutoModelForTokenClassification",
    outputs={"logits": ("batch", "sequence", "classes")},
    read_labels=_read_tags,
    usual_names={"text": ("tokens", "words"), "label": ("ner_tags", "tags")},
    make_text=join_words,
    needs_class_names=True,
    filler=UNLABELLED,
    find_misfit=_find_misaligned,
    make_targets=_label_first_tokens,
)
