"""Questions about a text, each answered by a piece of it."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.bundle.columns import Array, Columns, take_texts
from runtime.bundle.tensors import TensorSpec
from runtime.encode.texts import TextPreprocess
from runtime.errors import BundleError, UsageError
from runtime.metrics.base import Columns as Counts
from runtime.metrics.base import Flaws, Metric, Outputs, remember
from runtime.tasks.base import (
    MASK,
    OFFSETS,
    TEXT,
    TEXT_PAIR,
    BatchFacts,
    Task,
    Tensors,
    describe_shapes,
    one_output,
    rename,
    softmax,
)

if TYPE_CHECKING:
    from runtime.encode.split import Split

QUESTION, CONTEXT = "question", "context"
N_BEST = 5
"""Answers that are kept of each question."""
NONE = float(np.finfo(np.float32).min)
"""Score of an answer that is not there."""
BETWEEN_ANSWERS, AFTER_START = "\n", "\t"
"""A label holds an answer on each line, where it is known after the character of the context at which it begins."""
ARTICLES, PUNCTUATION = re.compile(r"\b(a|an|the)\b"), str.maketrans("", "", string.punctuation)


class QuestionAnswering(Task):
    """Answer a question by the piece of a context that says it. Long contexts are read in windows that overlap.

    Outputs: {"begin", "end": int64 [N, N_BEST], the answers' first character in the context and the one behind the
    last, best first; "score": float32 [N, N_BEST], the sum of both logits, NONE where there are fewer; "null_score":
    float32 [N], of no answer, the least of the windows; "answer": uint8 [N, W], the text that is answered in UTF-8,
    filled with zeros; nothing where the null score is above the best one by more than `no_answer` of the spec}.
    """

    name = "question-answering"
    about = "a piece of a text that answers a question"
    columns = (QUESTION, CONTEXT)
    required = 2
    preprocess = "text"
    outputs = "answers"
    always = ("begin", "end", "score", "null_score", "answer")
    facts = (MASK, OFFSETS)

    def split_views(self, columns: Columns) -> list[dict[str, Any]]:
        """Return questions and contexts as the two texts that are read together. UsageError where one is missing."""
        missing = [name for name in self.columns if name not in columns]
        if missing:
            raise UsageError(f"{self.name} reads the column '{missing[0]}'; the samples have: {', '.join(columns)}")
        return [{TEXT: columns[QUESTION], TEXT_PAIR: columns[CONTEXT]}]

    def read_outputs(self, outputs: Tensors, batch: BatchFacts) -> dict[str, Array]:
        """Return "begin", "end", "score" [n, N_BEST] and "null_score" [n] of each window. BundleError."""
        offsets, mask, spec = batch.known[OFFSETS], batch.known[MASK], batch.spec
        assert isinstance(spec, TextPreprocess)  # or it is refused before
        given = [outputs.get(name) for name in ("start_logits", "end_logits")]
        if any(logits is None or logits.shape != mask.shape for logits in given):
            raise BundleError(
                f"a model that answers from a text has the outputs start_logits and end_logits [batch, sequence]; this "
                f"model: {describe_shapes(outputs)}; call them so"
            )
        starts, ends = (np.asarray(logits, np.float32) for logits in given)
        scores, first, last = find_best_spans(starts, ends, offsets[..., 0] >= 0, spec.longest_answer)
        rows = np.arange(batch.n)
        found = scores > NONE
        no_answer = mask.argmax(axis=1)  # the first token, where a model that may answer nothing says so
        return {
            "begin": np.where(found, offsets[rows[:, None], first, 0], 0),
            "end": np.where(found, offsets[rows[:, None], last, 1], 0),
            "score": scores,
            "null_score": starts[rows, no_answer] + ends[rows, no_answer],
        }

    def join_rows(
        self, outputs: dict[str, Array], split: Split, columns: Columns, facts: BatchFacts
    ) -> dict[str, Array]:
        """Return the best answers of each question, of those of its windows."""
        spec, samples = facts.spec, split.samples
        assert isinstance(spec, TextPreprocess)
        contexts = take_texts(columns, TEXT_PAIR)
        n = len(contexts)
        joined: dict[str, Array] = {name: np.zeros((n, N_BEST), np.int64) for name in ("begin", "end")}
        joined |= {"score": np.full((n, N_BEST), NONE, np.float32), "null_score": np.zeros(n, np.float32)}
        for sample, rows in enumerate(np.split(np.arange(len(samples)), np.searchsorted(samples, range(1, n)))):
            spans: dict[tuple[int, int], float] = {}
            parts = (outputs[name][rows].reshape(-1).tolist() for name in ("begin", "end", "score"))
            for begin, end, score in zip(*parts, strict=True):
                # without white space at its ends, which some tokenizers count as a word's
                text = contexts[sample][begin:end]
                place = begin + len(text) - len(text.lstrip()), end - len(text) + len(text.rstrip())
                spans[place] = min(score, spans.get(place, NONE), key=_rank_score)
            ranked = sorted(spans.items(), key=lambda item: (_rank_score(item[1]), item[0]))[:N_BEST]
            for k, ((begin, end), score) in enumerate(ranked):
                joined["begin"][sample, k], joined["end"][sample, k], joined["score"][sample, k] = begin, end, score
            joined["null_score"][sample] = outputs["null_score"][rows].min()
        return joined | {"answer": _write_answers(joined, contexts, spec.no_answer)}

    def predict(self, outputs: Tensors, class_names: Sequence[str]) -> list[Any] | None:
        """Return for each question {"label": the answer, "score": its share among the best, "begin", "end"}."""
        shares = softmax(outputs["score"])  # [N, N_BEST]
        return [
            {"label": answer, "score": float(share), "begin": int(begin), "end": int(end)}
            for answer, share, begin, end in zip(
                read_answers(outputs), shares[:, 0], outputs["begin"][:, 0], outputs["end"][:, 0], strict=True
            )
        ]

    def answers(self, outputs: Tensors, class_names: Sequence[str]) -> dict[str, Array]:
        """Return answer (str), score float32 (the sum of logits), begin and end int64, [n, 1] each."""
        return {
            "answer": np.array([[answer] for answer in read_answers(outputs)], np.object_),
            **{name: outputs[name][:, :1] for name in ("score", "begin", "end")},
        }

    def answer_specs(self, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the specs of `answers`."""
        logits = one_output(outputs, "start_logits")
        kinds = {"answer": "object", "score": "float32", "begin": "int64", "end": "int64"}
        return tuple(rename(logits, name, kind, 1) for name, kind in kinds.items())

    def to_columns(self, samples: Any) -> dict[str, Any]:
        """Return a list of (question, context) as columns; columns as they are. UsageError."""
        columns = super().to_columns(samples)
        if isinstance(samples, Mapping):
            return columns
        pairs = list(columns[QUESTION])
        if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
            raise UsageError("give a list of (question, context), or the columns question and context")
        return {QUESTION: [question for question, _ in pairs], CONTEXT: [context for _, context in pairs]}

    def metrics(self) -> tuple[Metric, ...]:
        """Return SQuAD's exact match and F1, and how many questions get the baseline's answer."""
        return _make_metrics()


