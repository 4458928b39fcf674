"""The samples that changed their answer: which they are, in which order, and what is kept of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.judge.changes import MOST_ITEMS, MOST_SAMPLES, find_changes, shorten
from runtime.metrics.texts import pack_texts


def logits(*rows: tuple[float, ...]) -> dict[str, np.ndarray]:
    return {"logits": np.array(rows, np.float32)}


def test_classes_that_changed_come_by_how_far_the_model_moved() -> None:
    baseline = logits((4, 0, 0), (0, 4, 0), (0, 0, 4), (4, 0, 0))
    candidate = logits((3, 0, 0), (1, 0, 0), (9, 0, 0), (4, 0, 0))
    found = find_changes("image-classification", candidate, baseline, np.array([0, 1, 2, 0]), ("cat", "dog", "<b>"))
    assert found is not None
    assert (found.metric, found.n_changed) == ("agreement", 2)
    assert [sample.sample for sample in found.samples] == [2, 1]
    first = found.samples[0]
    assert (first.baseline["label"], first.candidate["label"]) == ("<b>", "cat")
    assert first.values == {"agreement": (None, 0.0)}


def test_a_model_that_changed_nothing_has_no_samples() -> None:
    same = logits((4, 0), (0, 4))
    found = find_changes("image-classification", same, same, None, ())
    assert found is not None and (found.n_changed, found.samples) == (0, ())


def test_texts_come_by_what_they_add_with_their_own_nats() -> None:
    def sums(**columns: Any) -> dict[str, np.ndarray]:
        return {name: np.array(values) for name, values in columns.items()}

    baseline = sums(nll=[10.0, 10.0, 10.0], n_tokens=[5, 5, 0])
    candidate = sums(nll=[11.0, 20.0, 10.0], n_tokens=[5, 5, 0], kl=[0.5, 5.0, 0.0], agree=[5, 1, 0])
    found = find_changes("text-generation", candidate, baseline, None, ())
    assert found is not None and (found.metric, found.n_changed) == ("kl_token", None)
    worst = found.samples[0]
    assert (worst.sample, worst.baseline) == (1, None)
    assert worst.values == {"kl_token": (None, 1.0), "nll": (2.0, 4.0)}
    assert 2 not in [sample.sample for sample in found.samples if sample.values], "no token of it was scored"


def test_answers_that_were_written_are_kept_as_texts() -> None:
    def outputs(*answers: str) -> dict[str, np.ndarray]:
        n = len(answers)
        return {"nll": np.ones(n), "n_tokens": np.ones(n, np.int64), "answer": pack_texts(answers)}

    candidate = {**outputs("one", "drei"), "kl": np.array([0.0, 1.0]), "agree": np.array([1, 0])}
    found = find_changes("text2text-generation", candidate, outputs("one", "three"), ["one", "three"], ())
    assert found is not None
    changed = {sample.sample: (sample.baseline, sample.candidate) for sample in found.samples}
    assert changed[1] == ({"label": "three"}, {"label": "drei"})


def test_no_more_is_kept_than_people_look_at() -> None:
    rng = np.random.default_rng(0)
    outputs = [{"logits": rng.normal(size=(200, 5)).astype(np.float32)} for _ in range(2)]
    found = find_changes("image-classification", outputs[0], outputs[1], None, ())
    assert found is not None and found.n_changed is not None
    assert len(found.samples) == MOST_SAMPLES < found.n_changed
    assert len(shorten(list(range(1000)))) == MOST_ITEMS
    assert shorten({"score": np.float32(0.123456789), "n": np.int64(3)}) == {"score": 0.12346, "n": 3}
    assert shorten(float("nan")) is None
