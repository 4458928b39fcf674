"""Observing a graph's tensors over the calibration data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import onnx_ir as ir

from compress.graph.run import TAPPED, Feeds, open_session, run_batches, tap
from compress.quantize.observers import Observer

Progress = Callable[[Iterable[Feeds], str], Iterable[Feeds]]


def observe(
    model: ir.Model, axes: Mapping[str, int | None], batches: Iterable[Feeds], threads: int = 0
) -> dict[str, Observer]:
    """Run `batches` and watch the tensors named in `axes` (name -> channel axis, None: no channel statistics).

    Returns one Observer for each. Raises ValueError, naming the tensor, when one holds NaN or Inf, or when there is no
    batch.
    """
    seen = {name: Observer(axis) for name, axis in axes.items()}
    if not seen:
        return {}
    session = open_session(tap(model, list(axes)), threads)
    n_batches = 0
    for outputs in run_batches(session, batches):
        n_batches += 1
        for name, values in outputs.items():
            name = name.removesuffix(TAPPED)
            try:
                seen[name].update(values)
            except ValueError as error:
                raise ValueError(f"tensor {name!r}: {error} on calibration batch {n_batches}") from error
    if n_batches == 0:
        raise ValueError("there is no calibration data")
    return seen


def collect_rows(
    model: ir.Model, names: Iterable[str], batches: Iterable[Feeds], n_rows: int, seed: int, threads: int = 0
) -> dict[str, np.ndarray]:
    """Return at most `n_rows` random rows [n, channels] of each tensor, channels last, spread over all batches."""
    rng = np.random.default_rng(seed)
    kept: dict[str, list[np.ndarray]] = {name: [] for name in names}
    batches = list(batches)
    if not kept or not batches:
        return {}
    share = -(-n_rows // len(batches))
    session = open_session(tap(model, list(kept)), threads)
    for outputs in run_batches(session, batches):
        for name, values in outputs.items():
            rows = values.reshape(-1, values.shape[-1])
            chosen = rng.choice(len(rows), min(share, len(rows)), replace=False)
            kept[name.removesuffix(TAPPED)].append(rows[chosen])
    rows_of = {name: np.concatenate(parts) for name, parts in kept.items()}
    return {name: rows[rng.permutation(len(rows))[:n_rows]] for name, rows in rows_of.items()}
