"""Hold the differences of one judged bundle from another, each with its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from runtime.stats import Estimate

Verdict = Literal["better", "worse", "within noise", "not known"]


@dataclass(frozen=True)
class Difference:
    """One metric of two candidates. `change` is after minus before or, of speed, how many times as fast after is.

    The values of speed are each candidate's speed-up over its own baseline.
    """

    metric: str
    unit: str
    higher_is_better: bool
    scale: Literal["difference", "ratio"]
    before: float
    after: float
    change: Estimate
    verdict: Verdict
    remark: str = ""
    """What the interval does not say: that it is not paired, that machines differ, what is missing."""


@dataclass(frozen=True)
class Comparison:
    """What is known of the differences of one bundle from another, all intervals holding at once."""

    before: str
    after: str
    confidence: float
    """Of all intervals together."""
    n_intervals: int
    """Those of the other bundles of the same comparison included."""
    differences: tuple[Difference, ...]
    not_compared: dict[str, str]
    """Metric -> why."""
    notes: tuple[str, ...] = ()

    def find(self, verdict: Verdict) -> list[Difference]:
        """Return the differences with a verdict."""
        return [difference for difference in self.differences if difference.verdict == verdict]


@dataclass(frozen=True)
class SliceDifference:
    """One metric of two candidates on the `n` samples whose `column` is `value`."""

    column: str
    value: str
    n: int
    difference: Difference


@dataclass(frozen=True)
class SliceComparison:
    """What is known of the slices of one bundle against another; `not_compared`: "metric by column" -> why."""

    confidence: float
    """Of all intervals together."""
    slices: tuple[SliceDifference, ...] = ()
    not_compared: Mapping[str, str] | None = None

    def find(self, verdict: Verdict) -> list[SliceDifference]:
        """Return the slices with a verdict."""
        return [found for found in self.slices if found.difference.verdict == verdict]
