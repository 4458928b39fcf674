"""Texts, each to one embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.bundle.columns import Array, Columns
from runtime.bundle.tensors import TensorSpec
from runtime.encode.texts import TextPreprocess, pool
from runtime.errors import BundleError, UsageError
from runtime.tasks.base import MASK, TEXT, TEXT_COLUMNS, BatchFacts, ReadsTexts, Tensors, describe_shapes, rename


class FeatureExtraction(ReadsTexts):
    """Give one embedding for each text. Outputs: {"embeddings": float32 [N, k, D]} of k text columns, read apart."""

    name = "feature-extraction"
    about = "an embedding for each text, pooled over its tokens"
    outputs = "embeddings"
    always = ("embeddings",)
    facts = (MASK,)

    def split_views(self, columns: Columns) -> list[dict[str, Any]]:
        """Return the columns "text" and "text_pair" apart. UsageError without the first."""
        if TEXT not in columns:
            raise UsageError(f"{self.name} reads the column '{TEXT}'; the samples have: {', '.join(columns)}")
        return [{TEXT: columns[name]} for name in TEXT_COLUMNS if name in columns]

    def read_outputs(self, outputs: Tensors, batch: BatchFacts) -> dict[str, Array]:
        """Return {"embeddings": float32 [n, 1, D]}, pooled and normalised as the spec says. BundleError, UsageError."""
        spec = batch.spec
        assert isinstance(spec, TextPreprocess)  # or it is refused before
        return {"embeddings": pool(_find_hidden(outputs, spec.pooling), batch.known[MASK], spec)[:, None]}

    def join_views(self, views: Sequence[dict[str, Array]]) -> dict[str, Array]:
        """Return the embeddings of all views, side by side: [N, k, D]."""
        return {"embeddings": np.concatenate([view["embeddings"] for view in views], axis=1)}

    def answers(self, outputs: Tensors, class_names: Sequence[str]) -> dict[str, Array]:
        """Return embedding float32 [n, D], of the first text."""
        return {"embedding": outputs["embeddings"][:, 0].astype(np.float32, copy=False)}

    def answer_specs(self, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the spec of the embedding."""
        return (rename(outputs[0], "embedding", "float32", outputs[0].shape[-1]),)


def _find_hidden(outputs: Tensors, pooling: str) -> Array:
    """Return the output to pool: the first of [B, T, D], or with pooling none the first of [B, D]."""
    shape = "[B, D]" if pooling == "none" else "[B, T, D]"
    candidates = [o for o in outputs.values() if o.ndim == shape.count(",") + 1]
    if not candidates:
        raise BundleError(f"pooling: {pooling} needs an output {shape}; this model has {describe_shapes(outputs)}")
    return candidates[0]
