"""Texts that a model wrote, against references: whole answers, characters, words, and the edits between them.

Outputs hold "answer", int32 [N, W]: the answers' code points, filled up with -1. Labels are the references, N texts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from runtime.errors import UsageError
from runtime.metrics.base import FRACTION, Columns, Flaws, Metric, Outputs

NO_CHARACTER = -1
"""Fills up answers that are kept as arrays."""
CHRF_ORDER, CHRF_BETA = 6, 2.0
WORD = re.compile(r"[^\W_]+")
"""Of ROUGE: letters and digits; of ASCII texts what rouge-score takes for words."""


def pack_texts(texts: Sequence[str]) -> np.ndarray:
    """Return texts as code points, int32 [N, W], filled up with NO_CHARACTER; W is at least 1."""
    packed = np.full((len(texts), max([1, *map(len, texts)])), NO_CHARACTER, np.int32)
    for row, text in enumerate(texts):
        packed[row, : len(text)] = [ord(character) for character in text]
    return packed


def unpack_texts(packed: np.ndarray) -> list[str]:
    """Return what `pack_texts` was given."""
    return ["".join(map(chr, row[row != NO_CHARACTER].tolist())) for row in packed]


def pair_texts(outputs: Outputs, labels: Any) -> list[tuple[str, str]]:
    """Return (answer, reference) of each sample. UsageError where the labels are not one text for each."""
    answers = unpack_texts(outputs["answer"])
    if isinstance(labels, np.ndarray) and labels.dtype.kind not in "UO":
        raise UsageError(f"labels: {labels.dtype} where reference texts are needed")
    if len(labels) != len(answers) or not all(isinstance(label, str) for label in labels):
        raise UsageError(f"labels: {len(labels)} for {len(answers)} answers; one reference text per sample is needed")
    return list(zip(answers, map(str, labels), strict=True))


def match_columns(outputs: Outputs, labels: Any) -> Columns:
    """Return 1.0 where answer and reference are the same but for white space around them: float64 [N]."""
    return (np.array([float(a.strip() == b.strip()) for a, b in pair_texts(outputs, labels)]),)


def agreement_columns(outputs: Outputs, baseline: Outputs) -> Columns:
    """Return 1.0 where both models write the same text: float64 [N]."""
    pairs = zip(unpack_texts(outputs["answer"]), unpack_texts(baseline["answer"]), strict=True)
    return (np.array([float(a == b) for a, b in pairs]),)


def rouge_columns(outputs: Outputs, labels: Any) -> Columns:
    """Return each sample's ROUGE-L: F1 of the longest common subsequence of lower-case words, float64 [N]."""
    return (np.array([rouge_l(answer, reference) for answer, reference in pair_texts(outputs, labels)]),)


def rouge_l(answer: str, reference: str) -> float:
    """Return F1 of the longest common subsequence of words (Lin 2004, section 3.1; no stemming), 0 to 1."""
    ours, theirs = WORD.findall(answer.lower()), WORD.findall(reference.lower())
    if not ours or not theirs:
        return 0.0
    return 2 * count_common(ours, theirs) / (len(ours) + len(theirs))


def chrf_columns(outputs: Outputs, labels: Any) -> Columns:
    """Return the n-grams of each sample that the answer has, the reference has, both have: int64 [N, 6] each."""
    counts = [count_ngrams(answer, reference) for answer, reference in pair_texts(outputs, labels)]
    found, real, common = np.array(counts, np.int64).transpose(1, 0, 2)
    return found, real, common


def count_ngrams(answer: str, reference: str) -> list[list[int]]:
    """Return three rows, of n-grams of 1 to 6 characters: the answer's, the reference's, those in both.

    White space is left out. An answer's n-grams do not count where the reference has none of that length.
    """
    ours, theirs = "".join(answer.split()), "".join(reference.split())
    rows: list[list[int]] = [[], [], []]
    for n in range(1, CHRF_ORDER + 1):
        left, right = (Counter(text[i : i + n] for i in range(len(text) - n + 1)) for text in (ours, theirs))
        rows[0].append(left.total() if right else 0)
        rows[1].append(right.total())
        rows[2].append((left & right).total())
    return rows


