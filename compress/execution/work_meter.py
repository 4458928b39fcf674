"""How long something works, and the most memory that this process holds meanwhile."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import TracebackType

from compress.blocks.stream import peak_rss_mib, rss_mib
from compress.context import PassResult
from compress.work import Form


class WorkMeter:
    """A context; `seconds` it lasted, and `n_bytes` is the most memory, resident, that the process held in it.

    `n_bytes` is None where nothing says.

    The system's own peak counts where it rose meanwhile: it misses nothing. It never falls, and starting it anew would
    take it from others who ask for it; where it did not rise, the process is looked at every 20 ms.
    """

    def __init__(self) -> None:
        self.n_bytes: int | None = None
        self.seconds = 0.0
        self._seen = 0.0
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> WorkMeter:
        self._before, self._begun = peak_rss_mib(), time.monotonic()
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.seconds = time.monotonic() - self._begun
        self._ended.set()
        self._watch.join()
        after = peak_rss_mib()
        mib = after if after > self._before else max(self._seen, rss_mib())
        self.n_bytes = int(mib * 2**20) or None

    def add_to(self, result: PassResult[Form]) -> PassResult[Form]:
        """Return a pass's result with what its work took."""
        return replace(result, seconds=self.seconds, peak_memory_bytes=self.n_bytes)

    def _look(self) -> None:
        while not self._ended.wait(0.02):  # what is held for less is not seen
            self._seen = max(self._seen, rss_mib())
