"""Compile an engine from its order, where this machine can, and say what its graph asked for."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import onnx_ir as ir

from compress.engine.build import Job, build_engine
from compress.facts import Note
from compress.store.cache import default_root
from runtime.bundle.engine import EngineOrder, EngineRecord
from runtime.bundle.format import Artifact
from runtime.nvidia.gpu import gpu_here
from runtime.processes.isolated import run

RECORD = "engine.json"
SHOWN = 5
"""Nodes that a note names."""
WITH_GPU = ("strip_weights", "refit")
"""Options with which TensorRT for RTX compiles on a GPU alone (1.7)."""
PRODUCTS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
_KINDS = {
    ir.DataType.INT8: "int8",
    ir.DataType.INT4: "int4",
    ir.DataType.FLOAT8E4M3FN: "float8",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.FLOAT: "float32",
}


def why_not_here(order: EngineOrder) -> str:
    """Return why this machine cannot compile it, and the way out; "" if it can.

    The library is tried in another process.
    """
    trouble = _explain_library_trouble(order.runtime)
    if trouble:
        return trouble
    asking = [name for name in WITH_GPU if order.options.get(name)]
    if order.runtime == "tensorrt-rtx" and not asking:
        return ""
    if gpu_here() is None:
        what = f"with {asking[0]} " if asking else ""
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
        cache=str(_make_timing_path(cache or default_root(), order)) if order.options.get("timing_cache") else "",
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
    return artifact, tuple(Note("info", f"{order.name}: {text}") for text in (*notes, *precision_texts(built)))


def precision_texts(record: EngineRecord) -> list[str]:
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

    int8 or float8 (both factors are dequantized), int4 (its weights are), or its float type.
    """
    model = ir.load(path)
    precisions = {}
    for node in model.graph.all_nodes():
        if node.op_type in PRODUCTS and node.name:
            precisions[node.name] = _find_precision(node)
    return precisions


def _find_precision(node: ir.Node) -> str:
    stored = [_find_stored_type(value) for value in node.inputs[:2] if value is not None]
    for kind in ("int8", "float8"):
        if stored.count(kind) == 2:
            return kind
    if "int4" in stored:
        return "int4"
    types = [
        _KINDS.get(value.dtype, "") for value in (*node.outputs, *node.inputs[:2]) if value is not None and value.dtype
    ]
    return next((kind for kind in types if kind), "float32")


def _find_stored_type(value: ir.Value) -> str:
    """Return the type in which a factor is stored, where a DequantizeLinear makes it; "" for any other."""
    node = value.producer()
    while node is not None and node.op_type in ("Transpose", "Reshape", "Unsqueeze", "Squeeze", "Cast"):
        node = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if node is None or node.op_type != "DequantizeLinear" or node.inputs[0] is None:
        return ""
    return _KINDS.get(node.inputs[0].dtype, "") if node.inputs[0].dtype is not None else ""
