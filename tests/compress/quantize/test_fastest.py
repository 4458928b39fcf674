"""Which layers stay float for speed: chosen from an injected table of times, never from this machine's own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from compress.commands.reproduce import repeat_choices
from compress.graph.layers import find_layers
from compress.graph.run import Feeds
from compress.passes import Int8
from compress.quantize.fastest import (
    Forecaster,
    PlacementChoice,
    fit_border_rate,
    keep_choice,
    list_zero_based,
    pick,
    propose,
    read_choice,
)
from compress.quantize.int8 import with_integer_layers
from compress.quantize.latency import (
    LayerCall,
    LayerTable,
    LayerTime,
    Stopwatch,
    describe_calls,
    make_layer_graph,
    pretend_ranges,
    round_roughly,
)
from compress.quantize.qdq import write_state
from compress.quantize.state import GraphState, Range
from compress.store.cache import name_measured_file
from compress.work import apply_pass
from compress.work.contexts import GraphContext, GraphTiming

Price = Callable[[GraphState], float]
"""A state -> the milliseconds that a machine of the test takes for it."""


class Clock(Stopwatch):
    """A machine whose times are given: `price` of whole graphs, and no layer is measured."""

    def __init__(self, price: Price) -> None:
        super().__init__("onnxruntime-cpu", 1, lambda state: state.model)
        object.__setattr__(self, "price", price)

    def time(self, states: Sequence[GraphState], feeds: Sequence[Feeds], budget_s: float) -> list[float]:
        return [self.price(state) for state in states]  # type: ignore[attr-defined]


def mobile(norms: bool = True) -> ir.Model:
    """x [N, 8, 8, 8] -> two depthwise-separable blocks, each convolution with its own unfused batch norm -> y."""
    rng, nodes, constants, x = np.random.default_rng(0), list[Any](), dict[str, np.ndarray](), "x"
    for name, shape, group in (
        ("dw1", (8, 1, 3, 3), 8),
        ("pw1", (8, 8, 1, 1), 1),
        ("dw2", (8, 1, 3, 3), 8),
        ("pw2", (8, 8, 1, 1), 1),
    ):
        constants[f"{name}.weight"] = rng.normal(size=shape).astype(np.float32)
        pads = [shape[-1] // 2] * 4
        nodes.append(helper.make_node("Conv", [x, f"{name}.weight"], [f"{name}_out"], pads=pads, group=group))
        x = f"{name}_out"
        if norms:
            ones = {part: np.ones(8, np.float32) for part in ("gamma", "beta", "mean", "var")}
            constants |= {f"{name}.{part}": values for part, values in ones.items()}
            nodes.append(helper.make_node("BatchNormalization", [x, *(f"{name}.{p}" for p in ones)], [f"{name}_norm"]))
            x = f"{name}_norm"
        nodes.append(helper.make_node("Relu", [x], [f"{name}_relu"]))
        x = f"{name}_relu"
    nodes.append(helper.make_node("GlobalAveragePool", [x], ["y"]))
    return graphs.build(nodes, constants, {"x": ("n", 8, 8, 8)}, {"y": ("n", 8, 1, 1)})


FEEDS = [{"x": np.random.default_rng(0).standard_normal((1, 8, 8, 8)).astype(np.float32)}]


def table_of(model: ir.Model, depthwise: LayerTime, others: LayerTime) -> LayerTable:
    """A table in memory of the model's layers, static int8."""
    table = LayerTable(None)
    for layer in find_layers(model):
        call = describe_calls(model, [layer.name], FEEDS[0])[layer.name]
        table.times[f"static {call.to_text()}"] = depthwise if layer.groups > 1 else others
    return table


def chosen_by(model: ir.Model, table: LayerTable) -> list[set[str]]:
    """The layers in int8 of each proposal."""
    names = [layer.name for layer in find_layers(model)]
    state = with_integer_layers(GraphState(model), names, "all", False, False, round_roughly)
    calls = describe_calls(model, names, FEEDS[0])
    times = table.measure(calls.values(), Clock(lambda state: 0.0))
    return [set(chosen) for chosen, kind in propose(state, calls, times, FEEDS[0]) if kind == "all"]


def context(clock: Clock, folder: Path, table: LayerTable, machine: str = "this one") -> GraphContext:
    """What `int8` is given on a machine whose table is known."""

    def file_of(key: Sequence[object]) -> Path:
        path = folder / f"{key[0]}-{zlib.crc32(repr(key[1:]).encode())}.json"
        if key[0] == "layers" and not path.exists():
            replace(table, path=path).measure([some_call()], ticking())  # writes the rest, too
        return path

    timing = GraphTiming(clock, FEEDS, machine, file_of, ["onnxruntime-cpu", 1, 1, None])
    return replace(graphs.context(FEEDS * 4), timing=timing)


def some_call() -> LayerCall:
    return LayerCall("MatMul", (4, 4), (1, 4), (), False, "")


def ticking() -> Clock:
    """A machine on which all layers take as long."""
    return Clock(lambda state: 1.0)


