"""A model over samples: batches, and the order they run in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.backends.base import Session
from runtime.bundle.columns import Array, Columns, count, take_texts
from runtime.bundle.manifest import Manifest
from runtime.bundle.tensors import TensorSpec
from runtime.decode.answers import score_answers
from runtime.decode.scoring import score
from runtime.encode.preprocess import Preprocessor, make_preprocessor, spec_from_dict, split_samples
from runtime.encode.texts import WINDOW, TextEncoder
from runtime.errors import BundleError, UsageError
from runtime.progress import Progress, no_progress
from runtime.tasks import find_task
from runtime.tasks.base import TEXT_COLUMNS, BatchFacts, Task
from runtime.tasks.sources import read_sources


def run_samples(
    session: Session,
    preprocessor: Preprocessor,
    task: str,
    columns: Columns,
    batch_size: int = 32,
    reference: Session | None = None,
    facts: BatchFacts | None = None,
    progress: Progress = no_progress,
) -> dict[str, Array]:
    """Return the model's outputs over all samples, in their order, as the task's `read_outputs` names them.

    `facts`: what is known of every batch, for tasks whose outputs cannot be read without (`facts_of`). `progress` is
    told how far a decoder is.

    Of a task that generates: what `runtime.decode.scoring.score` or `runtime.decode.answers.score_answers` gives, also
    beside a model `reference` where one is given. Texts run sorted by length, each distinct one once, so the result
    does not depend on the order of the samples. UsageError where samples, task and model do not fit.
    """
    found = find_task(task)
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}, below 1")
    views = encoding_views(task, columns)
    if found.encodes:
        return score_answers(session, preprocessor, views[0], batch_size, reference)
    if found.generates:
        return score(session, preprocessor, views[0], batch_size, reference, progress)
    if found.facts and preprocessor.spec.kind != found.preprocess:
        raise UsageError(f"{task} needs preprocess kind: {found.preprocess}, not {preprocessor.spec.kind}")
    facts = replace(facts or BatchFacts(), spec=preprocessor.spec)
    return found.join_views([_run_view(session, preprocessor, found, view, batch_size, facts) for view in views])


def facts_of(manifest: Manifest) -> BatchFacts:
    """Return what is known of every batch of a bundle's samples."""
    return BatchFacts(
        class_names=manifest.class_names, detections=manifest.detections, postprocess=manifest.postprocess
    )


def make_columns(manifest: Manifest, samples: Any) -> dict[str, Any]:
    """Return the samples that a user has in hand as columns: images where the model's input is made of them, else by
    the task; a folder of them, a .jsonl or an .npz as what is in it. UsageError where they do not fit it."""
    task = find_task(manifest.task)
    if isinstance(samples, str | Path):
        samples = samples if (named := read_sources(manifest, [samples])) is None else named
    if not task.columns and manifest.preprocess["kind"] == "image" and not isinstance(samples, Mapping):
        return {"image": samples}
    return task.to_columns(samples)


def encoding_views(task: str, columns: Columns) -> list[dict[str, Any]]:
    """Return the column sets that are encoded one by one, without labels. UsageError where they do not fit."""
    count(columns)
    return find_task(task).split_views(columns)


def bundle_preprocessor(root: Path, manifest: Manifest, inputs: tuple[TensorSpec, ...]) -> Preprocessor:
    """Return what feeds a model of the bundle in `root`.

    The tokenizer lies beside the candidate, whichever artifact runs. BundleError where an input has a type that numpy
    lacks.
    """
    for spec in inputs:
        try:
            np.dtype(spec.dtype)
        except TypeError as error:
            raise BundleError(f"{root}: the input '{spec.name}' is {spec.dtype}, which numpy does not have") from error
    folder = (root / manifest.artifact("candidate").path).parent
    vocab_size = manifest.generation.vocab_size if manifest.generation else None
    return make_preprocessor(spec_from_dict(manifest.preprocess), inputs, folder, vocab_size)


def _run_view(
    session: Session,
    preprocessor: Preprocessor,
    task: Task,
    columns: Columns,
    batch_size: int,
    facts: BatchFacts,
) -> dict[str, Array]:
    split = split_samples(preprocessor, columns)
    order, restore = _order_rows(preprocessor, split.columns)
    batches = [
        _run_batch(session, preprocessor, task, split.columns, rows, facts)
        for rows in split_batches(order, batch_size, session.inputs)
    ]
    # each output leaves its batches as it is joined: maps of thousands of images are held twice as it is
    outputs = {
        name: task.join_batches(name, [batch.pop(name) for batch in batches])[restore] for name in list(batches[0])
    }
    return task.join_rows(outputs, split, columns, facts)


def _order_rows(preprocessor: Preprocessor, columns: Columns) -> tuple[Array, Array | slice]:
    """Return (rows to run, position of every sample among them).

    Texts: longest first, equal ones once; others: as given.
    """
    if not isinstance(preprocessor, TextEncoder):
        n = count(columns)
        return np.arange(n), slice(n)  # no copy of all outputs
    texts = list(zip(*(take_texts(columns, name) for name in TEXT_COLUMNS if name in columns), strict=True))
    if not texts:
        raise UsageError(f"column 'text' is missing; the samples have: {', '.join(columns)}")
    samples = list(zip(texts, np.asarray(columns.get(WINDOW, np.zeros(len(texts), np.int64))).tolist(), strict=True))
    first = {sample: row for row, sample in reversed(list(enumerate(samples)))}
    ranked = sorted(first, key=lambda sample: (-sum(map(len, sample[0])), sample))
    position = {sample: i for i, sample in enumerate(ranked)}
    return np.array([first[sample] for sample in ranked]), np.array([position[sample] for sample in samples])


def split_batches(order: Array, batch_size: int, inputs: tuple[TensorSpec, ...]) -> Iterator[Array]:
    """Yield rows, batch by batch. A model with a fixed batch gets exactly that many: the last row is repeated."""
    fixed = {spec.shape[0] for spec in inputs if spec.shape and isinstance(spec.shape[0], int)}
    size = int(max(fixed)) if fixed else batch_size
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        missing = size - len(rows) if fixed else 0
        yield np.concatenate([rows, np.repeat(rows[-1:], missing)])


def _run_batch(
    session: Session,
    preprocessor: Preprocessor,
    task: Task,
    columns: Columns,
    rows: Array,
    facts: BatchFacts,
) -> dict[str, Array]:
    feeds, known = preprocessor.encode_with_facts(columns, rows, task.facts)
    return task.read_batch(session.run(feeds), replace(facts, n=len(rows), known=known))
