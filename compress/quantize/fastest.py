"""Which layers to compute in eight bits so that the model is as fast as it can be on this machine.

A layer whose int8 kernel is slower than its float one (a depthwise convolution often is) is better computed in float,
with weights that are stored in eight bits and unpacked once, as the file is loaded. But a tensor that goes from one to
the other has its own price: Q or DQ, and a copy into another layout. So sets of layers are proposed from the table of
the layers' times (`compress.quantize.latency`) and a rate for such borders, by local search over the placement that
would really be written. The sums are a forecast; what is taken is the fastest of the proposed graphs timed whole,
beside the float one, in turn.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from compress.graph.edit import uses_of, values_by_name
from compress.graph.layers import GraphLayer, find_layers
from compress.graph.run import Feeds
from compress.quantize.latency import (
    LayerCall,
    LayerTable,
    LayerTime,
    Stopwatch,
    Times,
    describe_calls,
    pretend_ranges,
    run_shapes,
)
from compress.quantize.placement import Kind, Placement, Use, place
from compress.quantize.qdq import integer_layers, placement_of
from compress.quantize.state import GraphState
from compress.store.durable import seal, unseal
from runtime.bundle.files import write_whole

BORDER_SCALES = (1.0, 0.5, 2.0)
"""Of the rate of borders, each giving a proposal: between two layers of a model they cost more or less than alone."""
SWEEPS, SEARCH_BUDGET_S = 4, 5.0
CANDIDATES_BUDGET_S = 12.0
NEAR = 0.03
"""Candidates within this of the fastest count as fast; of them the smallest file is taken, then the first."""
SLOWER = 1.0
"""Of float's time; a candidate above it is slower than float."""


