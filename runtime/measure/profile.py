"""Where the time of a model's call goes: each node that its runtime executes, from the runtime's own profile.

A profiled call is a little slower than another, so that a profile is a short run of its own and never one that is
judged. The graph that is executed is not the file's: nodes were fused, moved to other layouts, or left alone. It is
read back from the runtime, and each node that multiplies is traced to the file's node that it came from, its layer.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from runtime.backends import Feeds, Session, find_backend, open_model
from runtime.backends.base import EncoderDecoderSession, Options
from runtime.backends.onnxruntime_cpu import OnnxRuntimeSession, open_handle, session_options
from runtime.backends.openvino import IR, OpenVinoSession, core, name_outputs, read_specs
from runtime.bundle.files import find_encoder, model_files
from runtime.bundle.onnx_file import Graph, GraphNode, read_graph
from runtime.errors import RuntimeFailure

LEAST_CALLS, MOST_CALLS = 5, 50
BUDGET_S = 2.0
"""Seconds for the profiled calls of one model."""
SHORT_MS, PLAIN_CALLS = 1.0, 100
MOST_EVENTS = 50_000
"""Of a profile, which is read as one JSON document."""
ITEM_BYTES: dict[str, float] = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "uint16": 2,
    "int16": 2,
}
ITEM_BYTES |= {"uint8": 1, "int8": 1, "bool": 1, "float8e4m3fn": 1, "uint4": 0.5, "int4": 0.5}
WEIGHT = {"QLinearConv": 3, "QLinearMatMul": 3, "QGemm": 3}
"""Operator -> which input is its weight; of other products the second."""
CONVOLUTIONS = (
    "Conv",
    "FusedConv",
    "NhwcFusedConv",
    "QLinearConv",
    "ConvInteger",
    "ConvTranspose",
    "QLinearConvTranspose",
)
PRODUCTS = (
    *CONVOLUTIONS,
    *("MatMul", "FusedMatMul", "Gemm", "FusedGemm", "QGemm", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat"),
    *("DynamicQuantizeMatMul", "MatMulNBits", "Convolution", "GroupConvolution", "FullyConnected", "Deconvolution"),
)
"""Operators that multiply by a weight or by each other, in ONNX, ONNX Runtime and OpenVINO."""
INTEGER = ("uint8", "int8")
INT8_LEVEL = 4
"""MatMulNBits' accuracy_level at which it multiplies in eight bits; below it does so in float32."""
_RENAMED = re.compile(r"(_token_\d+|_nchwc|_nhwc|_quant|_QuantizeLinear|_DynamicQuantizeMatMul|/MatMulAddFusion)+$")
"""What ONNX Runtime and its quantizer put behind the name of a node that they replace."""
_PASSED_THROUGH = 8
"""Nodes between a product and the activation that was fused into it, at most."""


@dataclass(frozen=True)
class Tensor:
    """What a node reads or gives, as it was in the profiled calls; shape None where the runtime does not say."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    constant: bool = False

    @property
    def size(self) -> int:
        """Return the number of elements; 0 where the shape is not known."""
        return 0 if self.shape is None else math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Return the bytes that it takes."""
        return int(self.size * ITEM_BYTES.get(self.dtype, 4))


