"""How long each layer takes in float and in eight bits, measured on the runtime that will run the model.

A layer is timed in a tiny graph of its own. Alone it would also pay for what stands at the borders of such a graph (a
copy into the runtime's layout, Q and DQ, the call), which it does not pay inside a network. So it is timed once and
COPIES times, all reading one tensor, each read to its end by a cheap reduction: the difference of the two is the
layer's own time, and what is left over is what its borders cost (measured on a face detector's layers in ONNX Runtime:
79 and 232 microseconds where a profile of the whole model shows 113 and 254; the layer alone: 135 and 510).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import onnx
import onnx_ir as ir

from compress.formats.schemes import Scheme
from compress.graph.layers import GraphLayer, find_layers
from compress.graph.run import Feeds, open_session, tap
from compress.rounding.int8 import with_integer_layers
from compress.rounding.placement import ACTIVATIONS, after_activation, decide_kind
from compress.rounding.qdq import BLOCK_OPSET, placement_of
from compress.rounding.quantized_weight import QuantizedWeight, round_to_nearest
from compress.rounding.state import GraphState, Range
from compress.timing.clock import Clock, GraphTimes
from runtime.clock.graphs import Attribute, Node, write_model
from runtime.errors import RuntimeFailure

COPIES = 3
LAYER_BUDGET_S = 0.6
"""Seconds for the calls of one layer."""
TABLE_BUDGET_S = 30.0
"""Seconds for all layers of a model together; the largest come first, and what is left over is not in the table."""
OPSET = 17
NOT_NEGATIVE = {"Relu": 6.0, "Clip": 6.0, "Sigmoid": 1.0, "Softmax": 1.0, "HardSigmoid": 1.0}
"""Operator -> the top of a range that stands for its outputs. ONNX Runtime drops a Relu before a range that begins at
zero, and keeps one, with a copy in float, before any other."""


@dataclass(frozen=True)
class LayerCall:
    """A layer as a runtime meets it: all that decides its time on a machine.

    `weight`: [out, in / groups, *kernel]; `input`: the tensor that it reads, batch included; `attributes`: of the node,
    as texts; `activation`: the operator that is fused into it, or "".
    """

    op: str
    weight: tuple[int, ...]
    input: tuple[int, ...]
    attributes: tuple[tuple[str, str], ...]
    bias: bool
    activation: str

    def to_text(self) -> str:
        """Return the call as the table's key."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def places(self) -> int:
        """Return how many pixels of an image, or rows of a batch, it reads."""
        return int(np.prod(self.input[2:]) if self.op == "Conv" else np.prod(self.input[:-1]))

    @property
    def macs(self) -> int:
        """Return about how much it multiplies: exact but for strides, which are not looked at."""
        return int(np.prod(self.weight)) * self.places


@dataclass(frozen=True)
class LayerTime:
    """Milliseconds of one layer, in float and in eight bits, and those that its borders cost beside it."""

    float_ms: float
    int8_ms: float
    float_border_ms: float
    int8_border_ms: float


Times = Mapping[LayerCall, LayerTime]


@dataclass(frozen=True)
class StateTimer:
    """Times states of a graph as files that the target gets.

    `write`: gives the file of a state; `feeds`: the batches that the result will be timed on; `call`: what a time
    depends on beside graph, machine and backend, as JSON values (batch size, length of a text); `target`: whose files
    are timed.
    """

    clock: Clock
    write: Callable[[GraphState], ir.Model]
    feeds: Sequence[Feeds]
    call: Sequence[object] = ()
    target: str = ""

    def time(self, states: Sequence[GraphState], budget_s: float) -> list[float]:
        """Return the milliseconds of a call of each state, as `Clock.time`."""
        return self.clock.time([self.write(state) for state in states], self.feeds, budget_s)

    def compare(
        self,
        states: Sequence[GraphState],
        budget_s: float,
        is_clear: Callable[[GraphTimes], bool] = lambda times: True,
    ) -> GraphTimes:
        """Return what fresh processes saw of the states, as `Clock.compare`."""
        return self.clock.compare([self.write(state) for state in states], self.feeds, budget_s, is_clear)

    def time_layers(
        self, calls: Iterable[LayerCall], dynamic: bool = False, log: Callable[[str], None] = print
    ) -> dict[LayerCall, LayerTime]:
        """Return the times of these calls, those kept for this machine and, within TABLE_BUDGET_S, the others.

        What there was no time for, and what the backend refuses, is left out, and told to `log`.
        """
        key = [self.clock.backend, self.clock.threads, dynamic]
        kept = (self.clock.kept.read("layers", key) or {}).get("times", {})
        wanted = {call: call.to_text() for call in sorted(set(calls), key=lambda call: -call.macs)}
        missing = [call for call, text in wanted.items() if text not in kept]
        begun, refused = time.monotonic(), list[str]()
        if missing:
            log(f"measuring {len(missing)} layer shapes, in float and in int8, on {self.clock.backend}")
        for call in missing:
            if time.monotonic() - begun > TABLE_BUDGET_S:
                break
            try:
                kept[wanted[call]] = list(asdict(time_layer(call, self, dynamic)).values())
            except RuntimeFailure as error:
                refused.append(f"{call.op} {list(call.weight)}: {error}")
        left = sum(text not in kept for text in wanted.values()) - len(refused)
        if refused:
            log(f"{len(refused)} layer shapes could not be timed; the first: {refused[0]}")
        if left:
            log(f"{left} layer shapes were not timed: the others took {TABLE_BUDGET_S:g} s")
        if missing:
            self.clock.kept.write("layers", key, {"times": kept})
        return {call: LayerTime(*kept[text]) for call, text in wanted.items() if text in kept}


