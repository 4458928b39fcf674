"""`compress compile`: a bundle's engines are compiled on the machine that has the hardware, and it is judged anew."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compress.engine.compile import compile_order, why_not_here
from compress.errors import ExportError
from compress.export.bundle import note_rows, write_json
from compress.export.card import model_card
from compress.facts import Note
from compress.store.durable import blame, link_or_copy
from compress.store.output import publish, reserve_output
from runtime.backends.tensorrt import engine_problems
from runtime.bundle.engine import EngineOrder
from runtime.bundle.files import write_whole
from runtime.bundle.format import BOM, PROVENANCE, SIGNATURE, Artifact, Manifest, require_evaluation
from runtime.judge.passes import read_pass_table, write_pass_table
from runtime.nvidia.gpu import gpu_here
from runtime.report.report import Report
from runtime.report.terminal import show_progress
from runtime.report.validate import validate
from runtime.tasks.manifest import verify, write_bundle


def compile_bundle(path: Path, again: bool = False) -> Report:
    """Compile the engines of a bundle that are missing, or do not run here, or all; and judge it anew.

    What this machine cannot compile is left. The bundle stays as it was until the new one is whole and judged.
    Raises ExportError where nothing is left to do, or this machine can do none of it.
    """
    path = Path(path).resolve()
    manifest = verify(path)
    troubles = {order.name: why_not_here(order) for order in manifest.orders}
    wanted = [order for order in manifest.orders if again or _needs_compiling(manifest, order, troubles[order.name])]
    if not wanted:
        left = "has its engines" if manifest.orders else "asks for no engine; add one to its recipe's export"
        raise ExportError(f"{path}: the bundle {left}")
    orders = [for_this_gpu(order) for order in wanted if not troubles[order.name]]
    if not orders:
        raise ExportError([f"{order.name}: {troubles[order.name]}" for order in wanted])
    require_evaluation(path, manifest)  # by which the new one is judged
    with reserve_output(path) as staging:
        with blame(path):
            _copy_bundle(path, staging)
        made = [compile_order(staging, order, manifest.artifact(order.graph), None) for order in orders]
        changed = with_engines(manifest, [artifact for artifact, _ in made])
        with blame(path):
            _rewrite_descriptions(staging, changed, orders, [note for _, notes in made for note in notes])
        changed = write_bundle(staging, changed)
        if (table := read_pass_table(path, manifest)) is not None:
            write_pass_table(replace(table, manifest_digest=changed.digest), staging)
        report = validate(staging, progress=show_progress)
        publish(staging, path)
    return report


def with_engines(manifest: Manifest, engines: Sequence[Artifact]) -> Manifest:
    """Return the manifest with these engines, each in the place of one of its name."""
    names = {engine.name for engine in engines}
    kept = [artifact for artifact in manifest.artifacts if artifact.name not in names]
    return replace(manifest, artifacts=(*kept, *engines))


def for_this_gpu(order: EngineOrder) -> EngineOrder:
    """Add this machine's GPU to an order that lists others only; return any other order as it is."""
    gpu, listed = gpu_here(), order.options.get("compute_capabilities")
    if gpu is None or not isinstance(listed, list | tuple) or not listed or gpu.capability in listed:
        return order
    return replace(order, options={**order.options, "compute_capabilities": [*listed, gpu.capability]})


def _needs_compiling(manifest: Manifest, order: EngineOrder, trouble: str) -> bool:
    """Return whether the engine is missing, or would not run on this machine.

    With `trouble`, which is why its library cannot compile here, only a missing engine counts.
    """
    built = {artifact.name: artifact.engine for artifact in manifest.artifacts}.get(order.name)
    return built is None or (not trouble and bool(engine_problems(built)))


def _rewrite_descriptions(
    staging: Path, manifest: Manifest, orders: Sequence[EngineOrder], notes: Sequence[Note]
) -> None:
    """Rewrite layers.json and the README: what came of these engines, instead of that they are left for later."""
    lock, rows = (json.loads((staging / name).read_text(encoding="utf-8")) for name in ("lock.json", "layers.json"))
    about = tuple(f"{order.name}: " for order in orders)
    kept = [row for row in rows if row.get("type") != "note" or not str(row.get("reason", "")).startswith(about)]
    layers = [*kept, *note_rows(notes)]
    write_json(staging / "layers.json", layers)
    write_whole(staging / "README.md", model_card(manifest, lock, layers).encode())


def _copy_bundle(source: Path, staging: Path) -> None:
    """Copy the bundle's files, as links where the file system can: they are never written to again.

    What tells of the bundle as it was stays behind, its signature with it.
    """

    def copy(file: str, target: str) -> None:
        if file.endswith(".data"):  # onnx reads no weights from a file of two names: a possible attack
            shutil.copyfile(file, target)
        else:
            link_or_copy(Path(file), Path(target))

    shutil.copytree(
        source,
        staging,
        copy_function=copy,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("report.*", BOM, PROVENANCE, SIGNATURE),
    )
