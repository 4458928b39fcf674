"""Model files side by side: their quality on a bundle's frozen samples, and their speed in turns on one thread."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import Call, Peer, Row, RunError, run_peer, say
from peers.batches import Batch, write_batches

from runtime.backends import Session, find_backend
from runtime.bundle.format import model_size, read_outputs, read_samples
from runtime.bundle.manifest import Manifest
from runtime.clock.turns import make_call, time_in_turns
from runtime.errors import RuntimeFailure
from runtime.measure.workload import make_feeds
from runtime.tasks.manifest import read_manifest
from runtime.tasks.metrics import METRICS
from runtime.tasks.predict import bundle_preprocessor, encoding_views, facts_of, run_samples

ONNXRUNTIME, OPENVINO = "onnxruntime-cpu", "openvino"
OPENVINO_FIXED = "openvino, fixed shape"
"""OpenVINO with the model reshaped to the batch that is timed: for speed only, the samples have other shapes."""
THREADS = 1
WARMUP = 5
BUDGET_S = 90.0
SEED = 0


@dataclass(frozen=True)
class Entry:
    """A model file in a backend."""

    model: str
    path: Path
    backend: str = ONNXRUNTIME


@dataclass(frozen=True)
class Timing:
    """What is timed, and how often."""

    batch_size: int
    rounds: int
    sequence_length: int | None = None


@dataclass(frozen=True)
class Judged:
    """A bundle opened for measuring: what its files are fed, and what their outputs are compared with."""

    root: Path
    manifest: Manifest
    columns: dict[str, Any]
    baseline: dict[str, np.ndarray]

    @property
    def float_model(self) -> Path:
        return self.root / self.manifest.artifact("baseline").path

    def model_for(self, backend: str) -> Path:
        """The bundle's compressed model."""
        return self.root / self.manifest.candidate_for(backend).path


def open_judged(root: Path) -> Judged:
    manifest = read_manifest(root)
    return Judged(root, manifest, read_samples(root, manifest), read_outputs(root, manifest))


def write_calibration(judged: Judged, recipe: Path, bench: Path, path: Path, sets: Sequence[str] = ()) -> None:
    """The recipe's own calibration samples as the model's inputs, one by one, so that no text is padded.

    `sets`: further settings of the recipe.
    """
    from compress.data import load_samples
    from compress.recipe.load import load_recipe

    loaded = load_recipe(recipe, [f"vars.bench={bench}", *sets])
    if loaded.data.calibration is None:
        raise RunError(f"{recipe}: has no data.calibration to give to the peers")
    inputs = judged.manifest.artifact("baseline").inputs
    names = tuple(spec.name for spec in inputs)
    images = judged.manifest.preprocess["kind"] == "image"
    samples = load_samples(loaded.data.calibration, loaded.root, loaded.model.task, names, loaded.seed, images=images)
    preprocessor = bundle_preprocessor(judged.root, judged.manifest, inputs)
    batches: list[Batch] = []
    for view in encoding_views(loaded.model.task, samples.columns):
        batches += [preprocessor.encode(view, np.array([row])) for row in range(samples.n)]
    write_batches(path, batches)


def run_model(judged: Judged, entry: Entry) -> dict[str, np.ndarray]:
    """The outputs of a model over the frozen samples, as its task reads them."""
    session = find_backend(entry.backend).open(entry.path, os.cpu_count() or 1, {})
    try:
        preprocessor = bundle_preprocessor(judged.root, judged.manifest, session.inputs)
        facts = facts_of(judged.manifest)
        return run_samples(session, preprocessor, judged.manifest.task, judged.columns, facts=facts)
    finally:
        session.close()


def quality(judged: Judged, entry: Entry, names: Sequence[str]) -> dict[str, float]:
    """The metrics `names` of a model over the frozen samples, by the arithmetic that wrote report.json."""
    outputs = run_model(judged, entry)
    labels = judged.columns.get("label")
    against = {"labels": labels, "baseline": judged.baseline}
    metrics = [METRICS[name].settle(judged.baseline, labels) for name in names]
    return {metric.name: metric.compute(outputs, against[metric.against]) for metric in metrics}


