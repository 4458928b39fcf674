"""Inputs for timing, made of the bundle's own evaluation samples by its own preprocessing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from runtime.backends import Feeds
from runtime.bundle.columns import count
from runtime.encode.preprocess import Preprocessor
from runtime.errors import UsageError

MAX_FEEDS = 32
"""Different batches that a timing goes through in turn."""
MAX_FEED_BYTES = 128 << 20
"""Memory for them; one batch is always made."""
MOST_FEED_BYTES = 2**33
"""Of one batch."""


def make_feeds(
    preprocessor: Preprocessor, columns: Mapping[str, Any], batch_size: int, seed: int, sequence_length: int | None
) -> list[Feeds]:
    """Make up to MAX_FEEDS batches of `batch_size` samples, drawn in a seeded order, repeated where there are too few.

    UsageError, before it is made, for a batch of more than MOST_FEED_BYTES.
    """
    n_samples = count(columns)
    order = np.random.default_rng(seed).permutation(n_samples)
    single = preprocessor.encode(columns, order[:1]).values()
    sample = [values.itemsize * sequence_length if sequence_length else values.nbytes for values in single]
    n_bytes = batch_size * sum(sample)
    if n_bytes > MOST_FEED_BYTES:
        raise UsageError(
            f"benchmark: a batch of {batch_size} samples has about {n_bytes >> 20} MiB, more than "
            f"{MOST_FEED_BYTES >> 20}: give a smaller batch_size or throughput_batch_size"
        )
    feeds: list[Feeds] = []
    for index in range(min(MAX_FEEDS, -(-n_samples // batch_size))):
        rows = np.take(order, range(index * batch_size, (index + 1) * batch_size), mode="wrap")
        batch = preprocessor.encode(columns, rows)
        feeds.append(stretch(batch, sequence_length) if sequence_length else batch)
        if sum(values.nbytes for feed in feeds for values in feed.values()) > MAX_FEED_BYTES:
            break
    return feeds


def stretch(feeds: Feeds, sequence_length: int) -> Feeds:
    """Stretch text feeds [B, T] to [B, sequence_length]: each text's own tokens, repeated or cut, without padding.

    Raises UsageError for feeds that are no text.
    """
    if "input_ids" not in feeds:
        raise UsageError(
            f"benchmark.sequence_length fits texts only; the model's inputs are {', '.join(sorted(feeds))}"
        )
    ids = feeds["input_ids"]
    mask = feeds.get("attention_mask", np.ones_like(ids)).astype(bool)
    return {
        name: np.ones((len(ids), sequence_length), values.dtype)
        if name == "attention_mask"
        else np.stack([np.resize(row[keep], sequence_length) for row, keep in zip(values, mask, strict=True)])
        for name, values in feeds.items()
    }