def chrf(columns: Columns) -> float:
    """Return chrF2 of a corpus, 0 to 100 (Popovic 2015): precision and recall averaged over the orders that occur."""
    precision, recall, _ = _average_orders(columns)
    if precision + recall == 0:
        return 0.0
    factor = CHRF_BETA**2
    return 100 * (1 + factor) * precision * recall / (factor * precision + recall)


def chrf_influence(columns: Columns) -> np.ndarray:
    """Return what each sample adds to chrF, float64 [N]: the derivative by its weight, times N."""
    found, real, common = (column.astype(np.float64) for column in columns)
    precision, recall, counted = _average_orders(columns)
    n = len(found)
    if not counted.any() or precision + recall == 0:
        return np.zeros(n)
    total_found, total_real, total_common = (
        np.maximum(column.sum(0), 1e-300)[counted] for column in (found, real, common)
    )
    found, real, common = found[:, counted], real[:, counted], common[:, counted]
    orders = counted.sum()
    by_precision = ((common - total_common / total_found * found) / total_found).sum(1) / orders  # [N]
    by_recall = ((common - total_common / total_real * real) / total_real).sum(1) / orders
    slope_precision, slope_recall = _slopes(precision, recall)
    influence: np.ndarray = 100 * n * (slope_precision * by_precision + slope_recall * by_recall)
    return influence


def chrf_reach(columns: Columns) -> float:
    """Return by how much chrF moves at most if a share of the samples turns, over that share: at its slope here."""
    precision, recall, counted = _average_orders(columns)
    if not counted.any() or precision + recall == 0:
        return 100.0
    longest = np.maximum(columns[0], columns[1])[:, counted].max(axis=0)
    return float(100 * sum(_slopes(precision, recall)) * (longest / columns[1][:, counted].mean(axis=0)).mean())


def _slopes(precision: float, recall: float) -> tuple[float, float]:
    """Return the derivatives of the F score by precision and by recall."""
    factor = CHRF_BETA**2
    whole = (factor * precision + recall) ** 2
    return (1 + factor) * recall * recall / whole, (1 + factor) * factor * precision * precision / whole


def _average_orders(columns: Columns) -> tuple[float, float, np.ndarray]:
    """Return precision, recall, and bool [6]: the orders of which answers and references have n-grams."""
    found, real, common = (column.sum(axis=0) for column in columns)
    counted = (found > 0) & (real > 0)
    if not counted.any():
        return 0.0, 0.0, counted
    return (
        float((common[counted] / found[counted]).mean()),
        float((common[counted] / real[counted]).mean()),
        counted,
    )


def split_words(text: str) -> list[str]:
    return text.split()


def split_characters(text: str) -> list[str]:
    return list(text.strip())


def edit_columns(split: Callable[[str], list[str]]) -> Callable[[Outputs, Any], Columns]:
    """Return what gives each sample's edits from reference to answer, and the reference's length: int64 [N] each."""

    def reduce(outputs: Outputs, labels: Any) -> Columns:
        pairs = [(split(answer), split(reference)) for answer, reference in pair_texts(outputs, labels)]
        edits = np.array([count_edits(ours, theirs) for ours, theirs in pairs], np.int64)
        return edits, np.array([len(theirs) for _, theirs in pairs], np.int64)

    return reduce


