"""Questions about a text, each answered by a piece of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.tasks.base import TEXT_PASSES, Columns, LabelReader, Starter, TorchTask
from runtime.errors import UsageError
from runtime.tasks import find_task
from runtime.tasks.base import MASK, OFFSETS, TEXT_PAIR
from runtime.tasks.question_answering import CONTEXT, read_label, write_label

if TYPE_CHECKING:
    from runtime.encode.preprocess import Preprocessor

UNLABELLED = -100
"""Of a window whose answer is not known."""
AT_ONCE = 256
"""Windows that are tokenized together."""


def _read_answers(reader: LabelReader, column: str, raw: Sequence[Any]) -> list[str]:
    """Read what each question may be answered with, as `write_label` writes it; "" for nothing.

    SQuAD's {"text": [...], "answer_start": [...]}, a list of {"text", "answer_start"}, a list of texts, or a text.
    """
    return [_read_answer(reader, column, row, item) for row, item in enumerate(raw)]


def _read_answer(reader: LabelReader, column: str, row: int, item: Any) -> str:
    if item is None:
        return ""
    if isinstance(item, Mapping):
        texts, begins = item.get("text"), item.get("answer_start")
    else:
        listed = list(item) if isinstance(item, (list, tuple, np.ndarray)) else [item]
        nested = bool(listed) and all(isinstance(one, Mapping) for one in listed)
        texts = [one.get("text") for one in listed] if nested else listed
        begins = [one.get("answer_start") for one in listed] if nested else None
    texts = [texts] if isinstance(texts, str) else texts
    begins = [begins] if isinstance(begins, int) else begins
    if not isinstance(texts, (list, tuple, np.ndarray)) or not all(isinstance(text, str) for text in texts):
        raise reader.fail(
            column, row, "expected answers: {text: [...], answer_start: [...]}, texts, or an empty list for no answer"
        )
    begins = [None] * len(texts) if begins is None else [None if begin is None else int(begin) for begin in begins]
    if len(begins) != len(texts):
        raise reader.fail(column, row, f"{len(texts)} answers and {len(begins)} of answer_start: give each its own")
    return write_label([(begin, str(text)) for begin, text in zip(begins, texts, strict=True)])


def _find_misplaced(columns: Columns) -> tuple[int, str] | None:
    for row, (context, label) in enumerate(zip(columns[CONTEXT], columns.get("label", ()), strict=False)):
        for begin, text in read_label(label):
            if begin is not None and _match(context, begin, text) is None:
                there = context[begin : begin + len(text)] if 0 <= begin <= len(context) else ""
                return row, f"answer '{text}' does not begin at character {begin} of its context: there is '{there}'"
    return None


def _match(context: str, begin: int, text: str) -> re.Match[str] | None:
    """Match the words of `text` at a character of the context, whatever white space is between them."""
    pattern = re.compile(r"\s+".join(map(re.escape, text.split())))
    return pattern.match(context, begin) if begin >= 0 else None


def _find_span(context: str, label: str) -> tuple[int, int] | None:
    """Return the first and the last character but one of the first answer that stands in the context; None if none."""
    for begin, text in read_label(label):
        match = _match(context, context.find(text) if begin is None else begin, text)
        if match is not None:
            return match.span()
    return None


def _place_answers(columns: Columns, preprocessor: Preprocessor) -> np.ndarray | None:
    """Return the first and last token of each window's answer, int64 [windows, 2].

    The first token stands for no answer, which is that of a window without the answer, too; UNLABELLED where what the
    label says is nowhere in the context.
    """
    from runtime.encode.preprocess import split_samples
    from runtime.encode.texts import TextEncoder

    if "label" not in columns:
        return None
    assert isinstance(preprocessor, TextEncoder)
    if preprocessor.padding.left:  # a batch is as wide as its longest text, and places would move with it
        raise UsageError("the tokenizer pads on the left, where labels are counted from: set padding_side: right")
    (view,) = find_task(QUESTION_ANSWERING.name).split_views(columns)
    split = split_samples(preprocessor, view)
    rows, samples = split.columns, split.samples
    targets = np.full((len(samples), 2), UNLABELLED, np.int64)
    for start in range(0, len(samples), AT_ONCE):
        chunk = np.arange(start, min(start + AT_ONCE, len(samples)))
        offsets = preprocessor.tokenize(rows, chunk, facts=(MASK, OFFSETS))[OFFSETS]
        for row, places in zip(chunk, offsets, strict=True):
            context, label = rows[TEXT_PAIR][row], columns["label"][samples[row]]
            span = _find_span(context, label)
            if span is not None or not label:
                targets[row] = _find_tokens(places, span)
    return targets


def _find_tokens(places: np.ndarray, span: tuple[int, int] | None) -> tuple[int, int]:
    """Return the first and last token of a span of characters; (0, 0) where it is not whole in the window."""
    (known,) = np.nonzero(places[:, 0] >= 0)
    if span is None or not known.size or places[known[0], 0] > span[0] or places[known[-1], 1] < span[1]:
        return 0, 0
    first = known[np.flatnonzero(places[known, 1] > span[0])[0]]
    last = known[np.flatnonzero(places[known, 0] < span[1])[-1]]
    return int(first), int(last)


QUESTION_ANSWERING = TorchTask(
    name="question-answering",
    starter=Starter(
        "dir:model",
        """  # question, context, and answers: {text: [...], answer_start: [...]}, or a list of texts
  calibration: {source: "jsonl:train.jsonl", samples: 256}
  evaluation: {source: "jsonl:test.jsonl"}
""",
        TEXT_PASSES,
        "    - {metric: squad_f1, max_drop: 0.01}\n",
    ),
    loss="answer spans",
    auto_class="AutoModelForQuestionAnswering",
    outputs={"start_logits": ("batch", "sequence"), "end_logits": ("batch", "sequence")},
    read_labels=_read_answers,
    usual_names={"label": ("answers", "answer")},
    find_misfit=_find_misplaced,
    make_targets=_place_answers,
)
