"""Layers back to float under a budget: the best set by what they lose, the budget kept, the metric decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import graphs
import onnx_ir as ir
import pytest
from graphs import context, facts_of
from pydantic import ValidationError

from compress.errors import PassError
from compress.formats.targets import TARGETS
from compress.graph.layers import find_layers
from compress.graph.run import Feeds
from compress.passes import Fp8, Int8
from compress.rounding.budgets import BudgetMissed
from compress.rounding.latency import LayerTime, StateTimer
from compress.rounding.measure import measure_groups
from compress.rounding.mixed import (
    Verdict,
    count_bytes,
    group_fused,
    list_returned,
    price_bytes,
    price_time,
    restore_within_budget,
    return_to_float,
)
from compress.rounding.qdq import write_state
from compress.rounding.state import GraphState
from compress.timing.clock import Clock
from compress.work import apply_pass

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = TARGETS["onnxruntime-cpu"]
FEEDS = graphs.images()


def round_all(model: ir.Model, feeds: list[Feeds], **config: Any) -> GraphState:
    found: GraphState = apply_pass(Int8(bias_correction=False, **config), GraphState(model), context(feeds)).model
    return found


@pytest.fixture(scope="module")
def state() -> GraphState:
    return round_all(graphs.residual_cnn(), FEEDS, placement="all")


def write(state: GraphState) -> ir.Model:
    return write_state(state, "u8s8")


def test_what_reads_one_tensor_or_is_added_stays_together(state: GraphState) -> None:
    transformer = round_all(graphs.transformer(), graphs.tokens())
    assert {"query", "key", "value"} in [set(group) for group in group_fused(transformer)]
    assert ("projection",) in group_fused(transformer)
    groups = group_fused(state)
    assert sorted(name for group in groups for name in group) == sorted([*state.integer, *state.weight_only])
    adds = {node.name: [v for v in node.inputs if v is not None] for node in state.model.graph if node.op_type == "Add"}
    outputs = {layer.output: layer.name for layer in find_layers(state.model)}
    for inputs in adds.values():
        names = {outputs[value] for value in inputs if value in outputs}
        assert any(names <= set(group) for group in groups)


def test_of_all_sets_that_keep_the_bytes_that_of_least_loss_is_taken(state: GraphState) -> None:
    groups = [(name,) for name in state.integer]
    hurt = [0.3, 0.02, 0.05, 0.2, 0.01, 0.04][: len(groups)]
    whole = count_bytes(write(GraphState(state.model)))
    for ratio in (1.02, 1.1, 1.2):
        try:
            prices = price_bytes(state, groups, ratio, write)
        except BudgetMissed:
            continue
        mixed = restore_within_budget(state, groups, hurt, prices, lambda _: Verdict(), True, 1.0, lambda _: None)
        assert whole / count_bytes(write(mixed.state)) >= ratio

        def lose(numbers: Sequence[int], hurt: Sequence[float] = hurt) -> float:
            return sum(h for h, number in zip(hurt, numbers, strict=True) if number == 0)

        def fits(numbers: Sequence[int], ratio: float = ratio) -> bool:
            returned = return_to_float(state, list_returned(groups, numbers))
            return whole / count_bytes(write(returned)) >= ratio

        best = min(lose(some) for some in product((0, 1), repeat=len(groups)) if fits(some))
        taken = [1 if name in mixed.layers else 0 for (name,) in groups]
        # what a group adds to the nodes is no part of its price, so that a set that just fits may be missed
        assert best <= lose(taken) <= best + 0.021


def test_a_graph_of_the_least_bytes_that_is_still_too_large_is_refused(state: GraphState) -> None:
    with pytest.raises(BudgetMissed, match=r"all layers in eight bits make it \d\.\d\d times smaller"):
        price_bytes(state, group_fused(state), 9.0, write)


class Sum(StateTimer):
    """Tells times of a sum: a millisecond for each float layer, a tenth of it in eight bits, and half for the rest."""

    skew = 1.0
    """By which the times of layers alone, in float, are wrong."""

    def time(self, states: Sequence[GraphState], budget_s: float) -> list[float]:
        return [0.5 + sum(0.1 if layer.name in s.integer else 1.0 for layer in find_layers(s.model)) for s in states]

    def time_layers(self, calls: Any, *rest: Any) -> dict[Any, LayerTime]:
        return {call: LayerTime(self.skew, 0.1, 0.0, 0.0) for call in calls}


@pytest.mark.parametrize("skew", [1.0, 0.5, 1.4])
def test_a_budget_of_time_is_kept_whatever_the_table_says(state: GraphState, skew: float) -> None:
    groups, timer = [(name,) for name in state.integer], Sum(Clock("onnxruntime-cpu"), write, FEEDS)
    object.__setattr__(timer, "skew", skew)
    hurt = [0.1 * (i + 1) for i in range(len(groups))]
    prices = price_time(state, groups, 1.8, timer, lambda _: None)
    mixed = restore_within_budget(state, groups, hurt, prices, lambda _: Verdict(), True, 1.0, lambda _: None)
    before, after = timer.time([GraphState(state.model), mixed.state], 1.0)
    assert before / after >= 1.8
    allowed = int((before / 1.8 - 0.5 - 0.1 * len(groups)) / 0.9 + 1e-9)  # layers that the budget has room for
    assert set(mixed.layers) == {name for (name,) in groups[len(groups) - allowed :]}
    with pytest.raises(BudgetMissed, match=r"all layers in eight bits make it \d\.\d\d times as fast here"):
        price_time(state, groups, 9.0, timer, lambda _: None)


def test_where_the_proxy_is_wrong_the_metric_decides(state: GraphState) -> None:
    """By sensitivity the budget goes to one layer; the gate holds only where another one is float."""
    groups, timer = [(name,) for name in state.integer], Sum(Clock("onnxruntime-cpu"), write, FEEDS)
    hurt = [1.0 - 0.1 * i for i in range(len(groups))]
    needed, judged = groups[-1][0], []

    def judge(some: GraphState) -> Verdict:
        judged.append(set(state.integer) - set(some.integer))
        return Verdict(() if needed not in some.integer else ("top1 too low",), None)

    prices = price_time(state, groups, 2.0, timer, lambda _: None)
    mixed = restore_within_budget(state, groups, hurt, prices, judge, True, 1.0, lambda _: None)
    assert mixed.confirmed and needed in mixed.layers and mixed.tried == len(judged) - 1 > 1
    before, after = timer.time([GraphState(state.model), mixed.state], 1.0)
    assert before / after >= 2.0
    for number, returned in enumerate(judged[1:], 1):
        assert not any(returned <= earlier for earlier in judged[1:number])


def test_without_gates_a_worse_metric_is_no_confirmation(state: GraphState) -> None:
    groups, timer = [(name,) for name in state.integer], Sum(Clock("onnxruntime-cpu"), write, FEEDS)
    hurt = [1.0] + [0.5] * (len(groups) - 1)
    prices = price_time(state, groups, 2.5, timer, lambda _: None)

    def judge(some: GraphState) -> Verdict:
        return Verdict((), 0.9 if groups[0][0] in some.integer else 0.8)

    mixed = restore_within_budget(state, groups, hurt, prices, judge, False, 1.0, lambda _: None)
    assert mixed.confirmed and 1 < mixed.tried <= 4 and groups[0][0] not in mixed.layers

    def worse(some: GraphState) -> Verdict:
        return Verdict((), 0.9 if len(some.integer) == len(state.integer) else 0.8)

    mixed = restore_within_budget(state, groups, hurt, prices, worse, False, 1.0, lambda _: None)
    assert not mixed.layers and not mixed.confirmed  # the smallest is the best, too


def test_a_group_alone_loses_what_its_layers_do(state: GraphState) -> None:
    everything = {"all": tuple(state.integer)}
    each = {name: (name,) for name in state.integer}
    (whole,) = measure_groups(state, everything, FEEDS, "u8s8", list)
    alone = measure_groups(state, each, FEEDS, "u8s8", list)
    assert max(alone) < whole < 3 * sum(alone)


def test_the_pass_keeps_a_budget_of_size_and_says_so() -> None:
    log: list[str] = []
    config = Int8(placement="inputs", restore={"size_ratio": 1.2})
    model = graphs.transformer()
    result = apply_pass(config, GraphState(model), context(graphs.tokens(), log=log))
    whole, left = (count_bytes(write(some)) for some in (GraphState(model), result.model))
    assert whole / left >= 1.2
    returned = [decision for decision in result.decisions if decision.action == "float32"]
    assert returned and all("within size_ratio 1.2" in decision.reason for decision in returned)
    kept = {"query", "key", "value"} & {decision.layer for decision in returned}
    assert kept in (set(), {"query", "key", "value"})
    assert any(note.text.startswith("int8: size_ratio 1.2 is kept (a file") for note in result.notes)
    all_rounded = count_bytes(write(round_all(graphs.transformer(), graphs.tokens(), placement="inputs")))
    assert all_rounded < left
    with pytest.raises(PassError, match=r"restore: size_ratio 3\.5 is out of reach: all layers in eight bits make it"):
        apply_pass(replace_budget(config, 3.5), GraphState(graphs.transformer()), context(graphs.tokens()))


def replace_budget(config: Int8, ratio: float) -> Int8:
    return config.model_copy(update={"restore": config.restore.model_copy(update={"size_ratio": ratio})})


def test_the_pass_keeps_a_budget_of_time() -> None:
    timer = Sum(Clock("onnxruntime-cpu"), write, FEEDS)
    given = replace(context(FEEDS), timing=timer)
    config = Int8(placement="all", restore={"speedup": 2.0})
    state = apply_pass(config, GraphState(graphs.residual_cnn()), given).model
    before, after = timer.time([GraphState(state.model), state], 1.0)
    assert 2.0 <= before / after < 3.0
    with pytest.raises(PassError, match="restore: speedup needs a target that is timed here; use size_ratio"):
        apply_pass(config, GraphState(graphs.residual_cnn()), context(FEEDS))
    assert config.time_budget == "graph" and config.measures_time


def test_what_the_plan_can_know_is_refused_with_the_nearest() -> None:
    facts = facts_of(graphs.transformer())
    plan = Int8(restore={"size_ratio": 3.99}).check(facts, CPU)
    (problem,) = plan.problems
    assert "size_ratio 3.99 is out of reach: with all of these layers in eight bits the file is at most" in problem
    nearest = float(problem.partition("at most ")[2].split()[0])
    plan = Int8(restore={"size_ratio": nearest}).check(facts, CPU)
    assert not plan.problems
    assert facts.n_bytes / plan.facts.n_bytes == pytest.approx(nearest, rel=0.02)
    fewer = Int8(restore={"size_ratio": 2.0}).check(facts, CPU)
    assert facts.n_bytes / fewer.facts.n_bytes == pytest.approx(2.0, rel=0.02)
    assert any("as far as size_ratio 2 allows" in note.text for note in fewer.notes)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValidationError, match="size_ratio and speedup are given; give one of them"):
        Int8(restore={"size_ratio": 2.0, "speedup": 2.0})
    with pytest.raises(ValidationError, match="no layer's time is measured; use size_ratio"):
        Fp8(restore={"speedup": 2.0})
