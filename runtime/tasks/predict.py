"""A model over samples: batches, and the order they run in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.backends.base import Session
from runtime.bundle.columns import Array, Columns, count, take_texts
from runtime.bundle.manifest import Manifest
from runtime.bundle.tensors import TensorSpec
from runtime.decode.answers import score_answers
from runtime.decode.scoring import score
from runtime.encode.preprocess import Preprocessor, make_preprocessor, spec_from_dict
from runtime.encode.texts import TextEncoder
from runtime.errors import UsageError
from runtime.tasks import find_task
from runtime.tasks.base import TEXT_COLUMNS, BatchFacts, Task


def run_samples(
    session: Session,
    preprocessor: Preprocessor,
    task: str,
    columns: Columns,
    batch_size: int = 32,
    reference: Session | None = None,
    class_names: Sequence[str] = (),
) -> dict[str, Array]:
    """Return the model's outputs over all samples, in their order, as the task's `read_outputs` names them.

    `class_names`: the model's, for a task whose outputs cannot be read without.

    Of a task that generates: what `runtime.decode.scoring.score` or `runtime.decode.answers.score_answers` gives, also
    beside a model `reference` where one is given. Texts run sorted by length, each distinct one once, so the result
    does not depend on the order of the samples. UsageError where samples, task and model do not fit.
    """
    found = find_task(task)
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}, below 1")
    views = encoding_views(task, columns)
    if found.generates:
        score_samples = score_answers if found.encodes else score
        return score_samples(session, preprocessor, views[0], batch_size, reference)
    if found.facts and found.reads_texts and not isinstance(preprocessor, TextEncoder):
        raise UsageError(f"{task} needs preprocess kind: {found.preprocess}, not {preprocessor.spec.kind}")
    return found.join_views([_run_view(session, preprocessor, found, view, batch_size, class_names) for view in views])


def encoding_views(task: str, columns: Columns) -> list[dict[str, Any]]:
    """Return the column sets that are encoded one by one, without labels. UsageError where they do not fit."""
    count(columns)
    return find_task(task).split_views(columns)


def bundle_preprocessor(root: Path, manifest: Manifest, inputs: tuple[TensorSpec, ...]) -> Preprocessor:
    """Return what feeds a model of the bundle in `root`.

    The tokenizer lies beside the candidate, whichever artifact runs.
    """
    folder = (root / manifest.artifact("candidate").path).parent
    vocab_size = manifest.generation.vocab_size if manifest.generation else None
    return make_preprocessor(spec_from_dict(manifest.preprocess), inputs, folder, vocab_size)


def _run_view(
    session: Session,
    preprocessor: Preprocessor,
    task: Task,
    columns: Columns,
    batch_size: int,
    class_names: Sequence[str],
) -> dict[str, Array]:
    order, restore = _order_rows(preprocessor, columns)
    batches = [
        _run_batch(session, preprocessor, task, columns, rows, class_names)
        for rows in _split_batches(order, batch_size, session.inputs)
    ]
    return {name: task.join_batches(name, [batch[name] for batch in batches])[restore] for name in batches[0]}


def _order_rows(preprocessor: Preprocessor, columns: Columns) -> tuple[Array, Array]:
    """Return (rows to run, position of every sample among them).

    Texts: longest first, equal ones once; others: as given.
    """
    if not isinstance(preprocessor, TextEncoder):
        rows = np.arange(count(columns))
        return rows, rows
    samples = list(zip(*(take_texts(columns, name) for name in TEXT_COLUMNS if name in columns), strict=True))
    if not samples:
        raise UsageError(f"column 'text' is missing; the samples have: {', '.join(columns)}")
    first = {sample: row for row, sample in reversed(list(enumerate(samples)))}
    ranked = sorted(first, key=lambda sample: (-sum(map(len, sample)), sample))
    position = {sample: i for i, sample in enumerate(ranked)}
    return np.array([first[sample] for sample in ranked]), np.array([position[sample] for sample in samples])


def _split_batches(order: Array, batch_size: int, inputs: tuple[TensorSpec, ...]) -> Iterator[Array]:
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
    class_names: Sequence[str],
) -> dict[str, Array]:
    feeds, known = preprocessor.encode_with_facts(columns, rows, task.facts)
    return task.read_batch(session.run(feeds), BatchFacts(len(rows), known, preprocessor.spec, class_names))
