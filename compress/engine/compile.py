"""Compile an engine from its order, where this machine can, in a process of its own.

A broken installation may crash the process, a library takes one logger for all its life, and what a build held is given
back when it ends: three reasons why this is never done in the process that asks for it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import onnx_ir as ir

from compress.engine.layers import layers_in_json, layers_in_log, outcomes, share_as_asked
from compress.errors import ExportError
from compress.facts import Note
from compress.rounding.float_blocks import FROM_MXFP8
from compress.store.cache import default_root
from runtime.bundle.engine import EngineOrder, EngineRecord, Profile
from runtime.bundle.files import write_whole
from runtime.bundle.format import Artifact
from runtime.bundle.records import from_json, to_json
from runtime.errors import RuntimeFailure
from runtime.nvidia import tensorrt_api as api
from runtime.nvidia.gpu import gpu_here, platform_here
from runtime.processes.isolated import last_line, run, start_python

RECORD = "engine.json"
SHOWN = 5
"""Nodes that a note names."""
PRODUCTS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
_KINDS = {
    ir.DataType.INT8: "int8",
    ir.DataType.INT4: "int4",
    ir.DataType.FLOAT4E2M1: "float4",
    ir.DataType.FLOAT8E4M3FN: "float8",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.FLOAT: "float32",
}
TIMEOUT_S = 4 * 3600
"""A build that hangs ends: TensorRT tries every kernel of every layer, which takes minutes to an hour."""
FAILED = 1


def why_not_here(order: EngineOrder) -> str:
    """Return why this machine cannot compile it, and the way out; "" if it can.

    The library is tried in another process.
    """
    trouble = _explain_library_trouble(order.runtime)
    if trouble:
        return trouble
    stripped = bool(order.options.get("strip_weights"))
    if order.runtime == "tensorrt-rtx" and not stripped:  # with it, 1.7 compiles on a GPU alone
        return ""
    if gpu_here() is None:
        what = "with strip_weights " if stripped else ""
        return f"{order.runtime} compiles {what}on a GPU, and no driver sees one here"
    return ""


def list_capabilities(runtime: str) -> tuple[str, ...]:
    """Return the compute capabilities that the library here compiles for without the GPU; empty where not known."""
    return tuple(_probe_library(runtime)[1].split())


def _explain_library_trouble(runtime: str) -> str:
    return _probe_library(runtime)[0]


@lru_cache
def _probe_library(runtime: str) -> tuple[str, str]:
    """Return (why it cannot be loaded, "" if it can; the compute capabilities that it knows)."""
    return run(f"from runtime.nvidia import tensorrt_api as api; print(*api.list_capabilities(api.load({runtime!r})))")


def compile_order(
    root: Path, order: EngineOrder, graph: Artifact, cache: Path | None
) -> tuple[Artifact, tuple[Note, ...]]:
    """Compile `order` beside the graph in the bundle's folder `root`; return the engine and notes on it. ExportError.

    `cache`: the folder in which timing caches are kept; None: the user's.
    """
    model = root / graph.path
    engine = model.with_name(f"{model.stem}.{order.runtime}.engine")
    layers, record = engine.with_suffix(".layers.json"), model.with_name(RECORD)
    job = Job(
        runtime=order.runtime,
        graph=str(model),
        engine=str(engine),
        layers=str(layers),
        record=str(record),
        cache=str(_make_timing_path(cache or default_root(), order)) if order.runtime == "tensorrt" else "",
        profiles=order.profiles,
        options=order.options,
        asked=find_asked_precisions(model),
    )
    try:
        built, notes = build_engine(job)
        stripped = bool(order.options.get("strip_weights"))
        built = replace(built, layers=layers.relative_to(root).as_posix(), weights_from=graph.path if stripped else "")
    finally:
        record.unlink(missing_ok=True)
    artifact = Artifact(
        name=order.name,
        path=engine.relative_to(root).as_posix(),
        target=order.runtime,
        precision=graph.precision,
        inputs=graph.inputs,
        outputs=graph.outputs,
        size_bytes=engine.stat().st_size,
        cache=graph.cache,
        kind="engine",
        engine=built,
    )
    return artifact, tuple(Note("info", f"{order.name}: {text}") for text in (*notes, *_precision_texts(built)))


def _precision_texts(record: EngineRecord) -> list[str]:
    """Return sentences: which share of the products runs in the precision that the graph asks for, and which do not."""
    asked = ", ".join(f"{count} in {kind}" for kind, count in record.asked.items())
    texts = [f"{record.held:.0%} of the products asked for ({asked}) run so"] if asked else []
    if record.short:
        some = [f"{node} ({change})" for node, change in list(record.short.items())[:SHOWN]]
        more = f" and {len(record.short) - SHOWN} more" if len(record.short) > SHOWN else ""
        texts.append(f"not in the asked precision: {', '.join(some)}{more}")
    return texts


def _make_timing_path(root: Path, order: EngineOrder) -> Path:
    """Return the timing cache's file, one for each library and kind of GPU; its folder is made.

    The library itself refuses what another version timed.
    """
    gpu = gpu_here()
    name = "-".join(re.findall(r"[a-z0-9]+", gpu.name.lower())) if gpu else "none"
    folder = root / "timing"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{order.runtime}-{name}.timing"


def find_asked_precisions(path: Path) -> dict[str, str]:
    """Return product node -> the precision that it asks for.

    int8, float8 or float4 (both factors are dequantized), int4 (its weights are), or its float type.
    """
    model = ir.load(path)
    precisions = {}
    for node in model.graph.all_nodes():
        if node.op_type in PRODUCTS and node.name:
            precisions[node.name] = _find_precision(node)
    return precisions


def _find_precision(node: ir.Node) -> str:
    stored = [_find_stored_type(value) for value in node.inputs[:2] if value is not None]
    for kind in ("int8", "float8", "float4"):
        if stored.count(kind) == 2:
            return kind
    if "int4" in stored:
        return "int4"
    types = [
        _KINDS.get(value.dtype, "") for value in (*node.outputs, *node.inputs[:2]) if value is not None and value.dtype
    ]
    return next((kind for kind in types if kind), "float32")


def _find_stored_type(value: ir.Value) -> str:
    """Return the type in which a factor is stored, where it is dequantized; "" for any other."""
    node = value.producer()
    while node is not None and node.op_type in ("Transpose", "Reshape", "Unsqueeze", "Squeeze", "Cast"):
        node = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if node is None or node.op_type not in ("DequantizeLinear", FROM_MXFP8) or node.inputs[0] is None:
        return ""
    return _KINDS.get(node.inputs[0].dtype, "") if node.inputs[0].dtype is not None else ""


@dataclass(frozen=True)
class Job:
    """One engine to compile. `graph`: the .onnx file; `engine`, `layers`, `record`: files to write; `cache`: the timing
    cache's file, "" for none. `asked`: product node -> precision."""

    runtime: str
    graph: str
    engine: str
    layers: str
    record: str
    cache: str
    profiles: tuple[Profile, ...]
    options: dict[str, object]
    asked: dict[str, str]


