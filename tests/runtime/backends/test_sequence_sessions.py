"""Models that hand states from call to call are read as whole sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from runtime.backends.base import Feeds, read_sequences
from runtime.bundle.tensors import State, TensorSpec
from runtime.errors import BundleError, UsageError

STATE = State("sum_out", TensorSpec("sum", "float32", (2, 1)), initial=1.0)


class Summing:
    """x [1, 3] and what was summed before -> y [1, 3], the number of the call, and the sum twice."""

    inputs = (TensorSpec("x", "float32", ("batch", 3)), TensorSpec("sum", "float32", (2, 1)))
    outputs = (
        TensorSpec("y", "float32", ("batch", 3)),
        TensorSpec("total", "float32", ()),
        TensorSpec("sum_out", "float32", (2, 1)),
    )

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> Feeds:
        assert feeds["x"].shape == (1, 3)
        total = feeds["sum"] + feeds["x"].sum()
        return {"y": feeds["x"] * 2, "total": total[0, 0], "sum_out": total}

    def close(self) -> None:
        pass


def test_a_sequence_is_run_call_by_call_and_begins_anew() -> None:
    session = read_sequences(Summing(), (STATE,))
    assert [(spec.name, spec.shape) for spec in session.inputs] == [("x", (1, "time", 3))]
    assert [(spec.name, spec.shape) for spec in session.outputs] == [("y", (1, "time", 3)), ("total", (1, "time"))]
    x = np.arange(12, dtype=np.float32).reshape(1, 4, 3)
    for _ in range(2):
        outputs = session.run({"x": x})
        np.testing.assert_array_equal(outputs["y"], 2 * x)
        np.testing.assert_array_equal(outputs["total"], 1 + x.sum(axis=2).cumsum(axis=1))


def test_sequences_without_a_length_and_states_of_another_model_are_refused() -> None:
    with pytest.raises(UsageError, match=r"one length, of 1 or more: 'x' \[1, 0, 3\]"):
        read_sequences(Summing(), (STATE,)).run({"x": np.zeros((1, 0, 3), np.float32)})
    with pytest.raises(BundleError, match="has no 'h', which is a state"):
        read_sequences(Summing(), (State("sum_out", TensorSpec("h", "float32", (1,))),))
