"""Metrics of answers against the libraries that people know them by."""

from __future__ import annotations

import jiwer
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import metrics as sacrebleu_metrics

from runtime.errors import UsageError
from runtime.metrics.base import Metric
from runtime.metrics.texts import chrf, chrf_columns, chrf_influence, pack_texts, unpack_texts
from runtime.tasks.metrics import METRICS

WORDS = st.lists(st.sampled_from(["the", "The", "cat", "cats", "s,t", "a-b", "über", "日本", "x1", "!"]), max_size=7)
TEXTS = WORDS.map(" ".join)
FILLED = WORDS.filter(bool).map(" ".join)
PAIRS = st.lists(st.tuples(TEXTS, FILLED), min_size=1, max_size=6)


def compute(name: str, pairs: list[tuple[str, str]]) -> float:
    return METRICS[name].compute({"answer": pack_texts([a for a, _ in pairs])}, [b for _, b in pairs])


@settings(max_examples=60, deadline=None)
@given(PAIRS)
def test_as_the_libraries_compute(pairs: list[tuple[str, str]]) -> None:
    answers, references = [a for a, _ in pairs], [b for _, b in pairs]
    assert compute("wer", pairs) == pytest.approx(jiwer.wer(references, answers))
    assert compute("cer", pairs) == pytest.approx(jiwer.cer(references, answers))
    wanted = sacrebleu_metrics.CHRF().corpus_score(answers, [references]).score
    assert compute("chrf", pairs) == pytest.approx(wanted, abs=1e-9)
    scorer = RougeScorer(["rougeL"])
    plain = [(a, b) for a, b in pairs if (a + b).isascii()]  # rouge-score drops other letters
    if plain:
        wanted = np.mean([scorer.score(b, a)["rougeL"].fmeasure for a, b in plain])
        assert compute("rouge_l", plain) == pytest.approx(wanted)


def test_texts_that_share_nothing() -> None:
    columns = chrf_columns({"answer": pack_texts(["", ""])}, ["ab", "c"])
    assert chrf(columns) == 0 and not chrf_influence(columns).any()
    assert compute("exact_match", [(" a b\n", "a b"), ("a", "A")]) == 0.5


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_texts_come_back_from_arrays(texts: list[str]) -> None:
    assert unpack_texts(pack_texts(texts)) == texts


@pytest.mark.parametrize("labels", [np.array([1, 2]), ["a"], ["a", 3]])
def test_labels_that_are_no_references(labels: object) -> None:
    metric: Metric = METRICS["exact_match"]
    with pytest.raises(UsageError, match=r"labels: .* reference text"):
        metric.columns({"answer": pack_texts(["a", "b"])}, labels)
