"""`compress parity`: an engine against the ONNX file that it was compiled from, on the bundle's own samples.

Where they part by more than the precision explains, the first tensor that differs is found by compiling the graph again
with tensors of its inside as outputs (`runtime.divergence`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from compress.engine.compile import compile_order
from compress.engine.marked import mark, tensors_of
from compress.errors import ExportError
from runtime.backends import Feeds, Session, find_backend
from runtime.bundle import Manifest, read_samples, verify
from runtime.columns import Columns, count
from runtime.divergence import Divergence, first_divergence, relative, relative_error, squares
from runtime.manifest import GENERATION, Artifact
from runtime.opening import open_artifact
from runtime.predict import bundle_preprocessor, encoding_views
from runtime.scoring import language_encoder

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


def bundle_parity(path: Path, backend: str) -> Parity:
    """Compare a bundle's engine for `backend` with its graph. ExportError without one, or for bfloat16."""
    manifest = verify(path)
    engine = manifest.candidate_for(backend)
    if engine.kind != "engine":
        raise ExportError(f"{path}: there is no engine for {backend}; compile it: compress compile {path}")
    graph = manifest.graph_for(backend)
    if "bfloat16" in graph.precision:
        raise ExportError("parity: ONNX Runtime has no bfloat16 CPU kernels to compare with; use dtype: float16")
    threads = manifest.judgement.benchmark.threads
    with closing(open_artifact(path, graph, REFERENCE, threads)) as reference:
        batches = sample_batches(path, manifest, reference)
        with closing(open_artifact(path, engine, backend, threads)) as other:
            errors, worst = compare_outputs(reference, other, batches)
    allowed = allowed_for(graph)
    found = None
    if any(error > allowed for error in errors.values()):
        sides = _sides(manifest, backend, threads)
        found = locate(path / graph.path, batches[worst], sides, allowed)
    return Parity(backend, sum(len(next(iter(one.values()))) for one in batches), errors, allowed, found)


def lines(found: Parity) -> list[str]:
    """For people."""
    said = [
        f"{name}: differs by {error:.3g} of its size, {found.allowed:g} is allowed"
        for name, error in found.errors.items()
    ]
    if found.holds:
        return [*said, f"{found.backend} gives what the ONNX file gives, on {found.n_samples} samples"]
    if found.divergence is None:
        return [*said, "no tensor inside differs when it is an output: what differs is a fusion, or the outputs alone"]
    place, error = found.divergence.tensor, found.divergence.errors[found.divergence.tensor]
    before = f"; {found.divergence.before} before it does not" if found.divergence.before else ""
    return [*said, f"first tensor that differs: {place}, by {error:.3g}{before}"]


def to_dict(found: Parity) -> dict[str, object]:
    """JSON values."""
    return {**asdict(found), "holds": found.holds}


def allowed_for(graph: Artifact) -> float:
    """What the precisions of a graph ("int8 + float16") explain together."""
    return max((ALLOWED[part] for part in graph.precision.split(" + ") if part in ALLOWED), default=ALLOWED["float32"])


def sample_batches(path: Path, manifest: Manifest, session: Session) -> list[Feeds]:
    """The evaluation samples as the model reads them; a decoder whole texts, its cache empty."""
    columns: Columns = read_samples(path, manifest)
    preprocessor = bundle_preprocessor(path, manifest, session.inputs)
    if manifest.task in GENERATION:
        columns = language_encoder(preprocessor).samples(columns)
    view, size = encoding_views(manifest.task, columns)[0], manifest.judgement.batch_size
    starts = range(0, count(view), size)
    return [preprocessor.encode(view, np.arange(start, min(start + size, count(view)))) for start in starts]


def compare_outputs(reference: Session, other: Session, batches: Sequence[Feeds]) -> tuple[dict[str, float], int]:
    """Output -> relative error over all batches; and the batch in which one of them is largest."""
    sums = {spec.name: np.zeros(2) for spec in reference.outputs}
    by_batch = []
    for feeds in batches:
        expected, found = reference.run(feeds), other.run(feeds)
        both = {name: squares(found[name], expected[name]) for name in sums}
        for name, found_squares in both.items():
            sums[name] += found_squares
        by_batch.append(max(relative(*one) for one in both.values()))
    return {name: relative(*map(float, total)) for name, total in sums.items()}, int(np.argmax(by_batch))


def locate(graph: Path, feeds: Feeds, sides: tuple[Open, Open], allowed: float) -> Divergence | None:
    """The first tensor of `graph` in which the two sides differ on one batch; None where only the outputs do."""

    def compare(names: Sequence[str]) -> Mapping[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            marked = Path(folder) / graph.name
            mark(graph, names, marked)
            expected, found = (_run(side(marked), feeds) for side in sides)
        return {name: relative_error(found[name], expected[name]) for name in names}

    return first_divergence(tensors_of(graph), compare, allowed)


def _run(session: Session, feeds: Feeds) -> Feeds:
    try:
        return session.run(feeds)
    finally:
        session.close()


def _sides(manifest: Manifest, backend: str, threads: int) -> tuple[Open, Open]:
    """The graph in ONNX Runtime, and compiled anew."""
    order = next(one for one in manifest.orders if one.runtime == backend and one.graph != "baseline")
    graph = manifest.artifact(order.graph)

    def compiled(model: Path) -> Session:
        artifact, _ = compile_order(model.parent, order, replace(graph, path=model.name), None)
        return open_artifact(model.parent, artifact, backend, threads)

    return (lambda model: find_backend(REFERENCE).open(model, threads, {})), compiled
