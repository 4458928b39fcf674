"""Run the recipes of tests/golden and list what they gave: one name, one number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from places import ROOT
from shortcuts import quick_judge, quick_reader

from runtime.judge.advice import VNNI

RECORDS = ROOT / "tests/golden"
Value = str | float | None


def apply_golden(name: str, folder: Path) -> Path:
    """Run recipes/NAME.yaml by the command line from `folder`, where its model lies; return the bundle.

    Only quality is wanted: nothing runs on further backends, and no process measures load time and memory.
    """
    from typer.testing import CliRunner

    from compress.cli import app

    recipe = shutil.copy(RECORDS / f"recipes/{name}.yaml", folder)
    out = folder / "out"
    with quick_judge(), quick_reader():
        done = CliRunner().invoke(app, ["apply", recipe, "--out", str(out), "--cache", str(folder / "cache")])
    assert done.exit_code in (0, 3), done.output  # 3: a gate fell short, which the numbers tell better
    return out


def list_numbers(bundle: Path) -> dict[str, Value]:
    """Return what a bundle's report, manifest and lock say of quality, sizes, passes and layers; nothing of time."""
    report, manifest, lock = (
        json.loads((bundle / f"{name}.json").read_text()) for name in ("report", "manifest", "lock")
    )
    numbers: dict[str, Value] = {"verdict": report["verdict"], "samples": report["n_samples"]}
    numbers["passes"] = len(lock["steps"]["passes"])
    for side in ("baseline", "candidate"):
        numbers |= _list_side(side, report[side])
    for artifact in manifest["artifacts"]:
        numbers[f"{artifact['name']}.precision"] = artifact["precision"]
    for path, file in manifest["files"].items():
        if path.endswith((".onnx", ".safetensors")):
            numbers[f"{path}.size_bytes"] = file["size_bytes"]
    rows = (report["steps"] or {"rows": []})["rows"]
    for row in rows[1:-1]:  # the first is the baseline, the last the candidate
        numbers |= _list_side(f"after {row['name']}", row)
    layers = [row for row in report["layers"] if row["type"] not in ("measured", "note")]
    kinds = [f"{row['action']} {row['reason']}".strip() for row in layers]
    numbers |= {f"layers {kind}": kinds.count(kind) for kind in sorted(set(kinds))}
    for row in layers:
        figures = {key: value for key, value in row.items() if isinstance(value, float) and key != "input_spread"}
        numbers |= {f"{row['layer']}.{key}": value for key, value in figures.items()}
    for row in report["layers"]:
        if row["type"] == "measured":
            numbers |= _list_curve(row)
    return numbers


def _list_side(name: str, side: dict[str, Any]) -> dict[str, Value]:
    return {f"{name}.size_bytes": side["size_bytes"]} | {f"{name}.{key}": v for key, v in side["metrics"].items()}


def _list_curve(row: dict[str, Any]) -> dict[str, Value]:
    """Return where a training curve begins and ends, and after how many steps of the optimizer."""
    curve = {int(key): value for key, value in row.items() if key.isdigit()}
    if not curve:
        return {}
    name = row["layer"]
    return {f"{name}.steps": max(curve), f"{name}.first": curve[min(curve)], f"{name}.last": curve[max(curve)]}


ONE_SAMPLE = (
    *("top1", "top5", "precision_macro", "recall_macro", "f1_macro", "agreement"),
    *("span_f1", "word_agreement"),
)
ERRORS = (
    *("kl", "kl_token", "mse_baseline", "output_error", "output_error_rtn"),
    *("error_before", "error_after", "fit_before", "fit_after", "first", "last"),
)
NOISE = ("kl", "cosine", "sqnr_db", "mse_baseline")
"""Kinds of numbers that say how far an int8 graph is from the float one."""


def saturates(bundle: Path) -> bool:
    """Return whether this bundle's int8 graph has more noise on this processor than where the numbers were recorded.

    Without VNNI, onnxruntime on x86 adds pairs of products of uint8 and int8 in 16 bits: the quickstart's 43.0 dB
    become 31.2, at the same top1.
    """
    report, manifest = (json.loads((bundle / f"{name}.json").read_text()) for name in ("report", "manifest"))
    flags = report["environment"].get("cpu_flags", [])
    is_int8 = any(artifact["precision"] == "int8" for artifact in manifest["artifacts"])
    return is_int8 and "avx2" in flags and not any(flag in flags for flag in VNNI)


def allowed_change(name: str, recorded: float, n_samples: float) -> float:
    """Return by how much a number may differ between processors and versions of the libraries."""
    kind = name.rpartition(".")[2]
    if kind in ONE_SAMPLE:  # one that lies on the border may fall to either side; a macro mean weighs it a bit more
        return 1.5 / n_samples
    if kind == "token_agreement":  # three of 1,500 tokens
        return 0.002
    if kind == "nll":
        return 1e-3
    if kind == "perplexity":  # exp(nll)
        return 1e-3 * recorded
    if kind == "sqnr_db":
        return 0.2
    if kind in ERRORS:  # powers of an error: 0.2 dB are 4.7 %
        return 0.05 * abs(recorded) + 1e-9
    if kind == "cosine":  # half the power of the error of unit vectors
        return 0.05 * (1 - recorded) + 1e-6
    if kind in ("input_low", "input_high"):
        return 0.02 * abs(recorded) + 1e-4
    if kind == "size_bytes":  # names and versions that a file carries; a tensor more or less is more
        return 0.005 * recorded
    return 0.0


def list_changes(recorded: dict[str, Value], found: dict[str, Value], ignored: Sequence[str] = ()) -> list[str]:
    """Return a line for each number that moved, from what to what, and how far it may; `ignored`: kinds left out."""
    changes = []
    samples = recorded["samples"]
    assert isinstance(samples, int)
    for name in dict.fromkeys([*recorded, *found]):
        if name.rpartition(".")[2] in ignored:
            continue
        before, after = recorded.get(name), found.get(name)
        if not isinstance(before, int | float) or not isinstance(after, int | float):
            if before != after:
                changes.append(f"{name}: {_show(before)} -> {_show(after)}")
            continue
        allowed = allowed_change(name, before, samples)
        if not abs(after - before) <= allowed:  # NaN moves, too
            changes.append(f"{name}: {before:.6g} -> {after:.6g} (by {after - before:+.2g}; {allowed:.2g} is allowed)")
    return changes


def _show(value: Value) -> str:
    return "nothing" if value is None else str(value)