SLOW_DEPTHWISE = LayerTime(0.1, 0.9, 0.0, 0.001), LayerTime(0.8, 0.3, 0.0, 0.001)


def test_depthwise_layers_that_int8_slows_down_stay_float() -> None:
    proposals = chosen_by(mobile(), table_of(mobile(), *SLOW_DEPTHWISE))
    assert {"dw1", "pw1", "dw2", "pw2"} in proposals  # today's rule is always tried
    assert {"pw1", "pw2"} in proposals


def test_a_layer_that_loses_less_than_its_borders_cost_stays_int8() -> None:
    """Inside a chain of int8 layers a little loss is cheaper than DQ and Q around it."""
    model = mobile(norms=False)
    cheap = table_of(model, LayerTime(0.10, 0.11, 0.0, 0.5), LayerTime(0.8, 0.3, 0.0, 0.5))
    names = [layer.name for layer in find_layers(model)]
    state = with_integer_layers(GraphState(model), names, "all", False, False, round_roughly)
    calls = describe_calls(model, names, FEEDS[0])
    forecast = Forecaster.of(state, calls, cheap.measure(calls.values(), ticking()), FEEDS[0])
    alone = frozenset({"pw1", "pw2"})
    assert forecast.rate > 0 and forecast.borders_ms(alone) > forecast.borders_ms(names)
    assert "dw2" in forecast.improve(alone, calls, 1.0, float("inf"))


def test_borders_cost_by_the_size_of_their_tensor() -> None:
    def call(size: int) -> LayerCall:
        return LayerCall("MatMul", (4, 4), (1, size), (), False, "")

    times = {call(size): LayerTime(1, 1, 0.1, 0.1 + 0.002 * size) for size in (100, 200, 400)}
    assert fit_border_rate(times) == pytest.approx(0.002)
    assert fit_border_rate({}) == 0


@pytest.mark.parametrize(
    ("ms", "weights", "taken"),
    [
        ((2.0, 3.0), (9, 1), None),  # all slower than float
        ((0.9, 0.5), (9, 1), 1),
        ((0.51, 0.5), (9, 1), 0),  # as fast but for noise: the smaller file
        ((1.01, 0.99), (9, 1), 1),  # but never one slower than float
        ((0.5, 0.5), (9, 9), 0),
    ],
)
def test_the_fastest_candidate_is_taken_and_none_that_is_slower_than_float(
    ms: tuple[float, ...], weights: tuple[int, ...], taken: int | None
) -> None:
    assert pick(1.0, ms, weights) == taken


def n_depthwise(state: GraphState) -> int:
    return sum(name.startswith("dw") for name in state.integer)


def test_the_pass_names_the_layers_that_it_lets_compute_in_float_with_both_times(tmp_path: Path) -> None:
    clock = Clock(lambda state: 1.0 - 0.2 * len(state.integer) + 0.5 * n_depthwise(state))
    result = apply_pass(Int8(), GraphState(mobile()), context(clock, tmp_path, table_of(mobile(), *SLOW_DEPTHWISE)))
    assert set(result.model.integer) == {"pw1", "pw2"}
    decided = {decision.layer: decision for decision in result.decisions}
    assert decided["dw1"].action == "int8"
    assert "computed in float" in decided["dw1"].reason and "0.1 ms, 0.9 in int8" in decided["dw1"].reason
    assert result.measured["dw1"].items() >= {"float_ms": 0.1, "int8_ms": 0.9}.items()
    assert "2 layers are computed in float" in result.notes[0].text and "1.67x instead of 0.83x" in result.notes[0].text


def test_candidates_are_timed_with_the_ranges_that_are_written(tmp_path: Path) -> None:
    timed: list[dict[str, Range]] = []

    def see(state: GraphState) -> float:
        timed.append(state.ranges)
        return 1.0 - 0.2 * len(state.integer)

    result = apply_pass(
        Int8(), GraphState(mobile()), context(Clock(see), tmp_path, table_of(mobile(), *SLOW_DEPTHWISE))
    )
    assert all(ranges == result.model.ranges for ranges in timed if ranges)
    assert list_zero_based(result.model) == ["dw1_relu", "dw2_relu", "pw1_relu"]  # and not x
    # with data whose range begins at zero it is another graph: what was found fastest before is not taken up
    before = len(timed)
    positive = replace(
        context(Clock(see), tmp_path, table_of(mobile(), *SLOW_DEPTHWISE)), batches=[{"x": np.abs(FEEDS[0]["x"])}]
    )
    assert "x" in list_zero_based(apply_pass(Int8(), GraphState(mobile()), positive).model)
    assert len(timed) > before


def test_where_nothing_gains_all_are_computed_in_float_from_weights_in_int8_and_the_pass_says_so(
    tmp_path: Path,
) -> None:
    clock = Clock(lambda state: 1.0 + len(state.integer))
    result = apply_pass(Int8(), GraphState(mobile()), context(clock, tmp_path, table_of(mobile(), *SLOW_DEPTHWISE)))
    assert not result.model.integer and set(result.model.unpacked) == set(result.model.weights)
    assert all("W8, computed in float" in decision.reason for decision in result.decisions)
    assert "nothing is faster in int8 here (0.20x with all layers)" in result.notes[0].text


