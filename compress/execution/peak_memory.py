"""The most memory that this process holds while something works."""

from __future__ import annotations

import threading
from types import TracebackType

from compress.blocks.stream import peak_rss_mib, rss_mib

PAUSE_S = 0.02


class PeakMemory:
    """A context; `n_bytes` is the most memory, resident, that the process held in it. None where nothing says.

    The system's own peak counts where it rose meanwhile: it misses nothing. It never falls, and starting it anew would
    take it from others who ask for it; where it did not rise, the process is looked at every 20 ms.
    """

    def __init__(self) -> None:
        self.n_bytes: int | None = None
        self._seen = 0.0
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._before = peak_rss_mib()
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._watch.join()
        after = peak_rss_mib()
        mib = after if after > self._before else max(self._seen, rss_mib())
        self.n_bytes = int(mib * 2**20) or None

    def _look(self) -> None:
        while not self._ended.wait(PAUSE_S):
            self._seen = max(self._seen, rss_mib())
