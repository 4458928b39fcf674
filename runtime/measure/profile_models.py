"""Profile models: each node's time by the runtime's own profile, and the layer of the file that it comes from,
traced through what was fused and renamed.

A profiled call is a little slower than another, so that a profile is a short run of its own and never one that is
judged.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from runtime.backends import Feeds, Session, find_backend, open_model
from runtime.backends.base import Options
from runtime.bundle.onnx_file import Graph, GraphNode, read_graph
from runtime.measure.profile import PRODUCTS, NodeTime, Profile, Profiled, average_undisturbed
from runtime.measure.profile_onnxruntime import profile_onnxruntime
from runtime.measure.profile_openvino import profile_openvino

LEAST_CALLS, MOST_CALLS = 5, 50
"""Profiled calls of a model: an operator's median needs some, and more tell nothing new."""
BUDGET_S = 2.0
"""Seconds for the profiled calls of one model."""
SHORT_MS, PLAIN_CALLS = 1.0, 100
"""A call that takes less is also timed this often without the profiler, whose own work is no small part of it."""
PROFILERS: dict[str, Callable[[Path, int, Options, Feeds | None, Path], Profiled]] = {
    "onnxruntime-cpu": profile_onnxruntime,
    "openvino": profile_openvino,
}
"""Backend -> what opens a model so that its calls are profiled."""
_RENAMED = re.compile(r"(_token_\d+|_nchwc|_nhwc|_quant|_QuantizeLinear|_DynamicQuantizeMatMul|/MatMulAddFusion)+$")
"""What ONNX Runtime and its quantizer put behind the name of a node that they replace."""
_UNPACKING = ("DequantizeLinear", "Reshape", "Transpose", "Cast", "Identity")


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
    # 50,000 events at most: a profile is read as one JSON document
    return max(LEAST_CALLS, min(MOST_CALLS // runs_each, 50_000 // (runs_each * max(1, n_nodes))))


def _complete(backend: str, threads: int, order: ProfileOrder, profile: Profile) -> Profile:
    """Add the runtime's own time of short calls, and the file's layers."""
    file = read_graph(order.path) if order.path.suffix == ".onnx" else Graph((), {})
    if order.request is None and order.feeds is not None and profile.nodes_ms < SHORT_MS:
        # unprofiled: to profile a node costs some microseconds of its own
        session, times = open_model(find_backend(backend), order.path, threads, order.options), []
        for _ in range(PLAIN_CALLS):
            start = time.perf_counter()
            session.run(order.feeds)
            times.append(1000 * (time.perf_counter() - start))
        session.close()
        call_ms = average_undisturbed(times)
        profile = replace(profile, call_ms=max(profile.nodes_ms, call_ms))
    return trace_layers(profile, file, order.layers)


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
    # nodes between a product and the activation that was fused into it
    for _ in range(8):
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
