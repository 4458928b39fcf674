"""Which layers stay float for speed: chosen from an injected table of times, never from this machine's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from compress.commands.reproduce import repeat_choices
from compress.context import PassResult
from compress.export.onnx import finish
from compress.formats.targets import TARGETS
from compress.graph.layers import find_layers
from compress.passes import Int8
from compress.rounding.fastest import (
    WORTH,
    PlacementChoice,
    PlacementTimes,
    choose_fastest,
    fit_border_rate,
    list_zero_based,
)
from compress.rounding.int8 import with_integer_layers
from compress.rounding.latency import (
    LayerCall,
    LayerTime,
    StateTimer,
    describe_calls,
    make_layer_graph,
    pretend_ranges,
    round_roughly,
)
from compress.rounding.qdq import write_state
from compress.rounding.state import GraphState, Range, restore_state
from compress.timing.clock import PROCESSES, Clock, GraphTimes
from compress.timing.kept import Kept
from compress.work import apply_pass
from compress.work.contexts import GraphContext

Price = Callable[[GraphState], float]
"""A state -> the milliseconds that a machine of the test takes for it."""


@dataclass(frozen=True)
class Priced(Clock):
    """A machine whose times are given: `price` of whole graphs, each the state that it was written of."""

    price: Price = lambda state: 1.0

    def time(self, graphs: Any, feeds: Any, budget_s: float, backends: Sequence[str] = ()) -> list[float]:
        return [self.price(state) for state in graphs]

    def compare(self, graphs: Any, feeds: Any, budget_s: float, is_clear: Any = None) -> GraphTimes:
        return GraphTimes(np.array([[self.price(state) for state in graphs]] * PROCESSES))


def mobile(norms: bool = True, stride: int = 1) -> ir.Model:
    """x [N, 8, 8, 8] -> two depthwise-separable blocks, each convolution with its own unfused batch norm -> y.

    `stride`: of the second block's depthwise layer.
    """
    rng, nodes, constants, x = np.random.default_rng(0), list[Any](), dict[str, np.ndarray](), "x"
    for name, shape, group in (
        ("dw1", (8, 1, 3, 3), 8),
        ("pw1", (8, 8, 1, 1), 1),
        ("dw2", (8, 1, 3, 3), 8),
        ("pw2", (8, 8, 1, 1), 1),
    ):
        constants[f"{name}.weight"] = rng.normal(size=shape).astype(np.float32)
        how = {"pads": [shape[-1] // 2] * 4, "group": group} | (
            {"strides": [2, 2]} if (name, stride) == ("dw2", 2) else {}
        )
        nodes.append(helper.make_node("Conv", [x, f"{name}.weight"], [f"{name}_out"], **how))
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


def timer(price: Price, root: Path | None = None) -> StateTimer:
    """A machine of such prices that keeps what it measured under `root`; files are the states themselves."""
    clock = Priced("onnxruntime-cpu", kept=Kept(root), price=price)
    call = ["onnxruntime-cpu", 1, 1, None]
    return StateTimer(clock, lambda state: state, FEEDS, call, "onnxruntime-cpu")  # type: ignore[arg-type, return-value]


def context(price: Price, root: Path) -> GraphContext:
    return replace(graphs.context(FEEDS * 4), timing=timer(price, root))


def integer_state(stride: int = 1) -> GraphState:
    model = mobile(stride=stride)
    names = [layer.name for layer in find_layers(model)]
    return with_integer_layers(GraphState(model), names, "all", False, False, round_roughly)


def n_depthwise(state: GraphState) -> int:
    return sum(name.startswith("dw") for name in state.integer)


def price_slow_depthwise(state: GraphState) -> float:
    """Each layer in int8 saves 0.2 of a float call of 1, but a depthwise one costs 0.5 more."""
    return 1.0 - 0.2 * len(state.integer) + 0.5 * n_depthwise(state)


def test_depthwise_layers_that_int8_slows_down_stay_float() -> None:
    choice, times = choose_fastest(integer_state(), timer(price_slow_depthwise))
    assert choice == PlacementChoice("all", ("dw1", "dw2"))
    assert times == PlacementTimes(everywhere=round(1 / 1.2, 4), chosen=round(1 / 0.6, 4))


def test_layers_that_read_large_maps_are_chosen_together() -> None:
    """Of each two neighbours in float and in int8 the border costs more than either form gains."""

    def price(state: GraphState) -> float:
        slow = [name in state.integer for name in ("dw1", "pw1", "dw2")]
        return 1.0 + 0.2 * sum(slow) + 1.0 * (len(set(slow)) > 1)

    choice, _ = choose_fastest(integer_state(stride=2), timer(price))
    assert choice == PlacementChoice("all", ("dw1", "dw2", "pw1"))


def test_of_steps_alike_the_one_with_most_in_int8_is_taken() -> None:
    choice, _ = choose_fastest(
        integer_state(), timer(lambda state: 1.0 + n_depthwise(state) + 0.01 * len(state.integer))
    )
    assert choice.in_float == ("dw1", "dw2")


def test_where_nothing_gains_all_are_computed_in_float() -> None:
    choice, times = choose_fastest(integer_state(), timer(lambda state: 1.0 + len(state.integer)))
    assert set(choice.in_float) == {"dw1", "pw1", "dw2", "pw2"} and times.chosen == 1.0


@pytest.mark.parametrize("gain", [0.9 * WORTH, -0.2])
def test_a_gain_that_is_not_worth_having_leaves_the_rule(gain: float) -> None:
    """A clock that reads a little otherwise the next time would write other bytes."""
    choice, _ = choose_fastest(integer_state(), timer(lambda state: 1.0 - gain * (n_depthwise(state) == 0)))
    assert choice == PlacementChoice("all", ())


class Doubtful(Priced):
    """A machine whose processes see states with depthwise layers in int8 `factors` times as slow as they are."""

    factors = (0.4, 1, 1, 1, 1, 2)

    def compare(self, graphs: Any, feeds: Any, budget_s: float, is_clear: Any = None) -> GraphTimes:
        times = super().compare(graphs, feeds, budget_s)
        slow = [bool(n_depthwise(state)) for state in graphs]
        return GraphTimes(np.where(slow, times.ms * np.array(self.factors)[:, None], times.ms))


def doubtful(clock: type[Priced], price: Price) -> StateTimer:
    return replace(timer(price), clock=clock("onnxruntime-cpu", price=price))


def test_what_fresh_processes_do_not_confirm_is_not_taken() -> None:
    choice, times = choose_fastest(integer_state(), doubtful(Doubtful, price_slow_depthwise))
    assert choice == PlacementChoice("all", ()) and times.chosen == times.everywhere


def test_what_all_are_slowed_by_alike_is_no_doubt() -> None:
    """Beside other work each call takes longer, now more, now less; how they stand to each other does not change."""

    class Busy(Priced):
        def compare(self, graphs: Any, feeds: Any, budget_s: float, is_clear: Any = None) -> GraphTimes:
            return GraphTimes(super().compare(graphs, feeds, budget_s).ms * np.array([1, 1, 2, 2, 3, 5])[:, None])

    choice, _ = choose_fastest(integer_state(), doubtful(Busy, price_slow_depthwise))
    assert choice == PlacementChoice("all", ("dw1", "dw2"))


def test_a_rule_that_is_surely_slower_than_float_is_not_fallen_back_to() -> None:
    """Doubt is about the choice: computed in float from int8 weights it is as fast as it came."""

    class Slower(Priced):
        def compare(self, graphs: Any, feeds: Any, budget_s: float, is_clear: Any = None) -> GraphTimes:
            ms = super().compare(graphs, feeds, budget_s).ms
            partly = [0 < len(state.integer) < 4 for state in graphs]
            return GraphTimes(np.where(partly, ms * np.array([0.9, 1, 1, 1, 1, 3])[:, None], ms))

    choice, times = choose_fastest(integer_state(), doubtful(Slower, price_slow_depthwise))
    assert set(choice.in_float) == {"dw1", "pw1", "dw2", "pw2"}
    assert times == PlacementTimes(everywhere=round(1 / 1.2, 4), chosen=1.0)


def test_steps_near_a_border_are_timed_until_they_are_clear() -> None:
    """A first look is off by as much as a border is away; the second asks on until the intervals are on one side."""
    clear = []

    class Hasty(Priced):
        def compare(self, graphs: Any, feeds: Any, budget_s: float, is_clear: Any = lambda times: True) -> GraphTimes:
            times = super().compare(graphs, feeds, budget_s)
            rows = np.ones_like(times.ms)
            answers = []
            for off in (0.1, 0.01):
                rows[::2, 1:], rows[1::2, 1:] = 1 - off, 1 + off
                answers.append(is_clear(GraphTimes(times.ms * rows)))
            clear.append(answers)
            return times

    def price(state: GraphState) -> float:
        return 1.0 + WORTH * n_depthwise(state)

    choice, _ = choose_fastest(integer_state(), doubtful(Hasty, price))
    assert choice.in_float == ("dw1", "dw2")
    assert clear[:2] == [[True, True], [False, True]]


def test_a_choice_that_is_surely_slower_than_float_is_not_taken() -> None:
    """Though it is faster than the rule, and as good as the best but for a few per cent."""
    choice, times = choose_fastest(
        integer_state(), timer(lambda state: 1.0 + 0.2 * n_depthwise(state) + 0.04 * len(state.integer))
    )
    assert set(choice.in_float) == {"dw1", "pw1", "dw2", "pw2"} and times.chosen == 1.0


def test_a_few_per_cent_more_are_not_worth_more_layers_in_float() -> None:
    """They would be there or not by how busy the machine was."""

    def price(state: GraphState) -> float:
        as_it_came = not state.integer and not state.unpacked
        return 1.0 + 0.2 * n_depthwise(state) + 0.04 * len(state.integer) + 0.1 * as_it_came

    choice, _ = choose_fastest(integer_state(), timer(price))
    assert choice.in_float == ("dw1", "dw2")


def test_layers_of_one_form_are_chosen_alike() -> None:
    """Whatever a clock says of one of them alone."""
    choice, _ = choose_fastest(integer_state(), timer(lambda state: 1.0 + 0.9 * ("dw1" in state.integer)))
    assert choice.in_float == ("dw1", "dw2")


def test_borders_cost_by_the_size_of_their_tensor() -> None:
    def call(size: int) -> LayerCall:
        return LayerCall("MatMul", (4, 4), (1, size), (), False, "")

    times = {call(size): LayerTime(1, 1, 0.1, 0.1 + 0.002 * size) for size in (100, 200, 400)}
    assert fit_border_rate(times) == pytest.approx(0.002)
    assert fit_border_rate({}) == 0


def test_the_pass_names_the_layers_that_it_lets_compute_in_float_and_times_are_of_this_machine(tmp_path: Path) -> None:
    result = apply_pass(Int8(), GraphState(mobile()), context(price_slow_depthwise, tmp_path))
    assert set(result.model.integer) == {"pw1", "pw2"}
    decided = {decision.layer: decision for decision in result.decisions}
    assert decided["dw1"].action == "int8" and "computed in float" in decided["dw1"].reason
    shared = [note.text for note in result.notes if not note.here]
    (here,) = [note.text for note in result.notes if note.here]
    assert "2 layers compute in float" in shared[0] and "at 0.83x, this at 1.67x" in here
    assert not re.search(r"[0-9]x", " ".join([*shared, *(d.reason for d in result.decisions)])), "what is hashed"
    assert result.choice.keys() == {"key", "kind", "in_float"}


@pytest.mark.parametrize("target", ["onnxruntime-cpu", "tensorrt", "tensorrt-rtx", "openvino"])
def test_what_one_target_s_times_choose_is_in_no_other_s_file(target: str, tmp_path: Path) -> None:
    def price_one_kept(state: GraphState) -> float:
        return 1.0 + 0.2 * (len(state.integer) - 1) + 0.5 * (state.placement == "all")

    state = apply_pass(Int8(), GraphState(mobile()), context(price_one_kept, tmp_path)).model
    rule = apply_pass(Int8(placement="auto"), GraphState(mobile()), context(price_one_kept, tmp_path)).model
    assert len(state.integer) < 4 and len(rule.integer) == 4
    again = restore_state(state.model, state.record(), state.arrays())
    written, expected = (
        ir.to_proto(finish(each, TARGETS[target])[0]).SerializeToString(deterministic=True) for each in (again, rule)
    )
    assert (written == expected) == (target != "onnxruntime-cpu")


def test_candidates_are_timed_with_the_ranges_that_are_written(tmp_path: Path) -> None:
    timed: list[dict[str, Range]] = []

    def see(state: GraphState) -> float:
        timed.append(dict(state.ranges))
        return 1.0 - 0.2 * len(state.integer)

    result = apply_pass(Int8(), GraphState(mobile()), context(see, tmp_path))
    assert all(ranges.items() <= result.model.ranges.items() for ranges in timed if ranges)
    assert list_zero_based(result.model) == ["dw1_relu", "dw2_relu", "pw1_relu"]  # and not x
    # with data whose range begins at zero it is another graph: what was found fastest before is not taken up
    before = len(timed)
    positive = replace(context(see, tmp_path), batches=[{"x": np.abs(FEEDS[0]["x"])}])
    assert "x" in list_zero_based(apply_pass(Int8(), GraphState(mobile()), positive).model)
    assert len(timed) > before


def test_named_placements_and_a_target_that_is_not_timed_keep_all_layers(tmp_path: Path) -> None:
    given = context(lambda state: 1.0 + len(state.integer), tmp_path)
    for config, where in ((Int8(placement="auto"), given), (Int8(), replace(given, timing=None))):
        result = apply_pass(config, GraphState(mobile()), where)
        assert len(result.model.integer) == 4 and not result.choice


def test_a_choice_is_taken_up_again_by_its_machine_and_from_a_lock_by_any(tmp_path: Path, cpuinfo: Path) -> None:
    first = apply_pass(Int8(), GraphState(mobile()), context(price_slow_depthwise, tmp_path))

    def refuse(state: GraphState) -> float:
        raise AssertionError("it was timed again")

    again = apply_pass(Int8(), GraphState(mobile()), context(refuse, tmp_path))
    assert again.choice == first.choice and again.model.record() == first.model.record()
    cpuinfo.write_text("model name: another")
    with pytest.raises(AssertionError, match="timed again"):
        apply_pass(Int8(), GraphState(mobile()), context(refuse, tmp_path))
    repeat_choices({"1": first.choice}, tmp_path)
    given = apply_pass(Int8(), GraphState(mobile()), context(refuse, tmp_path))
    assert given.choice == first.choice and given.model.record() == first.model.record()


def test_what_healing_makes_slow_is_chosen_anew_and_a_lock_repeats_both_choices(tmp_path: Path) -> None:
    def price(state: GraphState) -> float:
        return 1.0 if not state.integer else 3.0 if state.leave_out else 0.5

    def heal(price: Price) -> PassResult[GraphState]:
        feeds = graphs.images()
        given = replace(graphs.context(feeds), timing=replace(timer(price, tmp_path), feeds=feeds))
        return apply_pass(Int8(calibration="minmax", ignore=("fc",)), GraphState(graphs.broken_sum()), given)

    first = heal(price)
    assert first.model.leave_out == ["Add"] and not first.model.integer  # and before it was healed, all were in int8
    assert first.choice["in_float"] == ("conv1", "conv2") and first.choice["before"]["in_float"] == ()
    assert any("all in int8 would run at 0.33x, this at 1.00x here" in note.text for note in first.notes)

    def refuse(state: GraphState) -> float:
        raise AssertionError("it was timed again")

    (tmp_path / "measured").rename(tmp_path / "gone")
    repeat_choices({"0": first.choice}, tmp_path)
    assert heal(refuse).model.record() == first.model.record()


def test_layer_times_are_kept_and_what_the_backend_refuses_is_said(tmp_path: Path) -> None:
    model, log = mobile(), list[str]()
    calls = describe_calls(model, [layer.name for layer in find_layers(model)], FEEDS[0])
    assert len(set(calls.values())) == 2  # four layers, two shapes
    timed: list[int] = []

    class Counting(Priced):
        def time(self, graphs: Any, feeds: Any, budget_s: float, backends: Sequence[str] = ()) -> list[float]:
            timed.append(len(graphs))
            return [1.0, 2.0, 3.0, 8.0]  # float and int8, once and three times

    counting = replace(timer(lambda state: 1.0), clock=Counting("onnxruntime-cpu", kept=Kept(tmp_path)))
    first = counting.time_layers(calls.values(), log=log.append)
    assert set(first.values()) == {LayerTime(1.0, 3.0, 0.0, 0.0)} and timed == [4, 4]
    assert counting.time_layers(calls.values(), log=log.append) == first and len(timed) == 2 and len(log) == 1
    broken = StateTimer(Clock("onnxruntime-cpu", 0), lambda state: state.model, FEEDS)  # no threads: UsageError
    assert broken.time_layers(calls.values(), log=log.append) == {}
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
