"""Which layers to compute in eight bits so that the model is as fast as it can be on this machine.

A layer whose int8 kernel is slower than its float one (a depthwise convolution often is) is better computed in float,
with weights that are stored in eight bits and unpacked once, as the file is loaded. Layers are tried in groups, in the
whole graph, so that borders (Q, DQ, copies into another layout) count as they are: all of one form together, and all
that read maps of some size or larger, which have one border at their end. A choice decides the file's bytes, and a
clock never reads twice alike: so a step must gain WORTH of a whole call, of steps as good within CLOSE the one with the
fewest layers in float is taken, and the outcome must beat the rule without a clock beyond the interval. Else the rule
decides, or float where that is faster by WORTH. What lies near such a border is timed in more fresh processes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from compress.graph.edit import uses_of, values_by_name
from compress.graph.layers import GraphLayer
from compress.graph.run import Feeds
from compress.rounding.latency import (
    LayerCall,
    LayerTime,
    StateTimer,
    Times,
    describe_calls,
    pretend_ranges,
    run_shapes,
)
from compress.rounding.placement import Kind, Placement, Use, place
from compress.rounding.qdq import integer_layers, placement_of
from compress.rounding.state import GraphState
from compress.timing.clock import GraphTimes, middle_batch
from runtime.stats import Estimate

WORTH = 0.05
"""What a choice must gain of a whole call. Ten builds of a CNN of 0.1 ms, idle and beside other work, differed by up to
0.0012 ms (1.5 %) in what they found of one layer."""
CLOSE = 0.1
"""How far behind the best a step is taken all the same, as it leaves more layers in int8; so what a further step must
gain, too. Three forms of a face detector (3.5 ms) lay 3 to 7 % apart, by how busy the core's other thread was."""
SCREEN_ERROR = 0.05
"""How far off a first look is: what may be worth a step all the same is timed again. In 6 s processes saw each of 13
forms of that detector 1.8 % off, beside two busy processes 2.5 %; in 24 s 0.8 %."""
GRAPH_BUDGET_S = 1.0
"""Seconds of each graph's calls where a border is near."""


@dataclass(frozen=True)
class PlacementChoice:
    """What decides the file: how tensors are quantized, and which layers are computed in float."""

    kind: Kind
    in_float: tuple[str, ...]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> PlacementChoice:
        """Return the choice of which `asdict` gave the record. Raises KeyError for anything else."""
        return cls(record["kind"], tuple(record["in_float"]))


@dataclass(frozen=True)
class PlacementTimes:
    """How many times as fast as float the model is on this machine, with all layers in int8, and as chosen."""

    everywhere: float
    chosen: float


def choose_fastest(
    state: GraphState, timer: StateTimer, log: Callable[[str], None] = print
) -> tuple[PlacementChoice, PlacementTimes]:
    """Choose which of the state's integer layers stay so.

    The graphs that are timed hold the state's ranges, for speed depends on them (`list_zero_based`). Raises what the
    backend raises on the whole graphs.
    """
    groups = _group_layers(state, timer)
    rule = PlacementChoice(state.placement, ())
    log(f"timing {len(groups)} groups of layers in int8 against float")

    def write(choice: PlacementChoice) -> GraphState:
        names = [name for name in state.integer if name not in choice.in_float]
        return pretend_ranges(keep_integer(state, names, choice.kind))

    kinds: tuple[Kind, ...] = ("all", "inputs") if state.placement == "all" else (state.placement,)
    steps = [PlacementChoice(kind, ()) for kind in kinds[1:]]
    chosen: PlacementChoice | None = rule
    while chosen is not None:
        fastest, graph = chosen, write(chosen)
        wider = {tuple(sorted({*fastest.in_float, *group})): None for group in groups}
        steps += [replace(fastest, in_float=names) for names in wider if names != fastest.in_float]
        least = WORTH if fastest == rule else CLOSE
        chosen, steps = _choose_step({step: write(step) for step in steps}, graph, timer, least), []
    choices = (rule, fastest, replace(rule, in_float=tuple(sorted(state.integer))))
    asked, border = (2, 1 + WORTH) if fastest == rule else (1, 1.0)  # a step was worth it already: is there any gain?

    def is_clear(times: GraphTimes) -> bool:
        speed = times.speed(asked)
        return speed.low >= border or speed.high < border

    graphs = [write(rule), graph, GraphState(state.model)]
    times = timer.compare(graphs, GRAPH_BUDGET_S * len(graphs), is_clear)
    taken = 2 if times.speed(2).low >= 1 + WORTH else 0
    if fastest != rule and times.speed(1).low >= 1 and times.speed(2, than=1).low < 1 + WORTH:
        taken = 1
    everywhere, speed = (round(times.speed(graph, than=2).value, 4) for graph in (0, taken))
    return choices[taken], PlacementTimes(everywhere, speed)