def build_engine(job: Job) -> tuple[EngineRecord, tuple[str, ...]]:
    """Compile an engine and return its record and what the user should know.

    ExportError with what the library said.
    """
    code = "from compress.engine.compile import main; sys.exit(main(sys.stdin.read()))"
    try:
        done = start_python(code, given=json.dumps(to_json(job)), seconds=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ExportError(
            f"{job.runtime}: the build took longer than {TIMEOUT_S} s; lower builder_optimization_level"
        ) from error
    if done.returncode < 0:
        message = last_line(done.stderr)
        raise ExportError(
            f"{job.runtime}: the builder crashed (signal {-done.returncode}: {message}); see `compress doctor`"
        )
    if done.returncode != 0:
        raise ExportError([f"{job.runtime}: {line}" for line in done.stderr.strip().splitlines()[-8:]] or "no word")
    answer: dict[str, Any] = json.loads(Path(job.record).read_text(encoding="utf-8"))
    return from_json(EngineRecord, answer["record"], "record"), tuple(answer["notes"])


def _compile_here(job: Job) -> tuple[EngineRecord, list[str]]:
    """Compile in this process and write the engine under its name when it is whole; return its record and notes.

    RuntimeFailure with the way out.
    """
    trt = api.load(job.runtime)
    messages = api.Messages(trt)
    builder = trt.Builder(messages.logger)
    network = api.read_network(trt, builder, messages.logger, Path(job.graph))
    options = _make_options(job)
    config = api.make_config(trt, builder, options)
    free = {network.get_input(i).name for i in range(network.num_inputs) if -1 in network.get_input(i).shape}
    for profile in job.profiles:
        ranges = {name: (shapes.min, shapes.opt, shapes.max) for name, shapes in profile.items() if name in free}
        api.add_profile(builder, config, ranges)
    notes = [text] if (text := api.use_timing_cache(trt, config, options.timing_cache, messages)) else []
    begun = time.monotonic()
    data = builder.build_serialized_network(network, config)
    if data is None:
        raise RuntimeFailure(_list_reasons(messages))
    seconds, engine = time.monotonic() - begun, bytes(memoryview(data))
    write_whole(Path(job.engine), engine)
    if job.cache and (kept := api.timing_cache(config)):
        write_whole(Path(job.cache), kept)
    described = api.describe_engine(trt, messages, engine, options.version_compatible)
    layers = layers_in_json(described) if described else layers_in_log(text for _, text in messages.said)
    write_whole(Path(job.layers), (json.dumps([asdict(layer) for layer in layers], indent=1) + "\n").encode())
    node_outcomes = outcomes(job.asked, layers)
    gpu = gpu_here()
    return EngineRecord(
        runtime=job.runtime,
        version=str(trt.__version__),
        platform=platform_here(),
        compute_capabilities=options.compute_capabilities or ((gpu.capability,) if gpu else ()),
        profiles=job.profiles,
        version_compatible=options.version_compatible,
        hardware_compatibility_level=options.hardware_compatibility_level,
        gpu=gpu.name if gpu else "",
        build_seconds=round(seconds, 3),
        n_layers=len(layers),
        asked=dict(Counter(outcome.asked for outcome in node_outcomes)),
        held=round(share_as_asked(node_outcomes), 4),
        short={
            outcome.node: f"{outcome.asked} -> {outcome.got or 'not named'}"
            for outcome in node_outcomes
            if not outcome.as_asked
        },
        inspected="inspector" if described else "log",
    ), notes


def _make_options(job: Job) -> api.BuildOptions:
    """Return the recipe's words as the library's options; a timing cache that is not there yet begins empty."""
    given = dict(job.options)
    workspace = given.pop("workspace_mib", None)
    fields = {name: value for name, value in given.items() if name in api.BuildOptions.__dataclass_fields__}
    cache = Path(job.cache) if job.cache else None
    return from_json(
        api.BuildOptions,
        {**fields, "workspace_bytes": None if workspace is None else int(str(workspace)) * 2**20},
        "options",
    ).with_cache(None if cache is None else cache.read_bytes() if cache.is_file() else b"")


def _list_reasons(messages: api.Messages) -> list[str]:
    """Return the library's errors, each once, those of a missing driver last.

    These are logged of builds that succeed, too.
    """
    errors = list(dict.fromkeys(messages.errors()))
    return sorted(errors, key=lambda text: "cuda" in text.lower()) or [
        "the build failed, and the library did not say why"
    ]


def main(text: str) -> int:
    """Do the job that `text` is, JSON; the record goes to its file, errors to stderr, one a line."""
    job = from_json(Job, json.loads(text), "job")
    try:
        record, notes = _compile_here(job)
    except RuntimeFailure as error:
        print("\n".join(error.problems), file=sys.stderr)
        return FAILED
    answer = {"record": to_json(record), "notes": notes}
    write_whole(Path(job.record), json.dumps(answer, indent=1).encode())
    return 0