def describe_calls(model: ir.Model, names: Iterable[str], feeds: Feeds) -> dict[str, LayerCall]:
    """Return layer -> its call on such feeds; the graph is run once for the shapes."""
    wanted = set(names)
    layers = [layer for layer in find_layers(model) if layer.name in wanted and layer.op != "Gather"]
    shapes = run_shapes(model, [layer.data_input.name or "" for layer in layers], feeds)
    return {layer.name: _describe_call(layer, shapes[layer.data_input.name or ""]) for layer in layers}


def run_shapes(model: ir.Model, tensors: Iterable[str], feeds: Feeds) -> dict[str, tuple[int, ...]]:
    """Return the shapes that inner tensors have on such feeds."""
    names = list(dict.fromkeys(tensors))
    if not names:
        return {}
    session = open_session(tap(model, names))
    given = {entry.name for entry in session.get_inputs()}
    outputs = session.run(None, {name: values for name, values in feeds.items() if name in given})
    return {name: tuple(values.shape) for name, values in zip(names, outputs, strict=True)}


def _describe_call(layer: GraphLayer, shape: tuple[int, ...]) -> LayerCall:
    activation = after_activation(layer.output).producer()
    op = activation.op_type if activation is not None and activation.op_type in ACTIVATIONS else ""
    attributes = {} if layer.op != "Conv" else {name: _format(a) for name, a in layer.node.attributes.items()}
    weight = tuple(int(size) for size in layer.matrix().shape)
    return LayerCall(layer.op, weight, shape, tuple(sorted(attributes.items())), layer.bias is not None, op)


def _format(attribute: ir.Attr) -> str:
    value = attribute.value
    return json.dumps(list(value) if isinstance(value, tuple | list) else value)


def time_layer(call: LayerCall, timer: StateTimer, dynamic: bool = False) -> LayerTime:
    """Measure one layer. Raises what the backend raises."""
    states = [state for copies in (1, COPIES) for state in _float_and_int8(make_layer_graph(call, copies), dynamic)]
    once = replace(timer, feeds=[_make_input(call, timer.clock.seed)]).time(states, LAYER_BUDGET_S)
    own = [max((once[2 + i] - once[i]) / (COPIES - 1), 1e-4) for i in (0, 1)]
    return LayerTime(own[0], own[1], *(max(once[i] - own[i], 0.0) for i in (0, 1)))


def _make_input(call: LayerCall, seed: int) -> Feeds:
    return {"x": np.random.default_rng(seed).standard_normal(call.input).astype(np.float32)}


def time_weights(call: LayerCall, schemes: Sequence[Scheme], timer: StateTimer) -> list[float]:
    """Return the milliseconds of one matrix product with its weights stored by each of the schemes.

    Raises what the backend raises.
    """
    states = []
    for copies in (1, COPIES):
        model = make_layer_graph(call, copies, BLOCK_OPSET)
        layers = find_layers(model)
        for scheme in schemes:
            numbers = scheme.weights
            rounded = {
                layer.name: round_to_nearest(layer.matrix(), numbers.bits, numbers.group_size, numbers.symmetric)
                for layer in layers
            }
            states.append(GraphState(model, weight_only=list(rounded), weights=rounded))
    ms = replace(timer, feeds=[_make_input(call, timer.clock.seed)]).time(states, LAYER_BUDGET_S)
    return [max((ms[len(schemes) + i] - ms[i]) / (COPIES - 1), 1e-4) for i in range(len(schemes))]


