"""`compress parity` in ONNX Runtime: from torch to the file that runs, rung by rung, and where the first one parts.

torch -> ONNX is measured when a bundle is built, and recorded in its lock. Here follow: what ONNX Runtime's optimizer
makes of the float file; what rounding makes of it; what the optimizer makes of the rounded file. A float rung names the
first tensor beyond the tolerance. Rounding moves every tensor behind it, so that rung asks each layer, and each rounded
tensor, how much it adds by itself: the layer as it is in the file against its float form on the same inputs.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from compress.commands.inspect import read_json
from compress.commands.parity import REFERENCE, allow_error, compare_outputs, locate, sample_batches
from compress.commands.switched import open_switched
from compress.errors import ExportError
from compress.graph.run import Feeds, open_session, run_batches, tap
from compress.graph.switches import SWITCHES, SwitchedGraph, find_pairs
from compress.store.cache import default_root
from compress.store.progress import no_log
from runtime.backends import Session, open_artifact
from runtime.backends.onnxruntime_cpu import OnnxRuntimeSession, onnxruntime_library, open_handle, session_options
from runtime.bundle.files import find_encoder
from runtime.bundle.format import inside
from runtime.bundle.manifest import Artifact, Manifest
from runtime.judge.bundle import prepare
from runtime.judge.divergence import Divergence, relative_error

EXPLAINED = {8: 0.1, 6: 0.15, 5: 0.2, 4: 0.3, 3: 0.5, 2: 1.0}
"""Bits -> relative root mean square error at its output that rounding a layer's weights and inputs to them explains:
about three times what healthy layers show (8 bits: 0.01 to 0.03; 4 bits in groups of 32: 0.08)."""


@dataclass(frozen=True)
class Rung:
    """Two forms of the model compared. `errors`: output -> relative error; `allowed`: of those, None where they are
    what rounding costs and the layers' own are judged. `divergence`: the first tensor or layer beyond that."""

    name: str
    errors: dict[str, float]
    allowed: float | None
    divergence: Divergence | None

    @property
    def holds(self) -> bool:
        if self.allowed is None:
            return self.divergence is None
        return all(error <= self.allowed for error in self.errors.values())


@dataclass(frozen=True)
class Ladder:
    """`torch_to_onnx`: largest difference over the largest output, as the build measured it; None where it did not."""

    torch_to_onnx: float | None
    rungs: tuple[Rung, ...]

    @property
    def holds(self) -> bool:
        return all(rung.holds for rung in self.rungs)


def climb(path: Path, cache: Path | None = None) -> Ladder:
    """Compare every form of a bundle's model with the one before it, in ONNX Runtime on its own samples.

    `cache`: where the float weights of the build may still be, of a model that was changed before it was rounded.
    Raises BundleError, and ExportError where the bundle's candidate is not run in ONNX Runtime on a CPU.
    """
    case = prepare(path, [REFERENCE], None)
    manifest = case.manifest
    if case.is_scored or "bfloat16" in manifest.graph_for(REFERENCE).precision:
        raise ExportError(f"{path}: ONNX Runtime does not run its candidate on a CPU, where the forms are compared")
    if find_encoder(inside(path, manifest.graph_for(REFERENCE).path)) is not None:
        raise ExportError(f"{path}: the files of an encoder-decoder are compared at the build alone")
    if manifest.images is not None:
        raise ExportError(f"{path}: the graphs of a model that also sees are compared at the build alone")
    candidate = manifest.graph_for(REFERENCE)
    baseline = next((artifact for artifact in manifest.artifacts if artifact.name == "baseline"), None)
    rungs = [] if baseline is None else [_compare_optimized(path, manifest, baseline, "float file, optimized")]
    with open_switched(case, cache or default_root(), no_log) as model:
        batches = sample_batches(path, manifest, model.session(model.choose(True)))
        exact, rounded = (model.session(model.choose(which)) for which in (False, True))
        errors, worst = compare_outputs(exact, rounded, batches)
        errors = {name: error for name, error in errors.items() if not name.startswith("present")}
        found = find_first_wrong(model.graphs[0], batches[worst])
        rungs.append(Rung("quantized file", errors, None, found))
    rungs.append(_compare_optimized(path, manifest, candidate, "quantized file, optimized"))
    lock = read_json(path / "lock.json") or {}
    return Ladder(lock.get("model", {}).get("parity_torch_onnx"), tuple(rungs))