def feeds_for(judged: Judged, batch_size: int, sequence_length: int | None = None) -> list[Batch]:
    """Batches of the frozen samples for timing; texts brought to exactly `sequence_length` tokens."""
    preprocessor = bundle_preprocessor(judged.root, judged.manifest, judged.manifest.artifact("baseline").inputs)
    view = encoding_views(judged.manifest.task, judged.columns)[0]
    return make_feeds(preprocessor, view, batch_size, SEED, sequence_length)


def speedups(entries: Sequence[Entry], feeds: Sequence[Batch], rounds: int) -> list[float]:
    """How many times faster each entry is than the first: in each round the ratio to the first, of these the median.

    The files run in turns in this process. On an idle machine this is the ratio of the median times; when other work
    slows some rounds down, the ratio of medians may set a slowed call against one that was not (1.1 and 4.2 were seen
    where 2.6 is right), while a round's own ratio is nearly always of two calls under the same conditions.
    """
    with ExitStack() as stack:
        sessions = [_open(entry) for entry in entries]
        for session in sessions:
            stack.callback(session.close)
        calls = [make_call(session, feeds) for session in sessions]
        medians = time_in_turns(calls, rounds, seed=SEED, warmup=WARMUP, budget_s=BUDGET_S).medians  # [models, rounds]
    say(f"timed {len(entries)} models in {medians.shape[1]} rounds")
    return [float(ratio) for ratio in np.median(medians[0] / medians, axis=1)]


def _open(entry: Entry) -> Session:
    """OpenVINO compiles for the shapes of its calls where the row says so."""
    if entry.backend == OPENVINO_FIXED:
        return find_backend(OPENVINO).open(entry.path, THREADS, {"static": True})
    return find_backend(entry.backend).open(entry.path, THREADS, {})


def compare(
    judged: Judged, entries: Sequence[Entry], metrics: Sequence[str], timings: Mapping[str, Timing]
) -> list[Row]:
    """One row an entry: `metrics`, bytes, and for each of `timings` how many times faster than the first entry it is.

    An entry that does not run has a row that says so and is not timed; RunError if that is the first.
    """
    rows = [_describe(judged, entry, metrics, model_size(entries[0].path)) for entry in entries]
    if "failed" in rows[0]:
        raise RunError(f"{entries[0].path}: {rows[0]['failed']}")
    working = [i for i, row in enumerate(rows) if "failed" not in row]
    for name, timing in timings.items():
        feeds = feeds_for(judged, timing.batch_size, timing.sequence_length)
        ratios = speedups([entries[i] for i in working], feeds, timing.rounds)
        for i, ratio in zip(working, ratios, strict=True):
            rows[i][name] = ratio
    return rows


def _describe(judged: Judged, entry: Entry, metrics: Sequence[str], whole: int) -> Row:
    size = model_size(entry.path)
    row: Row = {"model": entry.model, "backend": entry.backend, "size_bytes": size, "size_ratio": whole / size}
    if entry.backend == OPENVINO_FIXED:
        return row
    say(f"judging {entry.model} in {entry.backend}")
    try:
        return row | quality(judged, entry, metrics)
    except RuntimeFailure as error:
        return row | {"failed": str(error)}


def find_row(rows: Sequence[Row], model: str, backend: str = ONNXRUNTIME) -> Row:
    """The row of a model in a backend."""
    return next(row for row in rows if (row["model"], row.get("backend")) == (model, backend))


def make_peer_models(
    peers: Sequence[Peer], judged: Judged, recipe: Path, call: Call, sets: Sequence[str] = ()
) -> tuple[dict[str, Path], list[Row]]:
    """({peer: its model file}, a row for each peer that failed): that a peer fails, fails no claim of ours."""
    batches = call.out / "calibration.npz"
    write_calibration(judged, recipe, call.bench, batches, sets)
    made: dict[str, Path] = {}
    failures: list[Row] = []
    for peer in peers:
        out = call.out / f"{peer.slug}.onnx"
        try:
            run_peer(peer, judged.float_model, *((batches,) if peer.calibrated else ()), out, folder=call.out)
        except RunError as error:
            say(f"{peer.name}: {error}")
            failures.append({"model": peer.name, "failed": str(error)})
        else:
            made[peer.name] = out
    return made, failures
