"""Calls that ONNX Runtime profiles: the executed graph, which it writes, with the times of its nodes."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.backends import Feeds, Session
from runtime.backends.base import EncoderDecoderSession, Options
from runtime.backends.onnxruntime_cpu import OnnxRuntimeSession, open_handle, session_options
from runtime.bundle.files import find_encoder, model_files
from runtime.bundle.onnx_file import Graph, GraphNode, read_graph
from runtime.errors import RuntimeFailure
from runtime.measure.profile import NodeTime, Profile, Profiled, Tensor, average_undisturbed

_CPU = ["CPUExecutionProvider"]
_KERNEL = "_kernel_time"


@dataclass
class _OnnxRuntimeProfile:
    session: Session
    profiled: OnnxRuntimeSession
    executed: Path
    feeds: Feeds | None

    def after_call(self) -> None:
        pass

    def read(self, keep: Callable[[int], bool]) -> Profile:
        events = end_profile(self.profiled)
        return read_onnxruntime_profile(events, read_graph(self.executed), self.feeds or {}, keep)


def profile_onnxruntime(path: Path, threads: int, options: Options, feeds: Feeds | None, folder: Path) -> Profiled:
    model_files(path)
    profiled, executed = open_profiled(path, threads, folder)
    session: Session = profiled
    encoder = find_encoder(path)
    if encoder is not None:
        plain = OnnxRuntimeSession(encoder, *_reorder(open_handle(encoder, session_options(threads), _CPU)))
        session = EncoderDecoderSession(path, plain, profiled)
    return _OnnxRuntimeProfile(session, profiled, executed, feeds)


def open_profiled(path: Path, threads: int, folder: Path) -> tuple[OnnxRuntimeSession, Path]:
    """Open a file so that its calls are profiled, and return the graph's file that is executed, without its weights.

    Both the profile and that graph are written to `folder`, which is made.
    """
    folder.mkdir(exist_ok=True)
    settings: Any = session_options(threads)
    settings.enable_profiling = True
    settings.profile_file_prefix = str(folder / "profile")
    executed = folder / "executed.onnx"
    settings.optimized_model_filepath = str(executed)
    # weights beside the graph: one file of more than 2 GiB cannot be written
    settings.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.bin")
    weights = folder / "weights.bin"
    with suppress(OSError):  # a system without links; nobody reads them: 2.3 GiB took 7 of 10 s
        weights.symlink_to(os.devnull)
    opened = open_handle(path, settings, _CPU)
    weights.unlink(missing_ok=True)
    return OnnxRuntimeSession(path, *_reorder(opened)), executed


def end_profile(session: OnnxRuntimeSession) -> list[dict[str, Any]]:
    """End a session's profile and return its events. RuntimeFailure: it cannot be read."""
    handle: Any = session.handle
    path = Path(handle.end_profiling())
    try:
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # the disk was full, or a node's name is no JSON
        raise RuntimeFailure(f"ONNX Runtime's profile cannot be read: {error}") from error
    return events


def list_durations(events: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return node -> microseconds of each of its calls."""
    durations: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(_KERNEL):
            durations[event["name"].removesuffix(_KERNEL)].append(event["dur"])
    return durations


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
                dtype = {"float": "float32", "double": "float64"}.get(dtype, dtype)  # numpy's names
                known[output] = Tensor(output, dtype, tuple(shape))
    return Profile(
        "onnxruntime-cpu",
        tuple(_make_node(key, node, average_undisturbed(times[key]), known) for key, node in timed),
        len(chosen),
    )


def _number_by_operator(nodes: Iterable[GraphNode]) -> dict[str, GraphNode]:
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
        # MatMulNBits multiplies in eight bits from this accuracy_level on
        return "uint8" if node.integers.get("accuracy_level", 0) >= 4 else "float32"
    if node.operator == "DynamicQuantizeMatMul":
        return "uint8"
    return node.inputs[0].dtype if node.inputs else "float32"
