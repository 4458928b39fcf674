"""A model over samples: batches, the order they run in, and what the outputs of each task are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.backends.base import Feeds, Session
from runtime.bundle.columns import Array, Columns, count, take_texts
from runtime.bundle.manifest import GENERATION, TASKS, Manifest
from runtime.bundle.tensors import TensorSpec
from runtime.decode.scoring import score
from runtime.encode.preprocess import Preprocessor, TextPreprocess, make_preprocessor, pool, spec_from_dict
from runtime.encode.texts import TextEncoder
from runtime.errors import BundleError, UsageError

TEXT_COLUMNS = ("text", "text_pair")


def run_samples(
    session: Session,
    preprocessor: Preprocessor,
    task: str,
    columns: Columns,
    batch_size: int = 32,
    reference: Session | None = None,
) -> dict[str, Array]:
    """Return the model's outputs over all samples, in their order.

    image- and text-classification: {"logits": float32 [N, C]}; feature-extraction: {"embeddings": float32 [N, k, D]}
    for k text columns, pooled and normalised; generic: {output name: [N, ...]}; text-generation: the sums of
    `runtime.decode.scoring.score`, those beside a model `reference` among them where one is given. Texts run sorted by
    length, each distinct one once, so the result does not depend on the order of the samples. UsageError where samples,
    task and model do not fit.
    """
    if task not in TASKS:
        raise UsageError(f"unknown task '{task}'; known: {', '.join(TASKS)}")
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}, below 1")
    if task in GENERATION:
        return score(session, preprocessor, encoding_views(task, columns)[0], batch_size, reference)
    views = [_run_view(session, preprocessor, task, view, batch_size) for view in encoding_views(task, columns)]
    if task == "feature-extraction":
        return {"embeddings": np.stack([view["embeddings"] for view in views], axis=1)}  # [N, k, D]
    return views[0]


def encoding_views(task: str, columns: Columns) -> list[dict[str, Any]]:
    """Return the column sets that are encoded one by one, without labels.

    feature-extraction reads "text" and "text_pair" apart.
    """
    count(columns)
    if task != "feature-extraction":
        return [{name: column for name, column in columns.items() if name != "label"}]
    if "text" not in columns:
        raise UsageError(f"feature-extraction reads the column 'text'; the samples have: {', '.join(columns)}")
    return [{"text": columns[name]} for name in TEXT_COLUMNS if name in columns]


def bundle_preprocessor(root: Path, manifest: Manifest, inputs: tuple[TensorSpec, ...]) -> Preprocessor:
    """Return what feeds a model of the bundle in `root`.

    The tokenizer lies beside the candidate, whichever artifact runs.
    """
    folder = (root / manifest.artifact("candidate").path).parent
    vocab_size = manifest.generation.vocab_size if manifest.generation else None
    return make_preprocessor(spec_from_dict(manifest.preprocess), inputs, folder, vocab_size)


def classify(logits: Array, class_names: Sequence[str]) -> list[dict[str, Any]]:
    """Return for each row of [N, C] {"label": class name (its number if it has none), "score": softmax probability}."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    scores = shifted / shifted.sum(axis=1, keepdims=True)  # [N, C]
    best = logits.argmax(axis=1)
    return [
        {"label": class_names[c] if c < len(class_names) else int(c), "score": float(s[c])}
        for c, s in zip(best, scores, strict=True)
    ]


def _run_view(
    session: Session, preprocessor: Preprocessor, task: str, columns: Columns, batch_size: int
) -> dict[str, Array]:
    order, restore = _order_rows(preprocessor, columns)
    batches = [
        _run_batch(session, preprocessor, task, columns, rows)
        for rows in _split_batches(order, batch_size, session.inputs)
    ]
    return {name: _join_batches(name, [batch[name] for batch in batches])[restore] for name in batches[0]}


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


def _run_batch(session: Session, preprocessor: Preprocessor, task: str, columns: Columns, rows: Array) -> Feeds:
    if task != "feature-extraction":
        return task_outputs(session.run(preprocessor.encode(columns, rows)), task, len(rows))
    if not isinstance(preprocessor, TextEncoder):
        raise UsageError(f"feature-extraction needs preprocess kind: text, not {preprocessor.spec.kind}")
    tokens = preprocessor.tokenize(columns, rows)
    outputs = session.run(preprocessor.feeds(tokens))
    return {"embeddings": pool_outputs(outputs, tokens["attention_mask"], preprocessor.spec)}


def task_outputs(outputs: Feeds, task: str, n: int) -> Feeds:
    """Return what a model gave for `n` samples, by the task's own names: logits of a classifier, else as they are."""
    return {"logits": _find_logits(outputs)} if task.endswith("classification") else _check_per_sample(outputs, n)


def pool_outputs(outputs: Feeds, mask: Array, spec: TextPreprocess) -> Array:
    """Pool outputs to [B, D], one embedding for each text. `mask` [B, T], 1 at tokens."""
    return pool(_find_hidden(outputs, spec.pooling), mask, spec)


def _find_logits(outputs: Feeds) -> Array:
    """Return the output called logits, else the only one of shape [B, C]."""
    candidates = [outputs["logits"]] if "logits" in outputs else [o for o in outputs.values() if o.ndim == 2]
    if len(candidates) != 1 or candidates[0].ndim != 2:
        raise BundleError(
            f"a classifier has one output [batch, classes]; this model: {_format_shapes(outputs)}; "
            "call that output 'logits'"
        )
    return candidates[0].astype(np.float32, copy=False)


def _find_hidden(outputs: Feeds, pooling: str) -> Array:
    """Return the output to pool: the first of [B, T, D], or with pooling none the first of [B, D]."""
    shape = "[B, D]" if pooling == "none" else "[B, T, D]"
    candidates = [o for o in outputs.values() if o.ndim == shape.count(",") + 1]
    if not candidates:
        raise BundleError(f"pooling: {pooling} needs an output {shape}; this model has {_format_shapes(outputs)}")
    return candidates[0]


def _check_per_sample(outputs: Feeds, n: int) -> Feeds:
    for name, output in outputs.items():
        if not output.ndim or len(output) != n:
            raise BundleError(
                f"output '{name}' has shape {output.shape} for a batch of {n}: it is not one value for each sample"
            )
    return outputs


def _join_batches(name: str, parts: list[Array]) -> Array:
    if len({part.shape[1:] for part in parts}) > 1:
        raise UsageError(
            f"output '{name}' differs in shape from batch to batch ({', '.join(str(p.shape) for p in parts[:3])}): "
            "use padding: max_length, or samples of one shape"
        )
    return np.concatenate(parts)


def _format_shapes(outputs: Feeds) -> str:
    return ", ".join(f"{name} {output.shape}" for name, output in outputs.items())