def test_named_placements_and_a_target_that_is_not_timed_keep_all_layers(tmp_path: Path) -> None:
    given = context(Clock(lambda state: 1.0 + len(state.integer)), tmp_path, table_of(mobile(), *SLOW_DEPTHWISE))
    for config, where in ((Int8(placement="auto"), given), (Int8(), replace(given, timing=None))):
        result = apply_pass(config, GraphState(mobile()), where)
        assert len(result.model.integer) == 4 and not result.choice


def test_a_choice_is_taken_up_again_by_its_machine_and_from_a_lock_by_any(tmp_path: Path) -> None:
    clock = Clock(lambda state: 1.0 - 0.2 * len(state.integer) + 0.5 * n_depthwise(state))
    table = table_of(mobile(), *SLOW_DEPTHWISE)
    first = apply_pass(Int8(), GraphState(mobile()), context(clock, tmp_path, table))

    def refuse(state: GraphState) -> float:
        raise AssertionError("it was timed again")

    again = apply_pass(Int8(), GraphState(mobile()), context(Clock(refuse), tmp_path, table))
    assert again.choice == first.choice and again.model.record() == first.model.record()
    with pytest.raises(AssertionError, match="timed again"):
        apply_pass(Int8(), GraphState(mobile()), context(Clock(refuse), tmp_path, table, machine="another"))
    cache = tmp_path / "cache"
    repeat_choices({"1": first.choice}, cache)
    path = name_measured_file(cache, first.choice["key"])
    assert read_choice(path, "another") == PlacementChoice.from_record(
        {k: v for k, v in first.choice.items() if k != "key"}
    )


def test_a_kept_choice_that_was_edited_is_none(tmp_path: Path) -> None:
    path = tmp_path / "choice.json"
    keep_choice(path, PlacementChoice("all", {"a": (1.0, 2.0), "b": None}, 1.0, 2.0, 0.5, "here").to_record())
    assert read_choice(path, "here") == PlacementChoice("all", {"a": (1.0, 2.0), "b": None}, 1.0, 2.0, 0.5, "here")
    path.write_text(path.read_text().replace("0.5", "0.1"))
    assert read_choice(path, "here") is None


def test_a_table_measures_what_it_lacks_keeps_it_and_says_what_the_backend_refuses(tmp_path: Path) -> None:
    model, log = mobile(), list[str]()
    calls = describe_calls(model, [layer.name for layer in find_layers(model)], FEEDS[0])
    assert len(set(calls.values())) == 2  # four layers, two shapes

    class Counting(Clock):
        def time(self, states: Sequence[GraphState], feeds: Sequence[Feeds], budget_s: float) -> list[float]:
            timed.append(len(states))
            return [1.0, 2.0, 3.0, 8.0]  # float and int8, once and three times

    timed: list[int] = []
    first = LayerTable.open(tmp_path / "table.json").measure(calls.values(), Counting(lambda s: 0.0), log=log.append)
    assert set(first.values()) == {LayerTime(1.0, 3.0, 0.0, 0.0)} and timed == [4, 4]
    kept = LayerTable.open(tmp_path / "table.json").measure(calls.values(), Counting(lambda s: 0.0), log=log.append)
    assert kept == first and len(timed) == 2 and len(log) == 1
    broken = Stopwatch("onnxruntime-cpu", 0, lambda state: state.model)  # no threads: UsageError
    assert LayerTable(None).measure(calls.values(), broken, log=log.append) == {}
    assert "could not be timed" in log[-1]


@pytest.mark.parametrize("op", ["Conv", "MatMul", "Gemm"])
def test_a_layer_s_graph_is_the_layer_and_quantizes_as_the_model_does(op: str) -> None:
    model = {"Conv": mobile, "MatMul": graphs.one_layer, "Gemm": lambda: graphs.one_layer(op="Gemm")}[op]()
    feeds = FEEDS[0] if op == "Conv" else graphs.vectors(64)[0]
    layer = find_layers(model)[0]
    call = describe_calls(model, [layer.name], feeds)[layer.name]
    alone = make_layer_graph(call, 3)
    copies = find_layers(alone)
    assert [copy.matrix().shape for copy in copies] == [layer.matrix().shape] * 3
    assert {copy.groups for copy in copies} == {layer.groups} and {copy.op for copy in copies} == {op}
    kind = "all" if op == "Conv" else "inputs"
    state = with_integer_layers(GraphState(alone), [c.name for c in copies], kind, False, False, round_roughly)
    written = write_state(pretend_ranges(state), "u8s8")
    (outputs,) = graphs.run(written, [{"x": np.ones(call.input, np.float32)}])
    assert np.isfinite(outputs).all()
    assert graphs.operators(written).count("QuantizeLinear") == (7 if op == "Conv" else 1)
