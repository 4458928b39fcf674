"""The work of a run: done once, kept, and read back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graphs import one_layer

from compress.context import PassResult
from compress.errors import OutputError, SourceError
from compress.execution.cached import _refuse_broken, _save_arrays, run_graph_pass
from compress.execution.run import layer_rows
from compress.facts import LayerDecision, Note
from compress.graph.layers import find_layers
from compress.planning.sets import example_feeds
from compress.rounding.quantized_weight import round_to_nearest
from compress.rounding.state import GraphState, Range
from compress.store.cache import ResultCache
from compress.work import WORK, apply_pass
from runtime.bundle.manifest import fixed_batch
from runtime.bundle.tensors import TensorSpec


class Rounding:
    """A pass that counts how often it works."""

    kind = "rounding"
    calls = 0


@pytest.fixture(autouse=True)
def _work_of_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORK, "rounding", f"{__name__}:apply_rounding")


def apply_rounding(config: Rounding, model: Any, context: Any) -> PassResult:
    config.calls += 1
    graph = one_layer()
    state = GraphState(
        graph,
        integer=["fc"],
        weights={"fc": round_to_nearest(find_layers(graph)[0].matrix(), 4, 32, False)},
        biases={"fc": np.arange(8, dtype=np.float32)},
        ranges={"x": Range(-1.5, 2.0, 2.0)},
        half="float16",
        half_kept=["node_y"],
    )
    return PassResult(
        state,
        (LayerDecision("fc", "Linear", "int8", "because"),),
        (Note("warning", "look"),),
        {"fc": {"sqnr_db": 31.5}},
    )


def test_a_pass_is_done_once_and_comes_back_as_it_was(tmp_path: Path) -> None:
    store, one = ResultCache(tmp_path), Rounding()
    first, second = (run_graph_pass(store, "k", one, None, None) for _ in range(2))  # type: ignore[arg-type]
    made = apply_pass(Rounding(), None, None)
    assert one.calls == 1
    for found in (first, second):
        assert (found.decisions, found.notes, found.measured) == (made.decisions, made.notes, made.measured)
        assert found.model.record() == made.model.record()
        assert found.model.arrays().keys() == made.model.arrays().keys()
        for name, array in made.model.arrays().items():
            np.testing.assert_array_equal(found.model.arrays()[name], array)
            assert found.model.arrays()[name].dtype == array.dtype
        assert ir.to_proto(found.model.model).graph == ir.to_proto(made.model.model).graph


def test_a_float_model_that_gives_nan_is_refused() -> None:
    _refuse_broken({"y": np.zeros((2, 3), np.float32)})
    with pytest.raises(SourceError, match=r"the float model's outputs on the evaluation set are broken: .*y"):
        _refuse_broken({"y": np.array([[0.0], [np.nan]], np.float32)})


def test_arrays_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"arrays\.safetensors: cannot be written: .*finished work is kept"):
        _save_arrays({"a": np.zeros(3)}, tmp_path / "nowhere/arrays.safetensors")


@pytest.mark.parametrize(("batch", "n", "expected"), [("batch", 1, 2), ("batch", 3, 2), (1, 1, 1)])
def test_the_example_has_two_samples_where_the_batch_is_free(batch: int | str, n: int, expected: int) -> None:
    specs = (TensorSpec("x", "float32", (batch, 2)),)
    assert len(example_feeds({"x": np.ones((n, 2), np.float32)}, specs)["x"]) == expected
    assert fixed_batch(specs) == (batch if batch == 1 else None)


def test_the_layer_table_says_the_last_word_and_the_way_there() -> None:
    def result(action: str, **measured: float) -> PassResult:
        return PassResult(None, (LayerDecision("fc", "Linear", action, f"why {action}"),), (), {"fc": measured})

    rows = layer_rows(["smoothquant", "int8"], [result("smoothed", before=1.0), result("int8", sqnr_db=30.0)])
    assert rows == [
        {
            "layer": "fc",
            "type": "Linear",
            "action": "int8",
            "pass": "int8",
            "reason": "why int8",
            "history": ["smoothquant: smoothed why smoothed", "int8: int8 why int8"],
            "before": 1.0,
            "sqnr_db": 30.0,
        }
    ]
    (row,) = layer_rows(["smoothquant", "int8"], [result("kept"), result("kept")])
    assert (row["action"], row["pass"], len(row["history"])) == ("kept", "int8", 2)
    curves = [PassResult(None, (), (), {"distill: training loss": {"1": loss}}) for loss in (2.0, 1.0)]
    assert [(row["layer"], row["pass"], row["1"]) for row in layer_rows(["distill", "distill 2"], curves)] == [
        ("distill: training loss", "distill", 2.0),
        ("distill 2: training loss", "distill 2", 1.0),
    ]
    assert layer_rows(["int8"], [PassResult(None, (), (Note("info", "hear"),))]) == [
        {"layer": "", "type": "note", "action": "info", "reason": "hear"}
    ]
