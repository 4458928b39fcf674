"""Which layers of a graph in eight bits go back to float under a budget of bytes or of milliseconds.

What each group of layers loses alone predicts what a set of them loses, and an integer programme finds the set that
loses least under the budget. That is a proxy: each set is held against the gates, or the task's metric, and where it
falls short the next best one is taken: it is no part of a set that fell short, for that would lose more, and what
such a set returned counts for less, for the loss lies elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from compress.graph.files import write_graph
from compress.graph.layers import GraphLayer, find_layers, is_constant
from compress.rounding.allocate import OutOfReach, join_groups
from compress.rounding.budgets import NEAR, NEAR_BYTES, BudgetMissed, Measured, Prices, choose_measured
from compress.rounding.fastest import Forecaster
from compress.rounding.latency import StateTimer, describe_calls
from compress.rounding.state import GraphState
from compress.store.durable import temporary_folder
from compress.timing.clock import middle_batch

POINTS = 8
"""Sets that are held against the metric."""
ROUNDED, FLOAT = 0, 1
"""The choices of a group."""
TIMING_BUDGET_S = 6.0
"""Seconds for timing a choice beside the float model."""
Groups = Sequence[tuple[str, ...]]


def group_fused(state: GraphState) -> list[tuple[str, ...]]:
    """Return the state's layers in groups that are rounded, or float, together.

    Those that read one tensor share its rounded form, or are merged into one product; those whose outputs one Add reads
    are fused with it; those of one weight hold it once.
    """
    names = [*state.integer, *state.weight_only]
    layers = [layer for layer in find_layers(state.model) if layer.name in set(names)]
    together: dict[object, list[str]] = {}
    written: dict[ir.Value, str] = {}
    for layer in layers:
        together.setdefault(layer.weight, []).append(layer.name)
        if layer.name in state.integer:
            together.setdefault(layer.data_input, []).append(layer.name)
            written[layer.output] = layer.name
    for node in state.model.graph if state.placement == "all" else ():
        if node.op_type == "Add" and not any(is_constant(value) for value in node.inputs):
            together[node] = [written[value] for value in node.inputs if value in written]
    return join_groups([layer.name for layer in layers], together.values())


def return_to_float(state: GraphState, names: Collection[str]) -> GraphState:
    """Return a copy of the state in which these layers are float; itself where there are none."""
    if not names:
        return state
    changed = replace(
        state, weights=dict(state.weights), biases=dict(state.biases), input_scales=dict(state.input_scales)
    )
    for name in names:
        changed.to_float(name)
    return changed


def price_bytes(
    state: GraphState, groups: Groups, size_ratio: float, write: Callable[[GraphState], ir.Model]
) -> Prices:
    """Return what each group takes of the file in eight bits and in float; sets are written and counted.

    BudgetMissed where even all groups in eight bits take more than the budget.
    """
    whole, rounded = count_bytes(write(GraphState(state.model))), count_bytes(write(state))
    if whole / rounded < size_ratio:
        raise BudgetMissed(f"all layers in eight bits make it {whole / rounded:.2f} times smaller")
    layers = {layer.name: layer for layer in find_layers(state.model)}
    table = []
    for group in groups:
        distinct = {layers[name].weight: name for name in group}.values()
        pairs = [(_count_rounded(state, layers[name]), layers[name].matrix().nbytes) for name in distinct]
        table.append([sum(pair[i] for pair in pairs) for i in (ROUNDED, FLOAT)])

    def measure(numbers: Sequence[int]) -> Measured:
        left = count_bytes(write(return_to_float(state, list_returned(groups, numbers))))
        return Measured(left - whole / size_ratio, f"a file {whole / left:.3f} times smaller")

    room = whole / size_ratio - rounded + sum(row[ROUNDED] for row in table)
    return Prices(table, room, measure, NEAR_BYTES * whole / size_ratio, rounded - whole / size_ratio)


def count_bytes(model: ir.Model) -> int:
    """Return the bytes of a graph's file."""
    with temporary_folder() as folder:
        write_graph(model, folder / "model.onnx")
        return sum(path.stat().st_size for path in folder.iterdir())


def _count_rounded(state: GraphState, layer: GraphLayer) -> int:
    weight = state.weights[layer.name]
    n_zeros = weight.scales.size
    return int(weight.values.nbytes + weight.scales.nbytes + n_zeros)