@dataclass(frozen=True)
class NodeTime:
    """A node of the executed graph. `ms`: of one call, the mean of the calls that were not disturbed."""

    name: str
    operator: str
    ms: float
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    integers: Mapping[str, int] = field(default_factory=dict)
    """The attributes that are whole numbers."""
    computes_in: str = "float32"
    """The type of what it multiplies: float32, float16, bfloat16, uint8, int8."""
    layer: str = ""
    """Of a product: the layer's name in the file, or the file's node; "" of others."""
    source: str = ""
    """Of a product: the file's node that it came from."""

    @property
    def is_product(self) -> bool:
        """Return whether it is one of PRODUCTS."""
        return self.operator in PRODUCTS

    @property
    def weight(self) -> Tensor | None:
        """Return the constant that a product multiplies by; None where both sides are activations."""
        place = WEIGHT.get(self.operator, 1)
        return self.inputs[place] if self.is_product and len(self.inputs) > place else None

    @property
    def rows(self) -> int:
        """Return how many vectors a matrix product multiplies: batch times tokens; of a convolution its positions."""
        if not self.outputs or self.outputs[0].shape is None or not self.outputs[0].shape:
            return 0
        shape = self.outputs[0].shape
        return self.outputs[0].size // max(1, self.output_width or shape[-1])

    @property
    def output_width(self) -> int:
        """Return a product's output channels or columns; 0 where they are not known."""
        weight = self.weight
        if self.operator == "MatMulNBits":
            return self.integers.get("N", 0)
        if weight is None or not weight.shape:
            return 0
        return weight.shape[0 if self._is_output_first else -1]

    @property
    def input_width(self) -> int:
        """Return a product's input channels or columns; 0 where they are not known."""
        if self.operator == "MatMulNBits":
            return self.integers.get("K", 0)
        weight = self.weight
        if weight is None or not weight.shape or len(weight.shape) < 2:
            return 0
        return weight.shape[1 if self._is_output_first else -2]

    @property
    def _is_output_first(self) -> bool:
        return self.operator in (*CONVOLUTIONS, "Convolution", "FullyConnected") or bool(self.integers.get("transB"))

    @property
    def flops(self) -> int:
        """Return multiplications and additions of a product; 0 of other nodes, or where shapes are not known."""
        weight = self.weight
        if not self.is_product or not self.outputs or weight is None or not self.inputs:
            return 0
        if self.operator == "MatMulNBits":
            return 2 * self.outputs[0].size * self.integers.get("K", 0)
        if weight.shape is None or not weight.shape:
            return 0
        if self.operator == "ConvTranspose":
            return 2 * self.inputs[0].size * math.prod(weight.shape[1:])
        if self.operator in (*CONVOLUTIONS, "Convolution"):
            return 2 * self.outputs[0].size * math.prod(weight.shape[1:])
        first = self.inputs[0].shape
        return 2 * self.outputs[0].size * (first[-1] if first else 0)

    @property
    def n_bytes(self) -> int:
        """Return the bytes that it reads and writes, each tensor once."""
        return sum(tensor.n_bytes for tensor in (*self.inputs, *self.outputs))

    @property
    def gflops(self) -> float:
        """Return billions of operations a second; 0 where they are not known."""
        return self.flops / self.ms / 1e6 if self.ms > 0 else 0.0


@dataclass(frozen=True)
class Profile:
    """One model's executed graph with its times.

    `call_ms`: of a call: its nodes' time, and of a short call (SHORT_MS) also the runtime's own around them.
    """

    backend: str
    nodes: tuple[NodeTime, ...]
    n_calls: int = 0
    call_ms: float = 0.0
    file: Graph = field(default_factory=lambda: Graph((), {}))
    """The graph as the file has it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "call_ms", self.call_ms or self.nodes_ms)

    @cached_property
    def nodes_ms(self) -> float:
        """Return the time of all nodes."""
        return sum(node.ms for node in self.nodes)

    @cached_property
    def products(self) -> tuple[NodeTime, ...]:
        """Return the nodes that multiply, in the order of execution."""
        return tuple(node for node in self.nodes if node.is_product)

    @cached_property
    def n_bytes(self) -> int:
        """Return the bytes of the weights that products read."""
        return sum(w.n_bytes for node in self.products if (w := node.weight) is not None and w.constant)

    def find(self, *operators: str) -> tuple[NodeTime, ...]:
        """Return the nodes of these operators."""
        return tuple(node for node in self.nodes if node.operator in operators)

    @cached_property
    def makers(self) -> dict[str, NodeTime]:
        """Return, by tensor, the executed node that makes it."""
        return {tensor.name: node for node in self.nodes for tensor in node.outputs}

    @cached_property
    def readers(self) -> dict[str, list[NodeTime]]:
        """Return, by tensor, the executed nodes that read it."""
        readers: dict[str, list[NodeTime]] = defaultdict(list)
        for node in self.nodes:
            for tensor in node.inputs:
                readers[tensor.name].append(node)
        return readers


class Profiled(Protocol):
    """A session whose calls are profiled."""

    @property
    def session(self) -> Session: ...

    def after_call(self) -> None:
        """Keep what the runtime says of the last call, where it forgets it with the next."""
        ...

    def read(self, keep: Callable[[int], bool]) -> Profile:
        """End the profile and return it; `keep`: which runs of the graph count, by number."""
        ...


@dataclass(frozen=True)
class ProfileOrder:
    """A model to profile: on `feeds`, or of a decoder by a `request`.

    `request` makes a whole request and returns its runs of the graph, of which the first, that reads the prompt, is not
    counted. `layers`: names of layers, by which weights are recognised.
    """

    path: Path
    feeds: Feeds | None = None
    request: Callable[[Session], int] | None = None
    options: Options = field(default_factory=dict)
    layers: Sequence[str] = ()


def profile_model(backend: str, path: Path, threads: int, feeds: Feeds | None, budget_s: float = BUDGET_S) -> Profile:
    """Profile one model's calls on `feeds`, as `profile_models` does."""
    (profile,) = profile_models(backend, threads, [ProfileOrder(path, feeds)], budget_s)
    return profile