def _choose_step(
    steps: Mapping[PlacementChoice, GraphState], current: GraphState, timer: StateTimer, least: float
) -> PlacementChoice | None:
    """Return the step with the fewest layers in float of those that gain `least` and are within CLOSE of the best."""
    order = sorted(steps, key=lambda step: len(step.in_float))
    if not order:
        return None
    # seconds for the calls of all of a step's candidates, in fresh processes
    seen = timer.compare([current, *(steps[step] for step in order)], 6.0)
    best = _find_best(seen)  # what computes more in float gained nothing by it
    near = [
        n for n in range(1, best + 1) if all(e.value * (1 + SCREEN_ERROR) >= b for e, b in _borders(seen, n, least))
    ]
    if not near:
        return None
    order = [order[n - 1] for n in near]
    graphs = [current, *(steps[step] for step in order)]
    times = timer.compare(graphs, GRAPH_BUDGET_S * len(graphs), lambda times: _find_step(times, least)[1])
    found, _ = _find_step(times, least)
    return order[found - 1] if found else None


def _find_step(times: GraphTimes, least: float) -> tuple[int, bool]:
    """Return the first graph that is worth a step from graph 0, or 0, and whether the intervals are sure of that."""
    sure = True
    for number in range(1, times.ms.shape[1]):
        borders = _borders(times, number, least)
        sure &= all(speed.low >= border for speed, border in borders) or any(
            speed.high < border for speed, border in borders
        )
        if all(speed.value >= border for speed, border in borders):
            return number, sure
    return 0, sure


def _borders(times: GraphTimes, number: int, least: float) -> list[tuple[Estimate, float]]:
    """Return how fast a graph is beside graph 0 and beside the best, each with the least that it must be."""
    return [(times.speed(number), 1 + least), (times.speed(number, than=_find_best(times)), 1 / (1 + CLOSE))]


def _find_best(times: GraphTimes) -> int:
    return max(range(1, times.ms.shape[1]), key=lambda number: times.speed(number).value)


def _group_layers(state: GraphState, timer: StateTimer) -> list[tuple[str, ...]]:
    """Return the integer layers by form (operator, kernel, strides or not, how many inputs a group has), and those
    that read maps (or texts) of each size or larger: the last of these are all.

    Of a face detector in int8 (0.90 times as fast as float) the depthwise layers in float made it 0.65, those that read
    60 x 80 places or more 1.13, and all 1.00.
    """
    calls = describe_calls(state.model, state.integer, middle_batch(timer.feeds))
    forms: dict[object, list[str]] = {}
    for name, call in calls.items():
        strided = any(key == "strides" and text.strip("[] 1,") for key, text in call.attributes)
        # int8 kernels read inputs in blocks of 4 or more
        inputs = "one" if call.weight[1] == 1 else "few" if call.weight[1] < 8 else "many"
        form = (call.op, call.weight[2:], strided, inputs) if call.op == "Conv" else (call.op,)
        forms.setdefault(form, []).append(name)
    sizes = {name: call.places for name, call in calls.items()}
    larger = [[name for name in sizes if sizes[name] >= least] for least in sorted(set(sizes.values()), reverse=True)]
    return [tuple(sorted(names)) for names in (*forms.values(), *larger)]


