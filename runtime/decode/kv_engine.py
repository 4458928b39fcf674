"""A decoder's cache in an engine's device memory: what a call gives as present, the next reads as past."""

from __future__ import annotations

from runtime.backends import Feeds, Resident
from runtime.bundle.columns import Array
from runtime.bundle.manifest import KvCache
from runtime.errors import UsageError


class ResidentKeys:
    """`runtime.decode.kv_cache.Keys` of a session that leaves tensors on its device."""

    def __init__(self, session: Resident, cache: KvCache) -> None:
        self._session, self._cache = session, cache

    def begin(self, n_rows: int, capacity: int) -> None:
        """Begin a batch with nothing read yet. UsageError where the engine takes less than `capacity`."""
        past = self._cache.pairs()[0][0]
        most = self._session.largest(past)[2] + 1  # the past that the last token reads is one shorter
        if capacity > most:
            raise UsageError(f"{capacity} tokens do not fit into the engine's profiles, which take {most}")
        self._session.keeper = self
        self._rows, self._read = n_rows, 0

    def call(self, feeds: Feeds) -> Array:
        """Run one call; return logits [n, t, vocab]. UsageError where no profile takes the shapes, RuntimeFailure."""
        if self._session.keeper is not self:
            raise UsageError(
                "another text has been begun in this session, whose keys are there now; open the bundle twice"
            )
        shape = (self._rows, self._cache.n_heads, self._read, self._cache.head_size)
        pairs = self._cache.pairs()
        logits = self._session.resume(feeds, {past: shape for past, _ in pairs}, ["logits"])["logits"]
        for past, present in pairs:
            self._session.exchange(past, present)
        self._read += feeds["input_ids"].shape[1]
        return logits