def count_edits(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Return the least insertions, deletions and substitutions between two sequences (Levenshtein 1966)."""
    a, b = _number(first, second)
    places = np.arange(len(b) + 1)
    row = places
    for item in a:
        best = np.minimum(row[1:] + 1, row[:-1] + (b != item))
        row = np.concatenate([[row[0] + 1], best])
        row = np.minimum.accumulate(row - places) + places  # insertions, one after another
    return int(row[-1])


def count_common(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Return the length of the longest common subsequence of two sequences."""
    a, b = _number(first, second)
    row = np.zeros(len(b) + 1, np.int64)
    for item in a:
        best = np.maximum(row[1:], row[:-1] + (b == item))
        row = np.maximum.accumulate(np.concatenate([[0], best]))
    return int(row[-1])


def _number(first: Sequence[Hashable], second: Sequence[Hashable]) -> tuple[np.ndarray, np.ndarray]:
    """Return two sequences as int64 arrays in which equal items are equal numbers."""
    numbers = {item: number for number, item in enumerate(dict.fromkeys([*first, *second]))}
    one, other = (np.array([numbers[item] for item in items], np.int64) for items in (first, second))
    return one, other


def error_rate(columns: Columns) -> float:
    """Return edits over the references' length; of references without any, the edits."""
    return float(columns[0].sum() / max(columns[1].sum(), 1))


def error_rate_influence(columns: Columns) -> np.ndarray:
    """Return what each sample adds to the ratio of the sums, float64 [N]."""
    influence: np.ndarray = (columns[0] - error_rate(columns) * columns[1]) / max(columns[1].mean(), 1e-9)
    return influence


def lengths(columns: Columns) -> np.ndarray:
    """Return how much each sample counts: its reference's length, float64 [N]."""
    return columns[1].astype(np.float64)


_EDIT_FLAWS = Flaws(
    of=lambda columns: columns[0] > 0,
    reach=lambda columns: float(np.maximum(columns[0], columns[1]).max(initial=1) / max(columns[1].mean(), 1e-9)),
    perfect=0.0,
)


def _edits(name: str, split: Callable[[str], list[str]], about: str) -> Metric:
    return Metric(
        name=name,
        against="labels",
        higher_is_better=False,
        fits=("texts",),
        unit="edits per reference's",
        range=(0.0, math.inf),
        about=about,
        reduce=edit_columns(split),
        kind="statistic",
        statistic=error_rate,
        influence=error_rate_influence,
        weights=lengths,
        flaws=_EDIT_FLAWS,
    )


EXACT_MATCH = Metric(
    name="exact_match",
    against="labels",
    **FRACTION,
    fits=("texts",),
    about="fraction of answers that are the reference, white space around them aside",
    reduce=match_columns,
    kind="proportion",
)
CHRF = Metric(
    name="chrf",
    against="labels",
    higher_is_better=True,
    fits=("texts",),
    unit="chrF2",
    range=(0.0, 100.0),
    about="chrF2, 0 to 100: n-grams of 1 to 6 characters that answers and references share, recall twice as heavy",
    reduce=chrf_columns,
    kind="statistic",
    statistic=chrf,
    influence=chrf_influence,
    flaws=Flaws(
        of=lambda columns: np.any(columns[2] < np.maximum(columns[0], columns[1]), axis=1),
        reach=chrf_reach,
        perfect=100.0,
        widest=100.0,
    ),
)
ROUGE_L = Metric(
    name="rouge_l",
    against="labels",
    higher_is_better=True,
    fits=("texts",),
    unit="F1",
    range=(0.0, 1.0),
    about="mean F1 of the longest common subsequence of an answer's and its reference's words",
    reduce=rouge_columns,
    kind="mean",
    flaws=Flaws(of=lambda columns: columns[0] < 1, reach=lambda columns: 1.0, widest=1.0),
)
WER = _edits(
    "wer",
    split_words,
    "word error rate: words to insert, delete or replace in all answers, over the words of all references",
)
CER = _edits(
    "cer",
    split_characters,
    "character error rate: characters to insert, delete or replace in all answers, over those of all references",
)
TEXT_AGREEMENT = Metric(
    name="text_agreement",
    against="baseline",
    **FRACTION,
    fits=("texts",),
    about="fraction of samples to which candidate and baseline write the same text",
    reduce=agreement_columns,
    kind="proportion",
    ideal=1.0,
)
