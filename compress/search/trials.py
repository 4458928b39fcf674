"""Records of trials: what was tried, what came of it. They are the only memory of a study."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from compress.errors import OutputError
from compress.recipe.points import Point
from runtime.bundle.files import write_whole
from runtime.bundle.records import Mismatch, from_json, to_json

State = Literal["judged", "refused", "failed"]
UNKNOWN = 1e3
"""How far a gate is missed by what could not be measured, or was refused."""


@dataclass(frozen=True)
class GoalValue:
    """What a trial reached of one goal.

    `value`: the candidate's. `ratio`: how many times better than the float model's; None where the metric is no time,
    size or memory. `low`, `high`: ends of the interval of the ratio, or else of the value; None where there is none.
    """

    value: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def compared(self) -> float:
        """Return the number by which trials are compared."""
        return self.value if self.ratio is None else self.ratio

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the ends of the interval of what is compared; None where there is none."""
        return None if self.low is None or self.high is None else (self.low, self.high)


@dataclass(frozen=True)
class GateMiss:
    """What a gate says of a trial. `short`: how far the value is from its bound, in parts of the bound; 0: it keeps it.

    `miss`: the same of the interval's worse end, of a gate that does not hold.
    """

    metric: str
    rule: str
    verdict: str
    holds: bool
    why: str
    miss: float = 0.0
    short: float = 0.0


@dataclass(frozen=True)
class Run:
    """One try of a point: in full where `share` is 1, and else with that part of training and samples.

    `reason`: why it was refused before any work, or failed; of one that was judged why it is slow, where that was
    asked. `seconds`: of building and judging, `stages`: of each part of them. `host`: where the
    bundle was built; `judged_on`: where its times were taken. `reused`: work that was in the cache already.
    `foreseen`: what the plan said: weights_ratio, seconds, memory_bytes.
    """

    rung: int
    share: float
    state: State
    reason: str = ""
    verdict: str = ""
    goals: dict[str, GoalValue] = field(default_factory=dict)
    gates: tuple[GateMiss, ...] = ()
    seconds: float = 0.0
    host: str = ""
    judged_on: str = ""
    reused: tuple[str, ...] = ()
    foreseen: dict[str, float] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Return whether the run is in full and every gate holds."""
        return self.state == "judged" and self.share == 1 and self.verdict == "pass"


@dataclass(frozen=True)
class Trial:
    """A point, its runs from the cheapest on, and the `batch` of points that were chosen together with it."""

    number: int
    batch: int
    point: dict[str, Any]
    runs: tuple[Run, ...] = ()

    @property
    def last(self) -> Run | None:
        return self.runs[-1] if self.runs else None

    @property
    def full(self) -> Run | None:
        """Return the run in full that was judged; None where there is none."""
        return next((run for run in self.runs if run.share == 1 and run.state == "judged"), None)

    @property
    def holds(self) -> bool:
        return self.full is not None and self.full.holds

    @property
    def is_refused(self) -> bool:
        """Return whether it cost no work."""
        return any(run.state == "refused" for run in self.runs)

    def run_at(self, rung: int) -> Run | None:
        return next((run for run in self.runs if run.rung == rung), None)

    def add(self, run: Run) -> Trial:
        return replace(self, runs=(*self.runs, run))


def same_point(point: Point) -> str:
    """Return a text that is the same for points that are."""
    return json.dumps(dict(point), sort_keys=True)


def write_trial(folder: Path, trial: Trial) -> None:
    """Write the record of one trial, whole or not at all."""
    write_json(folder / f"{trial.number:04d}.json", to_json(trial))


def read_trials(folder: Path) -> list[Trial]:
    """Read all records, by number. Raises OutputError for one that is not as it was written."""
    return [_read_trial(path) for path in sorted(folder.glob("[0-9]*.json"))]


def _read_trial(path: Path) -> Trial:
    try:
        return from_json(Trial, json.loads(path.read_bytes()), path.name)
    except (OSError, Mismatch, ValueError) as error:
        raise OutputError(f"{path}: not the record of a trial: {error}; remove it to try its point again") from error


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    write_whole(path, (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode())
