"""A decoder's graph run token by token; keys and values stay where the backend computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from runtime.backends import Feeds, Resident, Session
from runtime.backends.onnxruntime_cpu import OnnxRuntimeSession
from runtime.bundle.columns import Array
from runtime.bundle.manifest import KvCache
from runtime.decode.kv_engine import ResidentKeys
from runtime.decode.kv_onnxruntime import BoundKeys
from runtime.encode.language import positions
from runtime.errors import BundleError, UsageError


class Keys(Protocol):
    """The keys and values of one batch between the calls that read it."""

    def begin(self, n_rows: int, capacity: int) -> None:
        """Begin a batch with nothing read yet, and room for `capacity` tokens a row. UsageError where there is less."""
        ...

    def call(self, feeds: Feeds) -> Array:
        """Run one call on all inputs but the past, C-contiguous; return logits [n, t, vocab], kept until the next."""
        ...


class Decoder:
    """One batch of texts at a time: `start` reads the prompts, `step` one further token of each.

    Both give the logits of the next token, float32 [n, vocab]. BundleError for a graph that does not have the cache
    that `cache` describes, or that fails; UsageError for a backend that keeps none, or a text that outgrows its buffer.
    """

    def __init__(self, session: Session, cache: KvCache | None) -> None:
        if not isinstance(session, (OnnxRuntimeSession, Resident)):
            raise UsageError("text is not generated on this backend: it keeps no cache between calls")
        if cache is None:
            raise BundleError(f"{session.path}: its manifest describes no key-value cache; build the bundle again")
        self.cache = cache
        self._inputs = {spec.name: spec for spec in session.inputs}
        wanted = {"input_ids", "attention_mask", "logits"} | {name for pair in cache.pairs() for name in pair}
        missing = sorted(wanted - self._inputs.keys() - {spec.name for spec in session.outputs})
        if missing:
            raise BundleError(f"{session.path}: the graph has no {missing[0]}, which its cache in the manifest names")
        self.keys = _make_keys(session, cache)

    @property
    def n_tokens(self) -> int:
        """Return how many columns the cache holds so far, padding included."""
        return self._total

    def start(self, prompts: Sequence[Array], capacity: int) -> Array:
        """Read prompts, int64 [t] each, into a new cache with room for `capacity` tokens a row."""
        lengths = np.array([len(prompt) for prompt in prompts])
        self._total = width = int(lengths.max())
        self._lengths, self._capacity = lengths, capacity
        self._check_room(width)
        ids = np.zeros((len(prompts), width), np.int64)
        self._mask = np.zeros((len(prompts), capacity), np.int64)
        for row, prompt in enumerate(prompts):
            span = slice(0, len(prompt)) if self.cache.shared_buffer else slice(width - len(prompt), width)
            ids[row, span] = prompt
            self._mask[row, span] = 1
        if not self.cache.shared_buffer:
            self._mask[:, width:] = 1
        self.keys.begin(len(prompts), capacity)
        logits = self._run(ids, positions(self._mask[:, :width]))
        last = lengths - 1 if self.cache.shared_buffer else np.full(len(prompts), width - 1)
        result: Array = logits[np.arange(len(prompts)), last].astype(np.float32)
        return result

    def step(self, tokens: Array) -> Array:
        """Read one more token of every text, int64 [n]."""
        self._check_room(self._total + 1)
        self._total += 1
        self._lengths = self._lengths + 1
        if self.cache.shared_buffer:
            self._mask[np.arange(len(tokens)), self._lengths - 1] = 1
        result: Array = self._run(tokens[:, None], self._lengths[:, None] - 1)[:, -1].astype(np.float32)
        return result

    def _check_room(self, n_tokens: int) -> None:
        if n_tokens > self._capacity:
            raise UsageError(f"{n_tokens} tokens do not fit into a cache made for {self._capacity}")

    def _run(self, ids: Array, position_ids: Array) -> Array:
        """Run one call on ids [n, t]; return the logits [n, t, vocab]."""
        feeds = {"input_ids": ids, "attention_mask": self._mask[:, : self._total], "position_ids": position_ids}
        given = feeds.keys() & self._inputs.keys()
        return self.keys.call({name: np.ascontiguousarray(feeds[name], self._inputs[name].dtype) for name in given})


def _make_keys(session: OnnxRuntimeSession | Resident, cache: KvCache) -> Keys:
    if isinstance(session, OnnxRuntimeSession):
        return BoundKeys(session, cache)
    return ResidentKeys(session, cache)
