"""What a bundle holds, for people and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runtime.bundle import Artifact, Gate, Manifest, TensorSpec, read_manifest
from runtime.errors import BundleError
from runtime.records import to_json

NO_LAYERS = ("note", "measured")
"""Types of rows of layers.json that are of no layer."""


def describe_bundle(path: Path) -> dict[str, Any]:
    """The manifest with the layer decisions and the last verdict, as JSON values. Files are not hashed. BundleError."""
    manifest = read_manifest(path)
    report = read_json(path / "report.json")
    return {
        **to_json(manifest),
        "layers": read_json(path / "layers.json") or [],
        "verdict": report.get("verdict") if isinstance(report, dict) else None,
    }


def read_json(file: Path) -> Any:
    """What the JSON file holds; None if there is no such file. BundleError if it is not JSON."""
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BundleError(f"{file}: not JSON: {error}") from error


def inspect_bundle(path: Path, console: Console) -> None:
    """Print what `describe_bundle` knows. BundleError."""
    manifest, described = read_manifest(path), describe_bundle(path)
    console.print(
        f"[bold]{escape(manifest.name)}[/]  {manifest.task}, made for {manifest.target} by {manifest.created_by}"
    )
    console.print(
        f"digest {manifest.digest}, {len(manifest.files)} files; verdict: {described['verdict'] or 'not judged yet'}"
    )
    console.print(_models(manifest))
    for text in _engines(manifest):
        console.print(escape(text))
    console.print(_signature(manifest.artifacts[0]) if manifest.artifacts else "no models")
    _print_judgement(manifest, console)
    _print_layers(described["layers"], console)


def _models(manifest: Manifest) -> Table:
    table = Table("model", "file", "for", "weights", "size", title_justify="left")
    for a in manifest.artifacts:
        table.add_row(a.name, a.path, a.target, a.precision, size_text(a.size_bytes))
    return table


def _engines(manifest: Manifest) -> Iterator[str]:
    """What each engine was compiled with and for, and those that are left to compile."""
    for artifact in manifest.artifacts:
        if (record := artifact.engine) is not None:
            gpus = ", ".join(record.compute_capabilities)
            yield (
                f"{artifact.name}: {record.runtime} {record.version} on {record.platform} for compute capability "
                f"{gpus}; {record.held:.0%} of the products in the precision asked for"
            )
    for order in manifest.waiting():
        yield f"{order.name}: left for `compress compile` on a machine with {order.runtime}"


def _signature(artifact: Artifact) -> str:
    return f"inputs: {_tensors(artifact.inputs)}\noutputs: {_tensors(artifact.outputs)}"


def _tensors(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(escape(f"{s.name} {s.dtype}[{', '.join(map(str, s.shape))}]") for s in specs)


def _print_judgement(manifest: Manifest, console: Console) -> None:
    frozen = f"{manifest.evaluation.n_samples} frozen samples" if manifest.evaluation else "no samples to judge it on"
    console.print(f"evaluation: {frozen}")
    for gate in manifest.judgement.gates:
        console.print(f"gate: {gate.metric} {gate_rules(gate)}")


def gate_rules(gate: Gate) -> str:
    """ "max_drop 0.01, min 0.9"."""
    return ", ".join(f"{rule} {bound:g}" for rule, bound in gate.bounds.items())


def _print_layers(layers: Any, console: Console) -> None:
    """How many layers each action took, and by name those that stayed as they were."""
    rows = [row for row in layers if isinstance(row, dict)] if isinstance(layers, list) else []
    decisions = [row for row in rows if row.get("type") not in NO_LAYERS]
    counts = Counter(str(layer.get("action", "?")) for layer in decisions)
    if counts:
        console.print("layers: " + ", ".join(f"{n} {action}" for action, n in counts.most_common()))
    for layer in (d for d in decisions if d.get("action") == "kept"):
        console.print(f"  kept {escape(str(layer.get('layer')))}: {escape(str(layer.get('reason', '')))}")


def size_text(n_bytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"
