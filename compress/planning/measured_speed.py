"""What a plan measures of models that are made like the recipe's: their speed, and what making them took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LatencyForecast:
    """Milliseconds of a call (of a decoder: of a further token) before and after, on `backend`.

    `parts`: what the second does not hold, in words. `in_float`: layers that a pass puts into eight bits and that are
    computed in float because they are faster so. `others`: what else was timed, where the recipe gains little: in words
    -> milliseconds. `export_s`: seconds that making the float graph took; `held_bytes`: what the process held at most
    by then. They foretell the run, which does the same.
    """

    metric: str
    backend: str
    float_ms: float
    compressed_ms: float
    parts: tuple[str, ...] = ()
    in_float: tuple[str, ...] = ()
    others: Mapping[str, float] = field(default_factory=dict)
    export_s: float = 0.0
    held_bytes: int = 0

    @property
    def speedup(self) -> float:
        return self.float_ms / self.compressed_ms
