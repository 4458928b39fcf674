"""From an order to an engine, where this machine can compile it."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from compress.cache import default_root
from compress.engine.asked import asked_precisions
from compress.engine.build import Job, build_engine
from compress.facts import Note
from runtime.bundle import Artifact
from runtime.engine import EngineOrder, EngineRecord
from runtime.gpu import gpu_here
from runtime.isolated import run

RECORD = "engine.json"
SHOWN = 5
"""Nodes that a note names."""
WITH_GPU = ("strip_weights", "refit")
"""Options with which TensorRT for RTX compiles on a GPU alone (1.7)."""


def why_not_here(order: EngineOrder) -> str:
    """Why this machine cannot compile it, and the way out; "" if it can. The library is tried in another process."""
    found = _library_trouble(order.runtime)
    if found:
        return found
    asking = [name for name in WITH_GPU if order.options.get(name)]
    if order.runtime == "tensorrt-rtx" and not asking:
        return ""
    if gpu_here() is None:
        what = f"with {asking[0]} " if asking else ""
        return f"{order.runtime} compiles {what}on a GPU, and no driver sees one here"
    return ""


def known_capabilities(runtime: str) -> tuple[str, ...]:
    """Compute capabilities that the library here compiles for without the GPU; empty where that is not known."""
    return tuple(_library(runtime)[1].split())


def _library_trouble(runtime: str) -> str:
    return _library(runtime)[0]


@lru_cache
def _library(runtime: str) -> tuple[str, str]:
    """(why it cannot be loaded, "" if it can; the compute capabilities that it knows)."""
    return run(f"from runtime import tensorrt_api as api; print(*api.known_capabilities(api.load({runtime!r})))")


def compile_order(
    root: Path, order: EngineOrder, graph: Artifact, cache: Path | None
) -> tuple[Artifact, tuple[Note, ...]]:
    """The engine of `order` beside the graph in the bundle's folder `root`; and what is to be said of it. ExportError.

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
        cache=str(_timing_file(cache or default_root(), order)) if order.options.get("timing_cache") else "",
        profiles=order.profiles,
        options=order.options,
        asked=asked_precisions(model),
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
    """Which share of the products runs in the precision that the graph asks for, and which do not."""
    asked = ", ".join(f"{count} in {kind}" for kind, count in record.asked.items())
    texts = [f"{record.held:.0%} of the products asked for ({asked}) run so"] if asked else []
    if record.short:
        some = [f"{node} ({change})" for node, change in list(record.short.items())[:SHOWN]]
        more = f" and {len(record.short) - SHOWN} more" if len(record.short) > SHOWN else ""
        texts.append(f"not in the asked precision: {', '.join(some)}{more}")
    return texts


def _timing_file(root: Path, order: EngineOrder) -> Path:
    """One for each library and kind of GPU: the library itself refuses what another version timed."""
    gpu = gpu_here()
    name = "-".join(re.findall(r"[a-z0-9]+", gpu.name.lower())) if gpu else "none"
    folder = root / "timing"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{order.runtime}-{name}.timing"
