"""What a CTC model's frames write."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.encode.split import Split
from runtime.errors import BundleError
from runtime.metrics.texts import unpack_texts
from runtime.tasks import find_task
from runtime.tasks.base import BatchFacts
from runtime.tasks.ctc_speech_recognition import write_classes
from runtime.tasks.metrics import METRICS

NAMES = ("", " ", "a", "b")
TASK = find_task("ctc-speech-recognition")


def logits_of(*rows: list[int]) -> np.ndarray:
    return (5 * np.eye(len(NAMES), dtype=np.float32))[np.array(rows)]


def read(*rows: list[int]) -> dict[str, np.ndarray]:
    return TASK.read_outputs({"logits": logits_of(*rows)}, BatchFacts(len(rows), class_names=NAMES))


@pytest.mark.parametrize(
    ("frames", "text"),
    [([2, 2, 2], "a"), ([2, 0, 2], "aa"), ([0, 0, 2, 3, 3, 0], "ab"), ([1, 2, 1, 1, 3, 1], "a b"), ([0, 0], "")],
)
def test_repeated_frames_write_once_and_the_blank_parts_them(frames: list[int], text: str) -> None:
    assert write_classes(np.array(frames), NAMES) == text


def test_metrics_of_texts_are_of_what_was_written() -> None:
    outputs = read([2, 0, 2, 3], [2, 2, 1, 3])
    assert METRICS["cer"].compute(outputs, ["aab", "a a"]) == pytest.approx(1 / 6)
    assert METRICS["text_agreement"].compute(outputs, outputs) == 1


def test_batches_and_pieces_of_a_recording_are_joined() -> None:
    parts = [read([2, 0, 2, 0]), read([2, 3, 2, 3])]
    joined = {name: TASK.join_batches(name, [part[name] for part in parts]) for name in parts[0]}
    split = Split({}, np.array([0, 0]), np.array([3.0, 1.0]))
    whole = TASK.join_rows(joined, split, {}, BatchFacts())
    assert unpack_texts(whole["answer"]) == ["aa abab"] and whole["score"].shape == (1,)


def test_other_outputs_and_a_broken_model() -> None:
    with pytest.raises(BundleError, match=r"a name for each class; this model: logits \(1, 2, 4\), and 0 names"):
        TASK.read_outputs({"logits": logits_of([1, 2])}, BatchFacts(1))
    broken = TASK.read_outputs({"logits": logits_of([1, 2]) * np.nan}, BatchFacts(1, class_names=NAMES))
    assert np.isnan(broken["score"]).all()