def profile_models(
    backend: str, threads: int, orders: Sequence[ProfileOrder], budget_s: float = BUDGET_S
) -> list[Profile]:
    """Profile calls of several models made in turn, so that a change of the machine's pace hits them all.

    Takes about `budget_s` for each model. `backend`: one of PROFILERS. Raises what the backend raises.
    """
    with ExitStack() as stack:
        runs = []
        for order in orders:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="profile.")))
            profiled = PROFILERS[backend](order.path, threads, order.options, order.feeds, folder)
            stack.callback(profiled.session.close)
            runs.append(profiled)
        until, calls, most = time.perf_counter() + budget_s * len(orders), 0, MOST_CALLS
        runs_each = [1] * len(orders)
        while calls < most and (calls < LEAST_CALLS or time.perf_counter() < until):
            for number, (order, profiled) in enumerate(zip(orders, runs, strict=True)):
                runs_each[number] = _call(order, profiled.session)
                profiled.after_call()
            if not calls:
                most = min(_count_calls(order.path, n) for order, n in zip(orders, runs_each, strict=True))
            calls += 1
        found = [
            profiled.read(partial(_counts, order.request is not None, n))
            for order, profiled, n in zip(orders, runs, runs_each, strict=True)
        ]
    return [_complete(backend, threads, *pair) for pair in zip(orders, found, strict=True)]


def _call(order: ProfileOrder, session: Session) -> int:
    """Make a call or a request; return how often that ran the graph."""
    if order.request is not None:
        return order.request(session)
    assert order.feeds is not None
    session.run(order.feeds)
    return 1


def _counts(is_request: bool, runs_each: int, run: int) -> bool:
    """Return whether a run counts: not the first of all, nor those of requests that read a prompt."""
    return run % runs_each > 0 if is_request else run > 0


