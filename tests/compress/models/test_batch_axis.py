"""No axis is believed: two samples are run together and alone, and what that shows is taken or refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from compress.models.batch_axis import Arrays, BatchAxis, find_batch_axis

RNG = np.random.default_rng(0)
W = RNG.normal(size=(4, 3))
SAMPLES = [{"x": RNG.normal(size=(5, 4))} for _ in range(2)]
TOGETHER, ALONE = BatchAxis(True), BatchAxis(False)
Model = Callable[[np.ndarray], dict[str, np.ndarray]]


def find(model: Model, fixed: int | None = None) -> BatchAxis:
    def run(feeds: Arrays) -> Arrays:
        if fixed is not None and len(feeds["x"]) != fixed:
            raise ValueError("another batch")
        return model(feeds["x"])

    return find_batch_axis(run, SAMPLES, fixed, (ValueError,))


@pytest.mark.parametrize(
    ("model", "axis"),
    [
        (lambda x: {"y": x @ W, "class": (x @ W).argmax(-1)}, TOGETHER),
        (lambda x: {"y": np.cumsum(x @ W, axis=1)}, TOGETHER),  # a layer over time, batch first
        (lambda x: {"y": x @ W * (1 + 1e-4 * x.size)}, TOGETHER),  # kernels of a batch sum in another order
        (lambda x: {"y": x @ W * (1 + 1e-1 * x.size)}, ALONE),
        (lambda x: {"y": x @ W + 1e-3 * x.sum()}, ALONE),  # however little comes of the others
        (lambda x: {"y": x @ W - (x @ W).mean(axis=(0, 1))}, ALONE),  # a norm that takes its batch's statistics
        (lambda x: {"y": (x @ W).mean(axis=(0, 1), keepdims=True)}, ALONE),
        (lambda x: {"y": np.reshape(x, (1, 5, 4)) @ W}, ALONE),  # of one sample, whatever its file declares
    ],
)
def test_samples_share_a_call_where_their_answers_are_the_same(model: Model, axis: BatchAxis) -> None:
    assert find(model) == axis


def test_another_axis_is_named() -> None:
    found = find(lambda x: {"y": np.cumsum(x @ W, axis=0)})
    assert not found.together and "do not along axis 1: it takes 'x' as [5, batch, 4]" in found.problem


@pytest.mark.parametrize(
    "model",
    [
        lambda x: {"x": x, "y": np.cumsum(x @ W, axis=1).swapaxes(0, 1)},  # time first
        lambda x: {"x": x, "y": x.mean()},
        lambda x: {"x": x, "y": (x @ W).reshape(-1, 3)},  # a row for each token
    ],
)
def test_an_output_without_a_row_for_each_sample_lets_it_run_alone(model: Model) -> None:
    assert find(model) == BatchAxis(False, rowless=("y",))


@pytest.mark.parametrize(
    ("model", "fixed", "problem"),
    [
        (lambda x: {"y": x @ W}, 1, ""),
        (lambda x: {"y": x @ W}, 3, ""),
        (lambda x: {"y": x.mean()}, 3, "output 'y' [] has no row for each of the 3 samples"),
        (lambda x: {"y": x @ W - (x @ W).mean(axis=0)}, 3, "another beside other samples, and it takes 3 at once"),
    ],
)
def test_of_a_fixed_batch_the_rows_are_looked_at(model: Model, fixed: int, problem: str) -> None:
    found = find(model, fixed)
    assert not found.together and problem in found.problem and bool(problem) == bool(found.problem)
