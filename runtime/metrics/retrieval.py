"""Pairs found again: each image's text among all texts, and each text's image among all images.

Similarity is the product of the embeddings. Of equal similarities the pair's own comes last, so that a model whose
embeddings collapse finds nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from runtime.metrics.base import FRACTION, Columns, Flaws, Metric, Outputs, remember

DEPTHS = (1, 5, 10)
ROWS = 1024
"""Queries whose similarities are held at once."""
SIDES = {"text": ("image_embeds", "text_embeds"), "image": ("text_embeds", "image_embeds")}
"""What is found -> (embeddings of queries, embeddings of what is searched)."""


def rank_own(queries: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Count for each query [N, D] the others that are at least as similar as its own, int64 [N]; 0: found first."""
    queries, others = queries.astype(np.float64), others.astype(np.float64)
    ranks = []
    for start in range(0, len(queries), ROWS):
        similar = queries[start : start + ROWS] @ others.T
        own = similar[np.arange(len(similar)), start + np.arange(len(similar))]
        ranks.append((similar >= own[:, None]).sum(axis=1) - 1)
    return np.concatenate(ranks)


@remember
def _rank_side(outputs: Outputs, side: str) -> np.ndarray:
    """Return the rank of each pair's own `side`, int64 [N]: once for all depths, for it takes time squared in N."""
    return rank_own(*(outputs[name] for name in SIDES[side]))


def _mark_hits(side: str, depth: int, outputs: Outputs, _: Any) -> Columns:
    """Return 1.0 where a pair's own `side` is among the first `depth`, float64 [N]."""
    return ((_rank_side(outputs, side) < depth).astype(np.float64),)


def _discount_ranks(side: str, depth: int, outputs: Outputs, _: Any) -> Columns:
    """Return each pair's discounted gain, 1 / log2(rank + 2) among the first `depth`, else 0: float64 [N]."""
    ranks = _rank_side(outputs, side)
    return (np.where(ranks < depth, 1 / np.log2(ranks + 2), 0.0),)


def _find_misfit(depth: int, outputs: Outputs, _: Any) -> str | None:
    n = len(outputs["image_embeds"])
    return None if n > depth else f"is always 1 with {n} pairs to choose from"


def _make_recall(side: str, depth: int) -> Metric:
    query = "image" if side == "text" else "text"
    return Metric(
        name=f"{side}_recall_at_{depth}",
        against="texts",
        **FRACTION,
        fits=("embedding pairs",),
        about=f"fraction of {query}s whose own {side} is among the {depth} most similar of all {side}s",
        reduce=partial(_mark_hits, side, depth),
        misfit=partial(_find_misfit, depth),
        kind="proportion",
    )


def _make_ndcg(side: str, depth: int) -> Metric:
    query = "image" if side == "text" else "text"
    return Metric(
        name=f"{side}_ndcg_at_{depth}",
        against="texts",
        **FRACTION,
        fits=("embedding pairs",),
        about=f"normalised discounted gain of each {query}'s own {side} among the {depth} most similar",
        reduce=partial(_discount_ranks, side, depth),
        misfit=partial(_find_misfit, 1),
        flaws=Flaws(of=lambda columns: columns[0] < 1, reach=lambda columns: 1.0),
    )


RETRIEVAL = (
    *(_make_recall(side, depth) for side in SIDES for depth in DEPTHS),
    *(_make_ndcg(side, 10) for side in SIDES),
)