def _float_and_int8(model: ir.Model, dynamic: bool) -> tuple[GraphState, GraphState]:
    return GraphState(model), round_all_roughly(model, dynamic)


def round_all_roughly(model: ir.Model, dynamic: bool = False) -> GraphState:
    """Return the graph with all its layers in eight bits, as far as speed goes."""
    layers = find_layers(model)
    names = [layer.name for layer in layers if layer.op != "Gather"]
    state = with_integer_layers(GraphState(model), names, decide_kind(layers), False, dynamic, round_roughly)
    return pretend_ranges(state)


def pretend_ranges(state: GraphState) -> GraphState:
    """Return the state with a range for each tensor that it quantizes: none is measured, for speed asks for none."""
    if state.dynamic:
        return state
    ranges = {}
    for name in placement_of(state).consumers:
        top = NOT_NEGATIVE.get(_find_maker(state.model, name), 0.0)
        ranges[name] = Range(0.0, top, top) if top else Range(-3.0, 3.0, 3.0)
    return replace(state, ranges={**ranges, **state.ranges})


def _find_maker(model: ir.Model, name: str) -> str:
    return next((node.op_type for node in model.graph for value in node.outputs if value.name == name), "")


def round_roughly(layer: GraphLayer) -> QuantizedWeight:
    """Round a weight to int8 by its channels' largest values: quick, for graphs that are only timed."""
    return round_to_nearest(np.ascontiguousarray(layer.matrix().T) if layer.op == "Gather" else layer.matrix(), 8)


def make_layer_graph(call: LayerCall, copies: int, opset: int = OPSET) -> ir.Model:
    """Return a graph: x float32 -> `copies` of the layer, each with weights of its own -> y, what each reduces to."""
    rng = np.random.default_rng(0)
    nodes: list[Node] = []
    names: list[str] = []
    constants: dict[str, np.ndarray] = {}
    outputs = []

    def add(op: str, inputs: list[str], output: str, name: str = "", **attributes: Attribute) -> str:
        nodes.append((op, inputs, [output], attributes))
        names.append(name or output)
        return output

    for number in range(copies):
        name = f"layer{number}"
        fan_in = max(int(np.prod(call.weight[1:])), 1)
        weight = (rng.standard_normal(call.weight) / np.sqrt(fan_in)).astype(np.float32)
        constants[f"{name}.weight"] = weight if call.op == "Conv" else np.ascontiguousarray(weight.T)
        inputs, bias = ["x", f"{name}.weight"], f"{name}.bias"
        if call.bias:
            constants[bias] = (rng.standard_normal(call.weight[0]) / 10).astype(np.float32)
        if call.op == "MatMul":
            out = add("MatMul", inputs, f"{name}/out", name)
            if call.bias:
                out = add("Add", [out, bias], f"{name}/biased")
        else:
            attributes = {key: json.loads(text) for key, text in call.attributes}
            out = add(call.op, inputs + ([bias] if call.bias else []), f"{name}/out", name, **attributes)
        if call.activation:
            bounds = ["low", "high"] if call.activation == "Clip" else []
            constants |= {"low": np.zeros((), np.float32), "high": np.full((), 6, np.float32)} if bounds else {}
            out = add(call.activation, [out, *bounds], f"{name}/active")
        if call.op == "Conv":
            outputs.append(add("GlobalAveragePool", [out], f"{name}/read"))
        elif opset >= 18:
            constants["last"] = np.array([-1])
            outputs.append(add("ReduceMean", [out, "last"], f"{name}/read", keepdims=1))
        else:
            outputs.append(add("ReduceMean", [out], f"{name}/read", axes=[-1], keepdims=1))
    add("Concat", outputs, "y", axis=1 if call.op == "Conv" else -1)
    content = write_model(nodes, constants, {"x": ("float32", call.input)}, {"y": ("float32", None)}, opset, names)
    model = ir.from_proto(onnx.load_from_string(content))
    ir.passes.common.ShapeInferencePass()(model)
    return model