def price_time(
    state: GraphState,
    groups: Groups,
    speedup: float,
    timer: StateTimer,
    log: Callable[[str], None],
) -> Prices:
    """Return what each group takes of a call in eight bits, and in float with the borders that it makes alone.

    Sets are timed whole, beside the float model.
    A layer that was not timed alone is taken to be so much faster in eight bits that it stays so. BudgetMissed where
    even all groups in eight bits are slower than the budget.
    """
    before, after = timer.time([GraphState(state.model), state], TIMING_BUDGET_S)
    if before / after < speedup:
        raise BudgetMissed(f"all layers in eight bits make it {before / after:.2f} times as fast here")
    usual = middle_batch(timer.feeds)
    calls = describe_calls(state.model, state.integer, usual)
    times = timer.time_layers(calls.values(), state.dynamic, log)
    unknown = 2 * before
    forecast, everything, rows = Forecaster.of(state, calls, times, usual), set(state.integer), []
    whole_borders = forecast.borders_ms(everything)
    for group in groups:
        borders = max(forecast.borders_ms(everything - set(group)) - whole_borders, 0.0)
        known = [times.get(calls[name]) if name in calls else None for name in group]
        rows.append(
            [
                sum(each.int8_ms for each in known if each is not None),
                sum(unknown if each is None else each.float_ms for each in known) + borders,
            ]
        )

    def measure(numbers: Sequence[int]) -> Measured:
        chosen = return_to_float(state, list_returned(groups, numbers))
        whole, left = timer.time([GraphState(state.model), chosen], TIMING_BUDGET_S)
        return Measured((left - whole / speedup) * before / whole, f"{whole / left:.2f} times as fast as in float")

    rest = after - sum(row[ROUNDED] for row in rows)
    return Prices(rows, before / speedup - rest, measure, NEAR * before / speedup, after - before / speedup)


def list_returned(groups: Groups, numbers: Sequence[int]) -> list[str]:
    """Return the layers that a choice returns to float."""
    return [name for group, number in zip(groups, numbers, strict=True) if number == FLOAT for name in group]


@dataclass(frozen=True)
class Verdict:
    """What the evaluation set says of a graph. `short`: gates that it does not hold, in sentences.

    `score`: the task's main metric, more is better; None where there is none.
    """

    short: tuple[str, ...] = ()
    score: float | None = None

    @property
    def rank(self) -> tuple[int, float]:
        """Return what is less for a better graph."""
        return len(self.short), -(self.score or 0.0)


@dataclass(frozen=True)
class MixedChoice:
    """The state with `layers` back in float. `text`: what it was measured to come to; `tried`: sets that were judged.

    `confirmed`: the gates hold, or without gates the metric is no worse than with all layers in eight bits.
    """

    state: GraphState
    layers: tuple[str, ...]
    verdict: Verdict
    text: str
    tried: int
    confirmed: bool


def restore_within_budget(
    state: GraphState,
    groups: Groups,
    sensitivity: Sequence[float],
    prices: Prices,
    judge: Callable[[GraphState], Verdict],
    gated: bool,
    max_minutes: float,
    log: Callable[[str], None],
) -> MixedChoice:
    """Return groups to float under the budget, those of greatest sensitivity in all, until the verdict confirms a set.

    `gated`: the verdict is on gates. Where none is confirmed, the set is returned of which the verdict is best, all in
    eight bits among them. Raises BudgetMissed where no set that was tried keeps the budget.
    """
    expected = [max(value, 0.0) for value in sensitivity]
    deadline = time.monotonic() + 60 * max_minutes
    everything = MixedChoice(state, (), judge(state), "all in eight bits", 0, False)
    points: list[MixedChoice] = []
    beyond: list[Sequence[int]] = []
    while len(points) < POINTS and (not points or time.monotonic() < deadline):
        try:
            choice = choose_measured([[value, 0.0] for value in expected], prices, log, beyond)
        except (OutOfReach, BudgetMissed):
            if not points and not beyond:
                raise
            break  # no other set keeps the budget
        prices, beyond = replace(prices, budget=choice.budget), [*beyond, choice.numbers]
        layers = tuple(list_returned(groups, choice.numbers))
        mixed = return_to_float(state, layers)
        verdict = judge(mixed)
        confirmed = not verdict.short if gated else verdict.rank <= everything.verdict.rank
        points.append(MixedChoice(mixed, layers, verdict, choice.text, len(points) + 1, confirmed))
        found = "confirmed" if confirmed else "; ".join(verdict.short) or "worse than with all layers in eight bits"
        log(f"{len(layers)} layers in float: {found}")
        if confirmed:
            return points[-1]
        # a set that returned them fell short: the loss lies elsewhere
        doubts = [0.5 if number == FLOAT else 1.0 for number in choice.numbers]
        expected = [value * doubt for value, doubt in zip(expected, doubts, strict=True)]
    return replace(min([*points, everything], key=lambda point: point.verdict.rank), tried=len(points))