def find_best_spans(starts: Array, ends: Array, allowed: Array, longest: int) -> tuple[Array, Array, Array]:
    """Return the N_BEST spans of each row: scores float32, first and last tokens int64, [n, N_BEST] each, best first.

    `starts`, `ends`: logits float32 [n, T]; `allowed`: bool [n, T], the tokens of the context. All spans of up to
    `longest` tokens are compared; where there are fewer, the score is NONE. NaN goes first.
    """
    n, width = starts.shape
    longest = min(longest, width)
    scores = np.full((n, width, longest), NONE, np.float32)  # by first token, and how many follow it
    for more in range(longest):
        fits = allowed[:, : width - more] & allowed[:, more:]
        with np.errstate(invalid="ignore"):
            scores[:, : width - more, more] = np.where(fits, starts[:, : width - more] + ends[:, more:], NONE)
    flat = scores.reshape(n, -1)
    if flat.shape[1] < N_BEST:
        flat = np.pad(flat, ((0, 0), (0, N_BEST - flat.shape[1])), constant_values=NONE)
    best, order = np.empty((n, N_BEST), np.float32), np.empty((n, N_BEST), np.int64)
    for k in range(N_BEST):  # of millions of spans: sorting them all would take several times their memory
        order[:, k] = flat.argmax(axis=1)
        best[:, k] = flat[np.arange(n), order[:, k]]
        flat[np.arange(n), order[:, k]] = -np.inf
    first = np.minimum(order // longest, width - 1)
    last = np.minimum(first + order % longest, width - 1)
    return best, first, last


def _rank_score(score: float) -> float:
    """Return the key that sorts scores from the best on; NaN is before all, so that no window hides a broken model."""
    return -math.inf if math.isnan(score) else -score


def _write_answers(joined: Tensors, contexts: Sequence[str], no_answer: float | None) -> Array:
    best = joined["score"][:, 0]
    silent = np.zeros(len(best), bool) if no_answer is None else joined["null_score"] - best > no_answer
    texts = [
        b"" if none else context[begin:end].encode("utf-8", "replace")
        for context, begin, end, none in zip(contexts, joined["begin"][:, 0], joined["end"][:, 0], silent, strict=True)
    ]
    filled = np.zeros((len(texts), max(1, *map(len, texts))), np.uint8)
    for row, text in zip(filled, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return filled


def read_answers(outputs: Outputs | Tensors) -> list[str]:
    """Return the answers as texts, "" for none."""
    return [bytes(row[row > 0]).decode("utf-8", "replace") for row in outputs["answer"]]


def write_label(answers: Sequence[tuple[int | None, str]]) -> str:
    """Return the answers (where each begins in the context, or None; its text) as a label; "" of none."""
    lines = [(f"{begin}{AFTER_START}" if begin is not None else "") + " ".join(text.split()) for begin, text in answers]
    return BETWEEN_ANSWERS.join(line for line in lines if line.rpartition(AFTER_START)[2])


def read_label(label: str) -> list[tuple[int | None, str]]:
    """Return the answers that `write_label` wrote."""
    lines = [line.rpartition(AFTER_START) for line in label.split(BETWEEN_ANSWERS) if line]
    return [(int(begin) if begin else None, text) for begin, _, text in lines]


def normalize_answer(text: str) -> str:
    """Return a text in lower case without punctuation, articles and further white space (SQuAD's evaluate-v2.0)."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def score_answer(answer: str, label: str) -> tuple[float, float]:
    """Return exact match and F1 of words, the best over the label's answers (SQuAD's evaluate-v2.0).

    Without any answer in the label, both are 1 for an empty answer and 0 for another.
    """
    wanted = [text for text in (normalize_answer(text) for _, text in read_label(label)) if text] or [""]
    given = normalize_answer(answer)
    return float(given in wanted), max(_compute_f1(given.split(), text.split()) for text in wanted)


def _compute_f1(given: list[str], wanted: list[str]) -> float:
    if not given or not wanted:
        return float(given == wanted)
    same = sum((Counter(given) & Counter(wanted)).values())
    return 2 * same / (len(given) + len(wanted))


def score_answers(outputs: Outputs, labels: Any) -> Counts:
    """Return exact match and F1 of each question, float64 [N] each. UsageError where labels are no texts of answers."""
    given = read_answers(outputs)
    if len(labels) != len(given) or not all(isinstance(label, str) for label in labels):
        raise UsageError(f"labels: {len(labels)} for {len(given)} questions; a text of answers is needed for each")
    scores = [score_answer(answer, label) for answer, label in zip(given, labels, strict=True)]
    exact, f1 = np.array(scores, np.float64).T
    return exact, f1


def _compare_answers(outputs: Outputs, baseline: Outputs) -> Counts:
    pairs = zip(read_answers(outputs), read_answers(baseline), strict=True)
    return (np.array([float(normalize_answer(a) == normalize_answer(b)) for a, b in pairs]),)


def _make_metrics() -> tuple[Metric, ...]:
    # here, for where metrics are listed, tasks are asked for theirs
    score = remember(score_answers)
    shared: dict[str, Any] = {
        "higher_is_better": True,
        "fits": ("answers",),
        "unit": "fraction",
        "range": (0.0, 1.0),
        "shape": "any",
    }
    return (
        Metric(
            name="squad_exact_match",
            against="labels",
            about="fraction of questions whose answer is one of the label's, by SQuAD's rules",
            reduce=lambda outputs, labels: score(outputs, labels)[:1],
            kind="proportion",
            **shared,
        ),
        Metric(
            name="squad_f1",
            against="labels",
            about="mean F1 of the words of answer and label, by SQuAD's rules",
            reduce=lambda outputs, labels: score(outputs, labels)[1:],
            flaws=Flaws(of=lambda columns: columns[0] < 1, reach=lambda columns: 1.0),
            **shared,
        ),
        Metric(
            name="answer_agreement",
            against="baseline",
            about="fraction of questions to which candidate and baseline give the same answer",
            reduce=_compare_answers,
            kind="proportion",
            ideal=1.0,
            **shared,
        ),
    )
