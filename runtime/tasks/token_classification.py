"""Texts, each word of one class: entities and the like, written as tags such as B-PER, I-PER, O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.tensors import TensorSpec
from runtime.encode.texts import TextPreprocess
from runtime.errors import BundleError, UsageError
from runtime.metrics.base import FRACTION, Columns, Flaws, Metric, Outputs, ratio_of_sums, share_of_sums
from runtime.tasks.base import WORDS, BatchFacts, Task, Tensors, classify, describe_shapes, one_output, rename

UNLABELLED = -100
"""Fills rows of labels up to the longest text's."""
OUTSIDE, BEGIN, INSIDE, END, SINGLE = range(5)
_PREFIXES = {"B": BEGIN, "I": INSIDE, "E": END, "L": END, "S": SINGLE, "U": SINGLE}
_PLACES = 5
LEAST_SPANS = 10
"""Spans among the labels below which an F1 has no interval: one of them is worth too much."""


class TokenClassification(Task):
    """Choose one class for each word of a text; words are what stands between white space.

    Outputs, W the most tokens of a text: {"logits": float32 [N, W, C] of each word's first token, zeros for words that
    are not there; "read": bool [N, W], the words that were read, for a long text is cut; "tags": int64 [N, C], in every
    row what the classes mean: `parse_tags` of their names}.
    """

    name = "token-classification"
    about = "one class for each word of a text: tags such as B-PER, I-PER, O"
    columns = ("text",)
    preprocess = "text"
    outputs = "tags"
    always = ("logits", "read")
    facts = (WORDS,)

    def read_outputs(self, outputs: Tensors, batch: BatchFacts) -> dict[str, Array]:
        """Return {"logits", "read", "tags"} of the one output [B, T, C]. BundleError."""
        words, spec = batch.known[WORDS], batch.spec
        assert isinstance(spec, TextPreprocess)  # or it is refused before
        candidates = [outputs["logits"]] if "logits" in outputs else [o for o in outputs.values() if o.ndim == 3]
        if len(candidates) != 1 or candidates[0].shape[:2] != words.shape:
            raise BundleError(
                f"a model that tags words has one output [batch, sequence, classes]; this model: "
                f"{describe_shapes(outputs)}; call that output 'logits'"
            )
        of_tokens = candidates[0].astype(np.float32, copy=False)
        rows, places = np.nonzero(mark_first_tokens(words) & (words < spec.max_length))
        logits = np.zeros((batch.n, spec.max_length, of_tokens.shape[2]), np.float32)
        read = np.zeros(logits.shape[:2], bool)
        logits[rows, words[rows, places]] = of_tokens[rows, places]
        read[rows, words[rows, places]] = True
        tags = parse_tags(batch.class_names, of_tokens.shape[2])
        return {"logits": logits, "read": read, "tags": np.tile(tags, (batch.n, 1))}

    def predict(self, outputs: Tensors, class_names: Sequence[str]) -> list[Any] | None:
        """Return for each text {"label", "score"} of each word that was read."""
        return [
            classify(logits[read], class_names) if read.any() else []
            for logits, read in zip(outputs["logits"], outputs["read"], strict=True)
        ]

    def answers(self, outputs: Tensors, class_names: Sequence[str]) -> dict[str, Array]:
        """Return label (str) and score float32, [n, W]: of each word; "" and 0 for words that were not read."""
        read = outputs["read"]
        width = int(np.max(read.sum(1), initial=1))
        label, score = np.full((len(read), width), "", np.object_), np.zeros((len(read), width), np.float32)
        for row, words in enumerate(self.predict(outputs, class_names) or []):
            label[row, : len(words)] = [str(word["label"]) for word in words]
            score[row, : len(words)] = [word["score"] for word in words]
        return {"label": label, "score": score}

    def answer_specs(self, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the specs of `answers`."""
        logits = one_output(outputs, "logits")
        return rename(logits, "label", "object", "words"), rename(logits, "score", "float32", "words")

    def to_columns(self, samples: Any) -> dict[str, Any]:
        """Return a list of texts, or of lists of words, as a column; columns as they are. UsageError."""
        columns = super().to_columns(samples)
        return columns | {"text": [join_words(text) for text in columns.get("text", ())]}

    def metrics(self) -> tuple[Metric, ...]:
        """Return F1, precision and recall of spans, and how many words get the baseline's tag."""
        return _make_metrics()


def mark_first_tokens(words: Array) -> Array:
    """Return bool [n, T]: where a word's first token is. `words`: each token's word, int64 [n, T], -1 for none."""
    first: Array = words >= 0
    first[:, 1:] &= words[:, 1:] != words[:, :-1]
    return first


def join_words(text: Any) -> Any:
    """Return a text, of its words where they are listed; anything else as it is."""
    listed = isinstance(text, (list, tuple)) and all(isinstance(word, str) and word.split() == [word] for word in text)
    return " ".join(text) if listed else text


def parse_tags(class_names: Sequence[str], n_classes: int) -> Array:
    """Return what each class is, int64 [C]: 5 x the number of its type + OUTSIDE, BEGIN, INSIDE, END or SINGLE.

    Names are PREFIX-TYPE or PREFIX alone with the prefixes B, I, E or L, S or U, and O for what is in no span; a class
    of another name is a span of that type wherever it stands, as if its prefix were I. Without names all are O.
    """
    types: dict[str, int] = {}
    parsed = []
    for name in class_names:
        prefix, _, kind = name.partition("-")
        if prefix == "O" and not kind:
            parsed.append(OUTSIDE)
            continue
        place, kind = (_PREFIXES[prefix], kind) if prefix in _PREFIXES else (INSIDE, name)
        parsed.append(_PLACES * types.setdefault(kind, len(types)) + place)
    return np.array((parsed + [OUTSIDE] * n_classes)[:n_classes], np.int64)


def find_spans(tags: Array) -> Array:
    """Return the spans of rows of tags [N, W] (of `parse_tags`), int64 [M, 4]: row, first word, last word, type.

    seqeval's rules without a scheme: a span begins at B or S, after an end, or where the type changes; it ends before
    the next begin, and at E and S (Ramshaw & Marcus 1995; CoNLL-2003's conlleval).
    """
    place, kind = tags % _PLACES, tags // _PLACES
    inside = place != OUTSIDE
    before, before_kind = np.zeros_like(place), np.full_like(kind, -1)
    before[:, 1:], before_kind[:, 1:] = place[:, :-1], kind[:, :-1]
    fresh = (before == OUTSIDE) | (before == END) | (before == SINGLE) | (before_kind != kind)
    begins = inside & ((place == BEGIN) | (place == SINGLE) | fresh)
    ends = inside.copy()  # a span ends at a word behind which another begins, or none goes on
    ends[:, :-1] &= ~inside[:, 1:] | begins[:, 1:]
    rows, first = np.nonzero(begins)
    return np.stack([rows, first, np.nonzero(ends)[1], kind[rows, first]], axis=1)


def _count_spans(outputs: Outputs, labels: Any) -> Columns:
    """Return the spans of each text that are right, that the labels have, and that were found: int64 [N] each."""
    logits, scheme = outputs["logits"], outputs["tags"][0]
    if not scheme.any():
        raise UsageError("the model's classes have no names such as B-PER, so there are no spans: give class_names")
    given = np.asarray(labels)
    if given.ndim != 2 or len(given) != len(logits) or given.dtype.kind not in "iu":
        raise UsageError(f"labels: {given.dtype} {list(given.shape)} where int64 [{len(logits)}, words] are needed")
    wrong = np.flatnonzero(((given >= len(scheme)) | ((given < 0) & (given != UNLABELLED))).any(axis=1))
    if wrong.size:
        raise UsageError(f"labels: row {wrong[0]} has a label that is not among the model's {len(scheme)} classes")
    width = max(given.shape[1], logits.shape[1])
    actual, found = np.zeros((2, len(logits), width), np.int64)
    actual[:, : given.shape[1]] = np.where(given == UNLABELLED, OUTSIDE, scheme[np.maximum(given, 0)])
    found[:, : logits.shape[1]] = np.where(outputs["read"], scheme[logits.argmax(axis=2)], OUTSIDE)
    found[:, : given.shape[1]] *= given != UNLABELLED  # words that nobody labelled are not judged
    spans = find_spans(actual), find_spans(found)
    right = {tuple(span) for span in spans[0].tolist()} & {tuple(span) for span in spans[1].tolist()}
    counted = np.array([row for row, *_ in right], np.int64), spans[0][:, 0], spans[1][:, 0]
    hits, real, chosen = (np.bincount(rows, minlength=len(logits)) for rows in counted)
    return hits, real, chosen


def _count_same_words(outputs: Outputs, baseline: Outputs) -> Columns:
    """Return the words of each text that get the baseline's class, and all that were read: int64 [N] each."""
    same = outputs["logits"].argmax(axis=2) == baseline["logits"].argmax(axis=2)
    return (same & baseline["read"]).sum(axis=1), baseline["read"].sum(axis=1)


def _make_metrics() -> tuple[Metric, ...]:
    # here, for where metrics are listed, tasks are asked for theirs
    def shortage(columns: Columns) -> str:
        n = int(columns[1].sum())
        return "" if n >= LEAST_SPANS else f"the labels have {n} spans; at least {LEAST_SPANS} would be needed"

    flaws = Flaws(
        of=lambda columns: (columns[0] < columns[1]) | (columns[0] < columns[2]),
        reach=lambda columns: float(2 * columns[1].max(initial=1) * len(columns[0]) / max(columns[1].sum(), 1)),
    )
    kinds = (
        ("span_f1", "F1", 0.5, 0.5),
        ("span_precision", "precision", 0.0, 1.0),
        ("span_recall", "recall", 1.0, 0.0),
    )
    spans = [
        Metric(
            name=name,
            against="labels",
            **FRACTION,
            fits=("tags",),
            about=f"{word} of whole spans (words and type), by seqeval's rules, over all types",
            reduce=_count_spans,
            shape="outputs",
            kind="statistic",
            shortage=shortage,
            flaws=flaws,
            on_request=name != "span_f1",
            **ratio_of_sums(of_labels, of_found),
        )
        for name, word, of_labels, of_found in kinds
    ]
    agreement = Metric(
        name="word_agreement",
        against="baseline",
        **FRACTION,
        fits=("tags",),
        about="fraction of words to which candidate and baseline give the same class",
        reduce=_count_same_words,
        kind="statistic",
        **share_of_sums(),
        ideal=1.0,
    )
    return (*spans, agreement)
