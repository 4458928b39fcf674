"""`compress parity`: an engine against the ONNX file that it was compiled from, on the bundle's own samples.

Where they part by more than the precision explains, the first tensor that differs is found by compiling the graph again
with tensors of its inside as outputs (`runtime.judge.divergence`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from compress.engine.compile import compile_order
from compress.engine.marked import mark, tensors_of
from compress.errors import ExportError
from compress.store.durable import temporary_folder
from runtime.backends import Feeds, Session, find_backend, open_artifact
from runtime.bundle.columns import Columns, count
from runtime.bundle.engine import ENGINES
from runtime.bundle.format import Manifest, read_samples
from runtime.bundle.manifest import Artifact
from runtime.decode.scoring import language_encoder
from runtime.judge.divergence import Divergence, first_divergence, relative, relative_error, squares
from runtime.tasks.manifest import read_manifest, verify
from runtime.tasks.predict import bundle_preprocessor, encoding_views

REFERENCE = "onnxruntime-cpu"
ALLOWED = {"float32": 1e-3, "float16": 1e-2, "int8": 5e-2, "float8": 0.1, "int4": 2e-2}
"""Relative root mean square error that a precision explains; of several the largest. Rounding at ties differs."""
Open = Callable[[Path], Session]
"""An .onnx file -> a session that runs it on one of the two sides."""


@dataclass(frozen=True)
class Parity:
    """`errors`: output -> relative error over the samples. `divergence`: where they part; None where they do not."""

    backend: str
    n_samples: int
    errors: dict[str, float]
    allowed: float
    divergence: Divergence | None

    @property
    def holds(self) -> bool:
        return all(error <= self.allowed for error in self.errors.values())


def choose_engine(path: Path) -> str:
    """Return the backend whose engine is compared: the bundle's target, or "" where that runs the ONNX file itself."""
    target = read_manifest(path).target
    return target if target in ENGINES else ""


def bundle_parity(path: Path, backend: str) -> Parity:
    """Compare a bundle's engine for `backend` with its graph. Raises ExportError without an engine, or for bfloat16."""
    manifest = verify(path)
    engine = manifest.candidate_for(backend)
    if engine.kind != "engine":
        raise ExportError(f"{path}: there is no engine for {backend}; compile it: compress compile {path}")
    graph = manifest.graph_for(backend)
    if "bfloat16" in graph.precision:
        raise ExportError("parity: ONNX Runtime has no bfloat16 CPU kernels to compare with; use dtype: float16")
    if "float4" in graph.precision or manifest.is_scored(REFERENCE):
        raise ExportError("parity: ONNX Runtime computes no FP4 and no MXFP8 on CPUs to compare with; use scheme: FP8")
    threads = manifest.judgement.benchmark.threads
    with closing(open_artifact(path, graph, REFERENCE, threads)) as reference:
        batches = sample_batches(path, manifest, reference)
        with closing(open_artifact(path, engine, backend, threads)) as other:
            errors, worst = compare_outputs(reference, other, batches)
    allowed = allow_error(graph)
    found = None
    if any(error > allowed for error in errors.values()):
        sides = _make_sides(manifest, backend, threads)
        found = locate(path / graph.path, batches[worst], sides, allowed)
    return Parity(backend, sum(len(next(iter(batch.values()))) for batch in batches), errors, allowed, found)


def lines(parity: Parity) -> list[str]:
    """Format the comparison as lines for people."""
    texts = [
        f"{name}: differs by {error:.3g} of its size, {parity.allowed:g} is allowed"
        for name, error in parity.errors.items()
    ]
    if parity.holds:
        return [*texts, f"{parity.backend} gives what the ONNX file gives, on {parity.n_samples} samples"]
    if parity.divergence is None:
        return [*texts, "no tensor inside differs when it is an output: what differs is a fusion, or the outputs alone"]
    place, error = parity.divergence.tensor, parity.divergence.errors[parity.divergence.tensor]
    before = f"; {parity.divergence.before} before it does not" if parity.divergence.before else ""
    return [*texts, f"first tensor that differs: {place}, by {error:.3g}{before}"]


def to_dict(parity: Parity) -> dict[str, object]:
    """Return the comparison as JSON values."""
    return {**asdict(parity), "holds": parity.holds}


def allow_error(graph: Artifact) -> float:
    """Return the relative error that the precisions of a graph ("int8 + float16") explain together."""
    return max((ALLOWED[part] for part in graph.precision.split(" + ") if part in ALLOWED), default=ALLOWED["float32"])


def sample_batches(path: Path, manifest: Manifest, session: Session) -> list[Feeds]:
    """Return the evaluation samples in batches as the model reads them; for a decoder whole texts, its cache empty."""
    columns: Columns = read_samples(path, manifest)
    preprocessor = bundle_preprocessor(path, manifest, session.inputs)
    if manifest.generates:
        columns = language_encoder(preprocessor).samples(columns)
    view, size = encoding_views(manifest.task, columns)[0], manifest.judgement.batch_size
    starts = range(0, count(view), size)
    return [preprocessor.encode(view, np.arange(start, min(start + size, count(view)))) for start in starts]


def compare_outputs(reference: Session, other: Session, batches: Sequence[Feeds]) -> tuple[dict[str, float], int]:
    """Return the relative error of each output over all batches, and the batch in which one of them is largest."""
    sums = {spec.name: np.zeros(2) for spec in reference.outputs}
    by_batch = []
    for feeds in batches:
        expected, found = reference.run(feeds), other.run(feeds)
        both = {name: squares(found[name], expected[name]) for name in sums}
        for name, found_squares in both.items():
            sums[name] += found_squares
        by_batch.append(max(relative(*pair) for pair in both.values()))
    return {name: relative(*map(float, total)) for name, total in sums.items()}, int(np.argmax(by_batch))


def locate(graph: Path, feeds: Feeds, sides: tuple[Open, Open], allowed: float) -> Divergence | None:
    """Find the first tensor of `graph` in which the two sides differ on one batch; None where only the outputs do."""

    def compare(names: Sequence[str]) -> Mapping[str, float]:
        with temporary_folder() as folder:
            marked = folder / graph.name
            mark(graph, names, marked)
            expected, found = (_run_and_close(side(marked), feeds) for side in sides)
        return {name: relative_error(found[name], expected[name]) for name in names}

    return first_divergence(tensors_of(graph), compare, allowed)


def _run_and_close(session: Session, feeds: Feeds) -> Feeds:
    try:
        return session.run(feeds)
    finally:
        session.close()


def _make_sides(manifest: Manifest, backend: str, threads: int) -> tuple[Open, Open]:
    """Return two functions that open a graph: in ONNX Runtime, and compiled anew."""
    order = next(
        candidate for candidate in manifest.orders if candidate.runtime == backend and candidate.graph != "baseline"
    )
    graph = manifest.artifact(order.graph)

    def open_compiled(model: Path) -> Session:
        artifact, _ = compile_order(model.parent, order, replace(graph, path=model.name), None)
        return open_artifact(model.parent, artifact, backend, threads)

    return (lambda model: find_backend(REFERENCE).open(model, threads, {})), open_compiled
