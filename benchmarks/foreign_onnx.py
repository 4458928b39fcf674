"""Claims of recipes/claims/ultraface-int8.yaml, and of `{kind: int8}` alone on ONNX files that nobody here made.

Files: a face detector (opset 9, depthwise convolutions, batch norms unfolded, initializers listed as inputs), as it was
exported and as a simplifier left it, and the nine light models inside the package onnx, whose weights nodes compute.
Each becomes a judged bundle whose outputs have a cosine of at least 0.99 to the float model's. On one thread, in calls
made in turn, none is slower than the file as it came: at least 0.97 times as fast, the interval's lower end counted.
None is larger than what ONNX Runtime's own static quantizer makes of the same float model and samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from common import ROOT, Call, Claim, Measured, Peer, Row, at_least, at_most, run_recipe, run_script
from measuring import (
    ONNXRUNTIME,
    SEED,
    THREADS,
    Entry,
    Judged,
    compare,
    feeds_for,
    find_row,
    make_peer_models,
    open_judged,
)

from runtime.clock.compare import compare_files
from runtime.stats import Estimate, process_interval

NEEDS = ("models/ultraface-slim/version-slim-320.onnx", "data/bccd/JPEGImages")
ULTRAFACE = ROOT / "recipes/claims/ultraface-int8.yaml"
DETECTORS = {"ultraface": "version-slim-320.onnx", "ultraface, simplified": "version-slim-320_simplified.onnx"}
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
PEER = Peer("onnxruntime static", "onnxruntime_static.py")
N_SAMPLES = 8
"""Of a light model, whose output is the same for any."""
ROUNDS, QUICK_ROUNDS, BUDGET_S = 400, 20, 120.0
CONFIDENCE = 0.95
PROCESSES = 9


def measure(call: Call) -> Measured:
    claims: list[Claim] = []
    rows: list[Row] = []
    for name, recipe, sets, source in _write_cases(call):
        bundle, report = run_recipe(recipe, call, name.replace(", ", "-"), sets)
        judged = open_judged(bundle)
        made: dict[str, Path] = {}
        failures: list[Row] = []
        if not call.ours:
            made, failures = make_peer_models((PEER,), judged, recipe, call, sets)
        found = _measure_file(judged, source, made)
        ours = find_row(found, "ours")
        claims += [
            at_least(f"{name}: judged_samples", report["n_samples"], 1),
            at_least(f"{name}: cosine", report["candidate"]["metrics"].get("cosine"), 0.99),
            at_least(f"{name}: latency_p50_ratio_low", ours["latency_p50_ratio_low"], 0.97),
        ]
        if not call.ours:
            theirs = made.get(PEER.name)
            # where the peer makes no model that runs, ours cannot be larger
            over = ours["size_bytes"] / theirs.stat().st_size if theirs is not None else 0.0
            claims.append(at_most(f"{name}: size_over_onnxruntime", over, 1.0))
        rows += [{"file": name, **row} for row in (*found, *failures)]
    return claims, rows


def _write_cases(call: Call) -> Sequence[tuple[str, Path, tuple[str, ...], Path]]:
    """Return (name, recipe, its settings, ONNX file) of each model; the light ones' recipes and samples are written."""
    cases: list[tuple[str, Path, tuple[str, ...], Path]] = []
    for name, file in DETECTORS.items():
        cases.append((name, ULTRAFACE, (f"vars.file={file}",), call.bench / "models/ultraface-slim" / file))
    for path in sorted(LIGHT.glob("light_*.onnx")):
        name = path.stem.removeprefix("light_")
        graph = onnx.load(path).graph
        constants = {tensor.name for tensor in graph.initializer}
        (fed,) = (value for value in graph.input if value.name not in constants)
        shape = [dim.dim_value for dim in fed.type.tensor_type.shape.dim][1:]
        samples = np.random.default_rng(SEED).standard_normal((2 * N_SAMPLES, *shape)).astype(np.float32)
        np.savez(call.out / f"{name}.npz", x=samples)
        cases.append((name, _write_recipe(call.out, name, path, fed.name), (), path))
    return cases


def _write_recipe(folder: Path, name: str, path: Path, fed: str) -> Path:
    """Write what a user would write who has nothing but the file: int8, and all else left at its default."""
    data = f'source: "npz:{folder}/{name}.npz", samples: {N_SAMPLES}, columns: {{"{fed}": x}}'
    recipe = folder / f"{name}.yaml"
    recipe.write_text(f"""\
version: 1
name: {name}
vars: {{bench: none}}
model: {{source: "onnx:{path}", task: generic}}
data:
  calibration: {{{data}}}
  evaluation: {{{data}, skip: {N_SAMPLES}}}
passes:
  - {{kind: int8}}
validate: {{benchmark: {{iterations: 60}}}}
""")
    return recipe


def _measure_file(judged: Judged, source: Path, made: dict[str, Path]) -> list[Row]:
    """Return a row for the file as it came, its cleaned graph, ours and the peer's, timed in turns."""
    entries = [Entry("as it came", source), Entry("float", judged.float_model)]
    entries += [Entry("ours", judged.model_for(ONNXRUNTIME))]
    entries += [Entry(name, path) for name, path in made.items()]
    rows = compare(judged, entries, ("cosine",), {})
    working = [i for i, row in enumerate(rows) if "failed" not in row]
    for i, ratio in zip(working, _time_in_processes([entries[i] for i in working], judged), strict=True):
        rows[i] |= {"latency_p50_ratio": ratio.value, "latency_p50_ratio_low": ratio.low}
    return rows


def _time_in_processes(entries: Sequence[Entry], judged: Judged) -> list[Estimate]:
    """Return how much faster than the first each entry is, with the interval that fresh processes give."""
    files = [entry.path for entry in entries]
    compared = compare_files(ONNXRUNTIME, THREADS, files, feeds_for(judged, 1), PROCESSES, BUDGET_S, SEED)
    return [process_interval(row, CONFIDENCE) for row in (compared.ms[:, :1] / compared.ms).T]


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
