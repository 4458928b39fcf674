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

from runtime.bundle.format import CAME_WITHOUT, HOST, NO_LAYERS, Artifact, Gate, Manifest, find_left_out
from runtime.bundle.records import to_json
from runtime.bundle.tensors import TensorSpec
from runtime.errors import BundleError
from runtime.tasks.manifest import read_manifest
from runtime.words import size_text


def describe_bundle(path: Path) -> dict[str, Any]:
    """Return the manifest with the layer decisions and the last verdict, as JSON values. Files are not hashed.

    Raises BundleError.
    """
    manifest = read_manifest(path)
    report = read_json(path / "report.json")
    return {
        **to_json(manifest),
        "layers": read_json(path / "layers.json") or [],
        "verdict": report.get("verdict") if isinstance(report, dict) else None,
    }


def read_json(file: Path) -> Any:
    """Return what the JSON file holds; None if there is no such file. Raises BundleError if it is not JSON."""
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BundleError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file}: not JSON: {error}") from error


def read_host(bundle: Path) -> dict[str, Any]:
    """Read from the bundle's host.json where the machine that built it had its folders; {} where it has none.

    No digest covers that file: it says where to look, never what is right.
    """
    try:
        host = json.loads((bundle / HOST).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    folders = host.get("folders", {}) if isinstance(host, dict) else None
    root = host.get("recipe_folder", "") if isinstance(host, dict) else None
    if not isinstance(folders, dict) or not isinstance(root, str):
        return {}
    texts = {str(name): folder for name, folder in folders.items() if isinstance(folder, str)}
    return {"folders": texts} | ({"recipe_folder": root} if Path(root).is_dir() else {})


def inspect_bundle(path: Path, console: Console) -> None:
    """Print what `describe_bundle` knows. Raises BundleError."""
    manifest, described = read_manifest(path), describe_bundle(path)
    made = f"{manifest.task}, made for {manifest.target} by {manifest.created_by}"
    console.print(f"[bold]{escape(manifest.name)}[/]  {escape(made)}")
    verdict = described["verdict"] or "not judged yet"
    console.print(escape(f"digest {manifest.digest}, {len(manifest.files)} files; verdict: {verdict}"))
    table = Table("model", "file", "for", "weights", "size", title_justify="left")
    for a in manifest.artifacts:
        table.add_row(*map(escape, (a.name, a.path, a.target, a.precision, size_text(a.size_bytes))))
    console.print(table)
    for text in _describe_engines(manifest):
        console.print(escape(text))
    console.print(_format_signature(manifest.artifacts[0]) if manifest.artifacts else "no models")
    frozen = f"{manifest.evaluation.n_samples} frozen samples" if manifest.evaluation else "no samples to judge it on"
    console.print(f"evaluation: {frozen}" + (f"; {CAME_WITHOUT}" if find_left_out(path, manifest) else ""))
    for gate in manifest.judgement.gates:
        console.print(escape(f"gate: {gate.metric} {gate_rules(gate)}"))
    _print_layers(described["layers"], console)


def _describe_engines(manifest: Manifest) -> Iterator[str]:
    """Yield what each engine was compiled with and for, and those that are left to compile."""
    for artifact in manifest.artifacts:
        if (record := artifact.engine) is not None:
            gpus = ", ".join(record.compute_capabilities)
            yield (
                f"{artifact.name}: {record.runtime} {record.version} on {record.platform} for compute capability "
                f"{gpus}; {record.held:.0%} of the products in the precision asked for"
            )
    for order in manifest.waiting():
        yield f"{order.name}: left for `compress compile` on a machine with {order.runtime}"


def _format_signature(artifact: Artifact) -> str:
    return f"inputs: {_format_tensors(artifact.inputs)}\noutputs: {_format_tensors(artifact.outputs)}"


def _format_tensors(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(escape(f"{s.name} {s.dtype}[{', '.join(map(str, s.shape))}]") for s in specs)


def gate_rules(gate: Gate) -> str:
    """Format the bounds of a gate, and what they are of: "max_drop 0.01, min 0.9, worst label"."""
    of = f", worst {gate.worst}" if gate.worst else f", {gate.slice}" if gate.slice else ""
    return ", ".join(f"{rule} {bound:g}" for rule, bound in gate.bounds.items()) + of


def _print_layers(layers: Any, console: Console) -> None:
    """Print how many layers each action took, and by name those that stayed as they were."""
    rows = [row for row in layers if isinstance(row, dict)] if isinstance(layers, list) else []
    decisions = [row for row in rows if row.get("type") not in NO_LAYERS]
    counts = Counter(str(layer.get("action", "?")) for layer in decisions)
    if counts:
        console.print(escape("layers: " + ", ".join(f"{n} {action}" for action, n in counts.most_common())))
    for layer in (d for d in decisions if d.get("action") == "kept"):
        console.print(f"  kept {escape(str(layer.get('layer')))}: {escape(str(layer.get('reason', '')))}")
