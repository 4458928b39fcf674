"""Is an exported decoder the model? A real prompt is read in one call, then token by token, and compared with torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from compress.blocks.trace import run
from compress.errors import ExportError
from compress.export.parity import TOLERANCE, relative_difference
from compress.graph.run import Feeds, open_session
from compress.graph.specs import n_cached_layers, past_name, present_name
from compress.models.load import LoadedModel

DECODED = 4
"""Tokens of each prompt that are read one at a time."""


def check_decoder_parity(loaded: LoadedModel, model: ir.Model, batches: Sequence[Feeds]) -> float:
    """Return the largest difference of any logits, relative to the largest logit. ExportError beyond the tolerance.

    `batches`: feeds of one text each, with empty caches.
    """
    assert loaded.module is not None
    session = open_session(model)
    worst = 0.0
    for feeds in batches:
        tensors = {name: torch.from_numpy(feeds[name]) for name in loaded.input_names}
        expected = next(iter(run(loaded.module, tensors).values())).numpy()  # [1, t, vocab]
        got = np.concatenate(list(_run_by_pieces(session, n_cached_layers(model), feeds)), axis=1)
        worst = max(worst, relative_difference(expected, got))
    if worst > TOLERANCE:
        raise ExportError(
            f"parity: the logits of torch and of ONNX with its key-value cache differ by {worst:.2e} of the largest "
            f"(allowed {TOLERANCE:.0e})"
        )
    return worst


def _run_by_pieces(session: Any, n_layers: int, feeds: Mapping[str, np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the logits [1, n, vocab] of the prompt's first part, then of each of its last tokens."""
    names = [(past_name(i, kind), present_name(i, kind)) for i in range(n_layers) for kind in ("key", "value")]
    ids = feeds["input_ids"]
    length = ids.shape[1]
    cache = {past: feeds[past] for past, _ in names}
    start = max(length - DECODED, 1)
    for low, high in [(0, start), *((t, t + 1) for t in range(start, length))]:
        inputs = {"input_ids": ids[:, low:high], "attention_mask": np.ones((1, high), np.int64), **cache}
        logits, *present = session.run(["logits", *(present for _, present in names)], inputs)
        cache = {past: values for (past, _), values in zip(names, present, strict=True)}
        yield logits
