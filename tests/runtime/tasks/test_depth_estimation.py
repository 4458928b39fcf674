"""Depths of pixels: which output they are, and how they are judged."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.errors import BundleError
from runtime.tasks import find_task
from runtime.tasks.base import BatchFacts
from runtime.tasks.metrics import METRICS, why_not

TASK = find_task("depth-estimation")


def read(depth: np.ndarray) -> dict[str, np.ndarray]:
    return TASK.read_outputs({"out": depth}, BatchFacts(len(depth)))


@pytest.mark.parametrize("shape", [(2, 4, 5), (2, 1, 4, 5)])
def test_one_map_an_image(shape: tuple[int, ...]) -> None:
    assert read(np.ones(shape))["depth"].shape == (2, 4, 5)


def test_several_channels_are_no_depth() -> None:
    with pytest.raises(BundleError, match=r"one output \[batch, height, width\] of depths; this model: out \(2, 3, 4"):
        read(np.ones((2, 3, 4, 5)))


def test_errors_are_relative_and_of_labelled_pixels_alone() -> None:
    outputs = read(np.array([[[1.0, 2.0]], [[3.0, 9.0]]]))
    labels = np.array([[[2.0, 2.0]], [[3.0, 0.0]]])
    assert METRICS["abs_rel"].compute(outputs, labels) == pytest.approx(0.5 / 3)
    assert METRICS["delta1"].compute(outputs, labels) == pytest.approx(2 / 3)


def test_maps_of_another_size_are_not_compared() -> None:
    why = why_not(METRICS["abs_rel"], "depth-estimation", read(np.ones((2, 4, 5))), np.ones((2, 8, 10)))
    assert why is not None and "as large as the model's, [4, 5]" in why