def _compare_optimized(path: Path, manifest: Manifest, artifact: Artifact, name: str) -> Rung:
    """Compare a file as it is written with what ONNX Runtime's optimizer makes of it."""
    threads, file, allowed = manifest.judgement.benchmark.threads, inside(path, artifact.path), allow_error(artifact)
    with (
        closing(_open_as_written(file, threads)) as written,
        closing(open_artifact(path, artifact, REFERENCE, threads)) as optimized,
    ):
        batches = sample_batches(path, manifest, written)
        errors, worst = compare_outputs(written, optimized, batches)
    found = None
    if any(error > allowed for error in errors.values()):

        def open_optimized(model: Path) -> Session:
            return open_artifact(model.parent, replace(artifact, path=model.name), REFERENCE, threads)

        found = locate(file, batches[worst], (lambda model: _open_as_written(model, threads), open_optimized), allowed)
    return Rung(name, errors, allowed, found)


def _open_as_written(path: Path, threads: int) -> Session:
    """Open a file with every node run as it stands."""
    settings = session_options(threads)
    settings.graph_optimization_level = onnxruntime_library().GraphOptimizationLevel.ORT_DISABLE_ALL
    handle, inputs, outputs = open_handle(path, settings, ["CPUExecutionProvider"])
    return OnnxRuntimeSession(path, inputs, outputs, handle)


def find_first_wrong(graph: SwitchedGraph, feeds: Feeds) -> Divergence | None:
    """Return the first layer, or rounded tensor, that adds more error by itself than its bits explain; None: none does.

    A layer is compared with its float form on the activation that it reads, a rounded tensor with itself before.
    """
    bits = {unit.name: unit.bits for unit in graph.units}
    asked = {name: (forms, EXPLAINED.get(bits.get(name, 8), EXPLAINED[8])) for name, forms in graph.forms.items()}
    asked |= {name: ((rounded, name), EXPLAINED[8]) for name, rounded in find_pairs(graph.model)}
    names = list(dict.fromkeys(name for forms, _ in asked.values() for name in forms))
    feeds = {**feeds, SWITCHES: np.ones(max(len(graph.units), 1), np.bool_)}
    values = next(run_batches(open_session(tap(graph.model, names)), [feeds]))
    values |= {name.removesuffix("/tapped"): array for name, array in values.items()}
    order = {value.name: place for place, node in enumerate(graph.model.graph) for value in node.outputs}
    errors: dict[str, float] = {}
    before, first = "", ""
    for name in sorted(asked, key=lambda name: order.get(asked[name][0][0], 0)):
        (rounded, exact), allowed = asked[name]
        errors[name] = relative_error(values[rounded], values[exact])
        if not first and errors[name] > allowed:
            first = name
        before = before if first else name
    return Divergence(first, before, errors, 1) if first else None


def describe_ladder(ladder: Ladder) -> list[str]:
    """Format the comparison as lines for people."""
    known = ladder.torch_to_onnx
    texts = [] if known is None else [f"torch -> ONNX: differs by {known:.1e} of the largest output (at the build)"]
    for rung in ladder.rungs:
        worst = max(rung.errors.values(), default=0.0)
        allowed = "" if rung.allowed is None else f", {rung.allowed:g} is allowed"
        texts.append(f"-> {rung.name}: outputs differ by {worst:.3g} of their size{allowed}")
        if rung.divergence is not None:
            texts.append(f"   {_describe_first(rung, rung.divergence)}")
        elif not rung.holds:
            texts.append("   no tensor inside differs when it is an output: what differs is a fusion")
    return [*texts, "every rung holds" if ladder.holds else "a rung does not hold"]


def _describe_first(rung: Rung, found: Divergence) -> str:
    error, before = found.errors[found.tensor], f"; {found.before} before it does not" if found.before else ""
    if rung.allowed is not None:
        return f"first tensor that differs: {found.tensor}, by {error:.3g}{before}"
    return (
        f"first that adds more than its rounding explains: {found.tensor}, {error:.3g} of its size on its own inputs"
        f"{before}; `compress blame` says what it costs"
    )


def to_dict(ladder: Ladder) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    rungs = [{**asdict(rung), "holds": rung.holds} for rung in ladder.rungs]
    return {"torch_to_onnx": ladder.torch_to_onnx, "rungs": rungs, "holds": ladder.holds}