def keep_integer(state: GraphState, names: Collection[str], kind: Kind) -> GraphState:
    """Return a copy of the state in which only these of its integer layers are still computed so.

    The weights of the others are stored in eight bits as before.
    """
    unpacked = [name for name in state.integer if name not in names]
    return replace(
        state,
        placement=kind,
        integer=[name for name in state.integer if name in names],
        weight_only=[*state.weight_only, *unpacked],
        unpacked=[*state.unpacked, *unpacked],
    )


@dataclass(frozen=True)
class Forecaster:
    """The forecast of a placement: the sum of its layers' times, and of its borders by the size of their tensors.

    `elements`: of each tensor that may be quantized; `readers`: who reads it. `rate`: milliseconds that a border costs
    for each element.
    """

    state: GraphState
    layers: Mapping[str, GraphLayer]
    times: Mapping[str, LayerTime]
    elements: Mapping[str, int]
    readers: Mapping[str, frozenset[Use]]
    rate: float

    @classmethod
    def of(cls, state: GraphState, calls: Mapping[str, LayerCall], times: Times, feeds: Feeds) -> Forecaster:
        """Look up the layers' times and the sizes of the tensors between them."""
        layers = {layer.name: layer for layer in integer_layers(state)}
        tensors = [] if state.dynamic else list(placement_of(state).consumers)
        shapes = run_shapes(state.model, tensors, feeds)
        values = values_by_name(state.model)
        return cls(
            state,
            layers,
            {name: times[call] for name, call in calls.items() if call in times},
            {name: math.prod(shape) for name, shape in shapes.items()},
            {name: frozenset(uses_of(values[name])) for name in tensors},
            fit_border_rate(times),
        )

    def borders_ms(self, names: Collection[str]) -> float:
        """Return what the borders cost between `names` in int8 and the rest in float."""
        if self.state.dynamic:
            return 0.0
        state = self.state
        chosen = [self.layers[name] for name in names]
        placement = place(state.model, chosen, state.placement, state.attention, state.leave_out)
        crossed = [name for name in placement.consumers if self._is_border(placement, name)]
        return self.rate * sum(self.elements[name] for name in crossed)

    def _is_border(self, placement: Placement, name: str) -> bool:
        """Return whether float makes a tensor that int8 reads, or reads one that int8 makes."""
        return name not in placement.writers or bool(self.readers[name] - set(placement.consumers[name]))


def fit_border_rate(times: Times) -> float:
    """Return the milliseconds that a border costs for each element of its tensor: the slope over the layers' inputs.

    Inside a float network a tensor is first brought back from the layout that float layers alone pay for at the ends of
    their own graph, so both borders count.
    """
    rows = [(math.prod(call.input), t.float_border_ms + t.int8_border_ms) for call, t in times.items()]
    if len({size for size, _ in rows}) < 2:
        return max((cost / size for size, cost in rows), default=0.0)
    sizes, costs = np.array(rows, dtype=float).T
    return max(float(np.polyfit(sizes, costs, 1)[0]), 0.0)


def list_zero_based(state: GraphState) -> list[str]:
    """Return the tensors whose range begins at zero: what a runtime fuses around them, and so the speed, is different.

    On one network ONNX Runtime left 16 of 33 Relus in float for it, and what was 1.12 times as fast as float was 0.64.
    """
    tensors = [] if state.dynamic else placement_of(state).consumers
    return sorted(name for name in tensors if name in state.ranges and state.ranges[name].parameters("u8s8")[1] == 0)


def digest_structure(model: ir.Model) -> str:
    """Return a digest of all that decides a graph's speed: nodes, attributes, names and shapes, not the weights."""
    nodes = [
        [n.domain, n.op_type, [v.name if v is not None else "" for v in n.inputs], [v.name for v in n.outputs],
         sorted((name, str(a.value)) for name, a in n.attributes.items() if a.type != ir.AttributeType.TENSOR)]
        for n in model.graph
    ]  # fmt: skip
    shapes = sorted((str(name), str(value.shape)) for name, value in model.graph.initializers.items())
    return hashlib.sha256(json.dumps([nodes, shapes]).encode()).hexdigest()