def _count_calls(path: Path, runs_each: int) -> int:
    """Return how many calls are profiled at most."""
    n_nodes = len(read_graph(path).nodes) if path.suffix == ".onnx" else 1000
    return max(LEAST_CALLS, min(MOST_CALLS // runs_each, MOST_EVENTS // (runs_each * max(1, n_nodes))))


def _complete(backend: str, threads: int, order: ProfileOrder, profile: Profile) -> Profile:
    """Add the runtime's own time of short calls, and the file's layers."""
    file = read_graph(order.path) if order.path.suffix == ".onnx" else Graph((), {})
    if order.request is None and order.feeds is not None and profile.nodes_ms < SHORT_MS:
        call_ms = _time_plain_calls(backend, order.path, threads, order.feeds, order.options)
        profile = replace(profile, call_ms=max(profile.nodes_ms, call_ms))
    return trace_layers(profile, file, order.layers)


def _time_plain_calls(backend: str, path: Path, threads: int, feeds: Feeds, options: Options) -> float:
    """Return the milliseconds of a call that is not profiled: to profile a node costs some microseconds of its own."""
    session, times = open_model(find_backend(backend), path, threads, options), []
    for _ in range(PLAIN_CALLS):
        start = time.perf_counter()
        session.run(feeds)
        times.append(1000 * (time.perf_counter() - start))
    session.close()
    return average_undisturbed(times)


@dataclass
class _OnnxRuntimeProfile:
    session: Session
    handle: Any
    executed: Path
    feeds: Feeds | None

    def after_call(self) -> None:
        pass

    def read(self, keep: Callable[[int], bool]) -> Profile:
        path = Path(self.handle.end_profiling())
        try:
            events = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # the disk was full, or a node's name is no JSON
            raise RuntimeFailure(f"ONNX Runtime's profile cannot be read: {error}") from error
        return read_onnxruntime_profile(events, read_graph(self.executed), self.feeds or {}, keep)


def _profile_onnxruntime(path: Path, threads: int, options: Options, feeds: Feeds | None, folder: Path) -> Profiled:
    settings: Any = session_options(threads)
    settings.enable_profiling = True
    settings.profile_file_prefix = str(folder / "profile")
    executed = folder / "executed.onnx"
    settings.optimized_model_filepath = str(executed)
    # weights beside the graph: one file of more than 2 GiB cannot be written
    settings.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.bin")
    model_files(path)
    handle, inputs, outputs = open_handle(path, settings, ["CPUExecutionProvider"])
    (folder / "weights.bin").unlink(missing_ok=True)
    session: Session = OnnxRuntimeSession(path, inputs, outputs, handle)
    encoder = find_encoder(path)
    if encoder is not None:
        plain = OnnxRuntimeSession(encoder, *_reorder(open_handle(encoder, session_options(threads), _CPU)))
        session = EncoderDecoderSession(path, plain, session)
    return _OnnxRuntimeProfile(session, handle, executed, feeds)


_CPU = ["CPUExecutionProvider"]


def _reorder(opened: Any) -> tuple[Any, Any, Any]:
    handle, inputs, outputs = opened
    return inputs, outputs, handle


def read_onnxruntime_profile(
    events: Sequence[Mapping[str, Any]], executed: Graph, feeds: Feeds, keep: Callable[[int], bool]
) -> Profile:
    """Read ONNX Runtime's profile: the nodes of the executed graph with their mean times in undisturbed calls.

    Events of subgraphs (If, Loop) are counted in their node's time. A time is in whole microseconds, so that a mean
    of calls says more than a median.
    """
    runs = sorted((e for e in events if e["name"] == "model_run"), key=lambda event: event["ts"])
    chosen = [run for number, run in enumerate(runs) if keep(number)] or runs
    names = Counter(node.name for node in executed.nodes)
    by_name = {node.name: node for node in executed.nodes if node.name and names[node.name] == 1}
    known = {tensor: Tensor(tensor, *facts, constant=True) for tensor, facts in executed.constants.items()}
    known |= {name: Tensor(name, array.dtype.name, array.shape) for name, array in feeds.items()}
    times: dict[str, list[float]] = defaultdict(list)
    last: dict[str, Mapping[str, Any]] = {}
    nodes = sorted((e for e in events if e["cat"] == "Node" and e["name"].endswith(_KERNEL)), key=lambda e: e["ts"])
    position = 0
    for run in chosen:
        seen: Counter[str] = Counter()
        while position < len(nodes) and nodes[position]["ts"] < run["ts"]:
            position += 1
        while position < len(nodes) and nodes[position]["ts"] <= run["ts"] + run["dur"]:
            event = nodes[position]
            name = event["name"].removesuffix(_KERNEL)
            key = name if name in by_name else f"{event['args']['op_name']}#{seen[event['args']['op_name']]}"
            seen[event["args"]["op_name"]] += name not in by_name
            times[key].append(event["dur"] / 1000)
            last.setdefault(key, event)
            position += 1
    unnamed = _number_by_operator(node for node in executed.nodes if node.name not in by_name)
    timed: list[tuple[str, GraphNode]] = [
        (key, node) for key in times if (node := by_name.get(key) or unnamed.get(key)) is not None
    ]
    for key, node in timed:
        for output, kind in zip(
            (o for o in node.outputs if o), last[key]["args"].get("output_type_shape", []), strict=False
        ):
            for dtype, shape in kind.items():  # one; none of a sequence
                known[output] = Tensor(output, _numpy_name(dtype), tuple(shape))
    return Profile(
        "onnxruntime-cpu",
        tuple(_make_node(key, node, average_undisturbed(times[key]), known) for key, node in timed),
        len(chosen),
    )


def average_undisturbed(times: Sequence[float]) -> float:
    """Return the mean of the faster half: other work only slows a node down, and hits another one in each call."""
    quick = sorted(times)[: (len(times) + 1) // 2]
    return sum(quick) / len(quick)


_KERNEL = "_kernel_time"


def _number_by_operator(nodes: Any) -> dict[str, GraphNode]:
    """Return nodes without a name of their own by operator and number, as they follow each other in every call."""
    counts: Counter[str] = Counter()
    numbered = {}
    for node in nodes:
        numbered[f"{node.operator}#{counts[node.operator]}"] = node
        counts[node.operator] += 1
    return numbered


def _make_node(name: str, node: GraphNode, ms: float, known: Mapping[str, Tensor]) -> NodeTime:
    inputs = tuple(known.get(tensor, Tensor(tensor, "float32", None)) for tensor in node.inputs)
    outputs = tuple(known.get(tensor, Tensor(tensor, "float32", None)) for tensor in node.outputs)
    made = NodeTime(name, node.operator, ms, inputs, outputs, node.integers)
    return replace(made, computes_in=_find_number_type(made))


def _find_number_type(node: NodeTime) -> str:
    if node.operator == "MatMulNBits":
        return "uint8" if node.integers.get("accuracy_level", 0) >= INT8_LEVEL else "float32"
    if node.operator == "DynamicQuantizeMatMul":
        return "uint8"
    return node.inputs[0].dtype if node.inputs else "float32"


def _numpy_name(dtype: str) -> str:
    return {"float": "float32", "double": "float64"}.get(dtype, dtype)


@dataclass
class _OpenVinoProfile:
    session: Session
    request: Any
    compiled: Any
    calls: list[dict[str, float]] = field(default_factory=list)

    def after_call(self) -> None:
        times = self.request.get_profiling_info()
        self.calls.append({info.node_name: info.real_time.total_seconds() * 1000 for info in times})

    def read(self, keep: Callable[[int], bool]) -> Profile:
        kept = [call for number, call in enumerate(self.calls) if keep(number)] or self.calls
        ms = {name: average_undisturbed([call.get(name, 0.0) for call in kept]) for name in kept[0]}
        operators = self.compiled.get_runtime_model().get_ordered_ops()
        nodes = tuple(
            _read_openvino_node(o, ms[o.get_friendly_name()]) for o in operators if o.get_friendly_name() in ms
        )
        return Profile("openvino", tuple(n for n in nodes if n.operator not in _NOT_RUN), len(kept))


_NOT_RUN = ("Const", "Constant", "Parameter", "Result", "Input", "Output")


def _profile_openvino(path: Path, threads: int, options: Options, feeds: Feeds | None, folder: Path) -> Profiled:
    """Compile for the shapes of `feeds`: the executed graph has no others."""
    if feeds is None:
        raise ValueError("decoders are not profiled in openvino")
    if path.suffix != IR:
        model_files(path)
    config: dict[str, object] = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    config |= {"PERF_COUNT": True}
    if options.get("precision") is not None:
        config["INFERENCE_PRECISION_HINT"] = options["precision"]
    model = core().read_model(path)
    names = name_outputs(model)
    model.reshape({name: list(values.shape) for name, values in feeds.items()})
    compiled = core().compile_model(model, "CPU", config)
    request = compiled.create_infer_request()
    session = OpenVinoSession(path, read_specs(compiled.inputs), read_specs(compiled.outputs, names), request)
    return _OpenVinoProfile(session, request, compiled)


def _read_openvino_node(operator: Any, ms: float) -> NodeTime:
    info = operator.get_rt_info()

    def tell(key: str) -> str:
        return str(info[key].astype(str)) if key in info else ""

    kind = tell("layerType") or operator.get_type_name()
    inputs = tuple(_read_port(port.get_source_output()) for port in operator.inputs())
    outputs = tuple(_read_port(port) for port in operator.outputs())
    number_type = _OPENVINO_TYPES.get(tell("runtimePrecision"), "float32")
    node = NodeTime(operator.get_friendly_name(), kind, ms, inputs, outputs, {}, number_type)
    return replace(node, source=tell("originalLayersNames")) if node.is_product else node


_OPENVINO_TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "u8": "uint8", "i8": "int8"}
_OPENVINO_TYPES |= {name.upper(): dtype for name, dtype in _OPENVINO_TYPES.items()}


def _read_port(port: Any) -> Tensor:
    shape = port.get_partial_shape()
    sizes = tuple(size.get_length() for size in shape) if shape.is_static else None
    maker = port.get_node()
    with suppress(RuntimeError):
        dtype = port.get_element_type().to_dtype().name
        return Tensor(maker.get_friendly_name(), dtype, sizes, maker.get_type_name() in ("Const", "Constant"))
    return Tensor(maker.get_friendly_name(), "float32", sizes)


PROFILERS: dict[str, Callable[[Path, int, Options, Feeds | None, Path], Profiled]] = {
    "onnxruntime-cpu": _profile_onnxruntime,
    "openvino": _profile_openvino,
}
"""Backend -> what opens a model so that its calls are profiled."""


def trace_layers(profile: Profile, file: Graph, layers: Sequence[str] = ()) -> Profile:
    """Return the profile with the file's node and layer of each product.

    A runtime keeps a node's name, puts something behind it, or keeps the name of a tensor that the node or what was
    fused into it gives. A layer's name is its weight's before ".weight", or what of it `layers`
    knows; the node's where there is neither.
    """
    makers = {output: node for node in file.nodes for output in node.outputs}
    named = {node.name: node for node in file.nodes if node.name}
    products = {node.name: node for node in named.values() if node.operator in PRODUCTS}

    def find_source(node: NodeTime) -> GraphNode | None:
        for name in (node.name, _RENAMED.sub("", node.name), *node.source.split(",")):
            if (known := products.get(name)) is not None:
                return known
        starts = [makers.get(tensor.name) for tensor in node.outputs]
        starts += [named.get(_RENAMED.sub("", node.name)), makers.get(_RENAMED.sub("", node.name))]
        return next((source for start in starts if (source := _walk_to_product(start, makers)) is not None), None)

    traced = []
    for node in profile.nodes:
        source = find_source(node) if node.is_product else None
        layer = name_layer(source, file, makers, layers) if source is not None else ""
        own = source.name if source is not None else ""
        traced.append(replace(node, source=own, layer=layer or node.name) if node.is_product else node)
    return replace(profile, nodes=tuple(traced), file=file)


def _walk_to_product(node: GraphNode | None, makers: Mapping[str, GraphNode]) -> GraphNode | None:
    """Return the product that a fused activation, sum or quantization stands behind; None where there is none near."""
    for _ in range(_PASSED_THROUGH):
        if node is None or node.operator in PRODUCTS:
            return node
        node = next((maker for name in node.inputs if (maker := makers.get(name)) is not None), None)
    return None


def name_layer(source: GraphNode, file: Graph, makers: Mapping[str, GraphNode], layers: Sequence[str] = ()) -> str:
    """Return the name of the layer that a product of the file is."""
    known = set(layers)
    for tensor in find_constants(source, file, makers):
        stem = re.split(r"[/.](?:weight|kernel|bias)\b", tensor)[0]
        if stem in known or stem != tensor:
            return stem
    return source.name


def find_constants(source: GraphNode, file: Graph, makers: Mapping[str, GraphNode]) -> list[str]:
    """Return the constants that a node reads, directly or through nodes that unpack them; the weight's names first."""
    found = []
    for name in source.inputs:
        for _ in range(4):
            found.append(name)
            maker = makers.get(name)
            if maker is None or maker.operator not in _UNPACKING:
                break
            name = maker.inputs[0]
        if name not in file.constants:
            del found[-1:]
    return found


_UNPACKING = ("DequantizeLinear", "Reshape", "Transpose", "Cast", "Identity")
