"""Words and their classes: spans as seqeval finds them, scores, what cannot be scored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.errors import BundleError, UsageError
from runtime.tasks import find_task
from runtime.tasks.base import WORDS, BatchFacts
from runtime.tasks.metrics import METRICS
from runtime.tasks.token_classification import UNLABELLED, find_spans, parse_tags

TASK = find_task("token-classification")
NAMES = ("O", "B-PER", "I-PER", "E-PER", "S-PER", "B-LOC", "I-LOC", "E-LOC", "S-LOC")


def spans_by_the_rules(tags: list[str]) -> set[tuple[int, int, str]]:
    """seqeval's `get_entities`, written out: its start and end of a chunk, word by word."""
    found, begin = set(), 0
    before, before_kind = "O", ""
    for i, tag in enumerate([*tags, "O"]):
        place, _, kind = tag.partition("-")
        differs = place != "O" and before_kind != kind
        ends = before in ("E", "S") or (before in ("B", "I") and place in ("B", "S", "O"))
        ends = ends or (before != "O" and before_kind != kind)
        starts = place in ("B", "S") or (before in ("E", "S", "O") and place in ("E", "I")) or differs
        if ends and before != "O":
            found.add((begin, i - 1, before_kind))
        if starts:
            begin = i
        before, before_kind = place, kind
    return found


def test_spans_are_seqevals() -> None:
    rng = np.random.default_rng(0)
    classes = rng.integers(0, len(NAMES), (400, 12))
    scheme = parse_tags(NAMES, len(NAMES))
    found = {tuple(span) for span in find_spans(scheme[classes]).tolist()}
    kinds = {"PER": 0, "LOC": 1}
    wanted = {
        (row, first, last, kinds[kind])
        for row, tags in enumerate(classes.tolist())
        for first, last, kind in spans_by_the_rules([NAMES[tag] for tag in tags])
    }
    assert found == wanted and len(wanted) > 1000


def test_names_of_other_schemes() -> None:
    assert parse_tags(("U-X", "L-X", "B-X"), 3).tolist() == parse_tags(("S-X", "E-X", "B-X"), 3).tolist()
    assert parse_tags(("O", "name"), 3).tolist() == [0, 2, 0]  # inside, whatever its name; a class without one is O


def tagged(classes: Any, read: Any = None) -> dict[str, np.ndarray]:
    """Outputs of a model that chose these classes [N, W]."""
    classes = np.asarray(classes)
    read = np.ones(classes.shape, bool) if read is None else np.asarray(read, bool)
    scheme = parse_tags(NAMES, len(NAMES))
    return {
        "logits": np.eye(len(NAMES), dtype=np.float32)[classes],
        "read": read,
        "tags": np.tile(scheme, (len(classes), 1)),
    }


def test_scores_of_spans() -> None:
    labels = np.array([[1, 2, 0, 5], [4, 0, UNLABELLED, UNLABELLED]])
    found = tagged([[1, 2, 0, 1], [4, 4, 4, 4]])  # PER right, LOC taken for PER; one right, one too many
    assert METRICS["span_precision"].compute(found, labels) == pytest.approx(2 / 4)
    assert METRICS["span_recall"].compute(found, labels) == pytest.approx(2 / 3)
    assert METRICS["span_f1"].compute(found, labels) == pytest.approx(2 * 2 / (4 + 3))
    assert METRICS["span_f1"].compute(tagged(np.maximum(labels, 0)), labels) == 1.0
    cut = tagged(np.maximum(labels, 0), read=[[1, 1, 0, 0], [1, 1, 0, 0]])  # what was cut off was not found
    assert METRICS["span_recall"].compute(cut, labels) == pytest.approx(2 / 3)
    assert METRICS["word_agreement"].compute(found, tagged(np.maximum(labels, 0))) == pytest.approx(4 / 8)


def test_what_a_sample_adds_is_the_derivative() -> None:
    rng = np.random.default_rng(1)
    labels, found = rng.integers(0, len(NAMES), (2, 30, 8))
    for name in ("span_f1", "span_precision", "span_recall"):
        metric = METRICS[name]
        columns = metric.columns(tagged(found), labels)
        twice = tuple(np.concatenate([column, column[:1]]) for column in columns)
        step = metric.statistic(twice) - metric.statistic(columns)
        assert step == pytest.approx(metric.influence(columns)[0] / 31, rel=0.1)


def test_the_first_token_of_a_word_speaks_for_it() -> None:
    from runtime.encode.texts import TextPreprocess

    words = np.array([[-1, 0, 0, 2, -1], [-1, 0, 1, -1, -1]])  # word 1 of the first text has no token
    logits = np.arange(2 * 5 * 9, dtype=np.float32).reshape(2, 5, 9)
    batch = BatchFacts(2, {WORDS: words}, TextPreprocess(max_length=5), NAMES)
    read = TASK.read_outputs({"scores": logits}, batch)
    assert read["logits"].shape == (2, 5, 9)
    assert np.array_equal(read["logits"][0, [0, 2]], logits[0, [1, 3]])
    assert read["read"].tolist() == [[True, False, True, False, False], [True, True, False, False, False]]
    assert len(TASK.answers(read, NAMES)["label"][0]) == 2
    with pytest.raises(BundleError, match="tags words has one output"):
        TASK.read_outputs({"pooled": logits[:, 0]}, batch)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([1, 2]), "where int64"),
        (np.array([[1, 9], [0, 0]]), "row 0 has a label"),
        (np.array([[1, 1], [0, -1]]), "row 1 has a label"),
    ],
)
def test_labels_that_do_not_fit(labels: np.ndarray, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        METRICS["span_f1"].compute(tagged([[1, 2], [0, 0]]), labels)


def test_classes_without_names_have_no_spans() -> None:
    nameless = tagged([[1, 2]]) | {"tags": np.zeros((1, 9), np.int64)}
    with pytest.raises(UsageError, match="give class_names"):
        METRICS["span_f1"].compute(nameless, np.array([[1, 2]]))


def test_samples_in_hand() -> None:
    assert TASK.to_columns([["New", "York"], "a text"]) == {"text": ["New York", "a text"]}
    with pytest.raises(UsageError, match="for a single one"):
        TASK.to_columns("a text")
