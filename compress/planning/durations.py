"""How long the stages of a run take: what each took here the last time for as much work, else an order of magnitude."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from compress.timing.kept import Kept

EITHER_WAY = 2.0
"""How many times longer or shorter work may take that was never seen here: the 20 shipped recipes that were timed on
two cores took 0.6 to 1.9 times what is guessed."""
ALIKE = 2.0
"""How many times more or less work may be for its time to be told by that of another run."""


@dataclass(frozen=True)
class Duration:
    """Seconds that something takes. `guessed_s`: the part of them that was never measured here, only guessed."""

    seconds: float
    guessed_s: float = 0.0

    @classmethod
    def guess(cls, seconds: float) -> Duration:
        """Return a duration of this order of magnitude."""
        return cls(seconds, seconds)

    @classmethod
    def add(cls, parts: Iterable[Duration]) -> Duration:
        """Return how long all of them take, one after the other."""
        found = list(parts)
        return cls(sum(part.seconds for part in found), sum(part.guessed_s for part in found))

    @property
    def least_s(self) -> float:
        return self.seconds - self.guessed_s + self.guessed_s / EITHER_WAY

    @property
    def most_s(self) -> float:
        return self.seconds - self.guessed_s + self.guessed_s * EITHER_WAY

    def to_record(self) -> dict[str, Any]:
        """Return it as JSON: {"seconds": 40.0, "between": [20.0, 80.0]}."""
        return {"seconds": self.seconds, "between": [self.least_s, self.most_s]}

    def __str__(self) -> str:
        """Say it: "41 s", or where it was never measured "5 to 20 min"."""
        unit, size = ("s", 1) if self.most_s < 120 else ("min", 60) if self.most_s < 7200 else ("h", 3600)
        low, high = _format(self.least_s / size), _format(self.most_s / size)
        return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


@dataclass(frozen=True)
class Durations:
    """What stages took on this machine. `kept`: where that is; `threads`, `device`: what they ran on."""

    kept: Kept = field(default_factory=Kept)
    threads: int = 1
    device: str = ""

    def find(self, stage: str, work: float, guess_s: float) -> Duration:
        """Return how long a stage will take for so much work, in a unit of its own; `guess_s` where none was alike."""
        alike = [(max(work, 1) / known, seconds) for known, seconds in self._read(stage)]
        near = [(factor, seconds) for factor, seconds in alike if 1 / ALIKE <= factor <= ALIKE]
        if not near:
            return Duration.guess(guess_s)
        factor, seconds = min(near, key=lambda pair: max(pair[0], 1 / pair[0]))
        return Duration(seconds * factor)

    def keep(self, stage: str, work: float, seconds: float) -> None:
        """Keep what a stage took, in place of what it took before for as much work."""
        work = max(work, 1)
        others = [pair for pair in self._read(stage) if not 0.95 <= pair[0] / work <= 1.05]
        pairs = [[work, round(seconds, 3)], *others][:8]  # the last sizes of work
        self.kept.write("stage", self._key(stage), {"took": pairs})

    def _read(self, stage: str) -> list[tuple[float, float]]:
        """Return (work, seconds) of the runs that are kept, the last one first."""
        record = self.kept.read("stage", self._key(stage)) or {"took": []}
        return [(work, seconds) for work, seconds in record["took"]]

    def _key(self, stage: str) -> list[object]:
        return [stage, self.threads, self.device]


def _format(number: float) -> str:
    """Write a number of units: one digit behind the point where it has but one before it."""
    return f"{number:.1f}".removesuffix(".0") if 0.1 <= number < 3 else f"{number:.0f}"