@dataclass(frozen=True)
class PlacementChoice:
    """What was found fastest, where and by how much: all that decides the file, so that it can be taken up again.

    `in_float`: layers that are computed in float, each with its times (float, int8), milliseconds, as far as they were
    measured. `kind`: how tensors are quantized. `float_ms`, `all_ms`, `chosen_ms`: of a call of the float model, with
    all layers in int8, and as chosen. `machine`: the processor.
    """

    kind: Kind
    in_float: Mapping[str, tuple[float, float] | None]
    float_ms: float
    all_ms: float
    chosen_ms: float
    machine: str

    @property
    def speedup(self) -> float:
        return self.float_ms / self.chosen_ms

    def to_record(self) -> dict[str, Any]:
        """Return the choice as JSON values."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> PlacementChoice:
        """Return the choice that `to_record` wrote. Raises KeyError or TypeError for anything else."""
        in_float = {name: (times[0], times[1]) if times else None for name, times in record["in_float"].items()}
        return cls(**{**record, "in_float": in_float})


def choose_fastest(
    state: GraphState,
    feeds: Sequence[Feeds],
    stopwatch: Stopwatch,
    table: LayerTable,
    machine: str,
    log: Callable[[str], None] = print,
) -> PlacementChoice:
    """Choose which of the state's integer layers stay so. `feeds`: batches as the result will be timed on.

    The graphs that are timed hold the state's ranges, for speed depends on them (`list_zero_based`). Raises what the
    backend raises on the whole graphs.
    """
    usual = sorted(feeds, key=lambda batch: sum(values.size for values in batch.values()))[len(feeds) // 2]
    calls = describe_calls(state.model, state.integer, usual)
    times = table.measure(calls.values(), stopwatch, state.dynamic, log)
    proposals = propose(state, calls, times, usual)
    log(f"timing {len(proposals)} placements of int8 against float")
    float_state = GraphState(state.model)
    states = [float_state, *(pretend_ranges(keep_integer(state, names, kind)) for names, kind in proposals)]
    ms = stopwatch.time(states, feeds, CANDIDATES_BUDGET_S)
    weights = {layer.name: layer.matrix().size for layer in find_layers(state.model)}
    sizes = [sum(weights[name] for name in names) for names, _ in proposals]
    best = pick(ms[0], ms[1:], sizes)
    names, kind = proposals[best] if best is not None else (frozenset[str](), state.placement)
    chosen_ms = ms[0] if best is None else ms[1 + best]
    measured = {name: times.get(call) for name, call in calls.items()}
    return PlacementChoice(
        kind,
        {name: _own_times(measured.get(name)) for name in state.integer if name not in names},
        round(ms[0], 4),
        round(ms[1], 4),
        round(chosen_ms, 4),
        machine,
    )


def _own_times(times: LayerTime | None) -> tuple[float, float] | None:
    return None if times is None else (round(times.float_ms, 4), round(times.int8_ms, 4))


def pick(float_ms: float, ms: Sequence[float], n_weights: Sequence[int]) -> int | None:
    """Return the number of the candidate to take: of those as fast as the fastest that with most weights in int8.

    None where all are slower than float.
    """
    fast = min(ms)
    if fast > SLOWER * float_ms:
        return None
    near = [i for i, value in enumerate(ms) if value <= min(fast * (1 + NEAR), SLOWER * float_ms)]
    return max(near, key=lambda i: (n_weights[i], -i))


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
        biases={name: bias for name, bias in state.biases.items() if name not in unpacked},
    )


def propose(
    state: GraphState, calls: Mapping[str, LayerCall], times: Times, feeds: Feeds
) -> list[tuple[frozenset[str], Kind]]:
    """Return the placements to time: all layers first, then what the table finds best at several prices of borders."""
    everything = frozenset(state.integer)
    forecast = Forecaster.of(state, calls, times, feeds)
    own = frozenset(name for name in everything if forecast.gains(name))
    until = time.monotonic() + SEARCH_BUDGET_S
    sets = [everything, *(forecast.improve(own, calls, scale, until) for scale in BORDER_SCALES), own]
    kinds: tuple[Kind, ...] = ("all", "inputs") if state.placement == "all" else (state.placement,)
    proposals: dict[object, tuple[frozenset[str], Kind]] = {}
    for names, kind in ((names, kind) for kind in kinds for names in sets if names):
        placement = placement_of(keep_integer(state, names, kind))
        written = frozenset((name, frozenset(uses)) for name, uses in placement.consumers.items())
        proposals.setdefault((names, written), (names, kind))  # without Adds the two kinds are one
    return list(proposals.values())


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

    def gains(self, name: str) -> bool:
        """Return whether a layer alone is faster in int8; one that was not measured is taken to be."""
        times = self.times.get(name)
        return times is None or times.int8_ms < times.float_ms

    def layers_ms(self, names: Collection[str]) -> float:
        """Return the sum of the layers' own times with `names` in int8."""
        return sum(t.int8_ms if name in names else t.float_ms for name, t in self.times.items())

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

    def improve(
        self, start: frozenset[str], calls: Mapping[str, LayerCall], scale: float, until: float
    ) -> frozenset[str]:
        """Return the best set reachable by moving equal layers together, then single ones, while that gains."""
        groups: dict[LayerCall, set[str]] = {}
        for name, call in calls.items():
            groups.setdefault(call, set()).add(name)
        moves = [frozenset(names) for names in groups.values() if len(names) > 1]
        moves += [frozenset({name}) for name in self.layers]
        best, cost = start, self._cost(start, scale)
        for _ in range(SWEEPS):
            before = best
            for move in moves:
                if time.monotonic() > until:
                    return best
                for changed in {best | move, best - move} - {best}:
                    if (price := self._cost(changed, scale)) < cost:
                        best, cost = changed, price
            if best == before:
                break
        return best

    def _cost(self, names: frozenset[str], scale: float) -> float:
        return self.layers_ms(names) + scale * self.borders_ms(names)


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


def read_choice(path: Path | None, machine: str) -> PlacementChoice | None:
    """Return the choice that is kept in `path`: this machine's own, or one that was given; None without such a one."""
    stored = unseal(path.read_bytes()) if path is not None and path.is_file() else None
    if stored is None or not (stored["given"] or stored["choice"]["machine"] == machine):
        return None
    return PlacementChoice.from_record(stored["choice"])


def keep_choice(path: Path, choice: Mapping[str, Any], given: bool = False) -> None:
    """Keep a choice's record. `given`: it holds on any machine, as a bundle's lock asks for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, seal({"choice": dict(choice), "given": given}))


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
