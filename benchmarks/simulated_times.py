"""What `gate_confidence.py` simulates of time: timed calls on machines whose true percentiles are known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from scipy.signal import lfilter
from simulated_quality import SIZES, Array, Rng, Rule, Subject

from runtime.bundle.format import Benchmark, Judgement
from runtime.judge.evidence import (
    Evidence,
    range_evidence,
    request_evidence,
    throughput_under_latency_evidence,
    timing_evidence,
)
from runtime.measure.timing import RequestTimes, may_drift


@dataclass(frozen=True)
class Machine:
    """Log times are normal: a pace that lasts (autoregressive), noise of each call; and some calls are far slower."""

    lasting: float
    """Standard deviation of the pace."""
    keeps: float
    """Correlation of the pace from one round to the next."""
    noise: float
    spikes: float = 0.0
    """Share of calls that take three times as long."""

    def pace(self, rng: Rng, n: int) -> Array:
        steps = math.sqrt(1 - self.keeps**2) * rng.normal(size=n)
        steps[0] = rng.normal()
        pace: Array = lfilter([1.0], [1.0, -self.keeps], steps)
        return self.lasting * pace

    def calls(self, rng: Rng, pace: Array) -> Array:
        spiked = rng.random(pace.shape) < self.spikes
        return np.exp(pace + self.noise * rng.normal(size=pace.shape)) * np.where(spiked, 3.0, 1.0)

    def quantile(self, percentile: float) -> float:
        """The true percentile of a call's time, by halving."""
        normal = NormalDist(0, math.hypot(self.lasting, self.noise))
        low, high = -3.0, 3.0
        for _ in range(60):
            middle = (low + high) / 2
            below = (1 - self.spikes) * normal.cdf(middle) + self.spikes * normal.cdf(middle - math.log(3))
            low, high = (middle, high) if below < percentile / 100 else (low, middle)
        return math.exp(low)


MACHINES = {
    "idle": Machine(0, 0, 0.03),
    "spikes": Machine(0, 0, 0.05, spikes=0.03),
    "short drift": Machine(0.1, 0.5, 0.05),
    "drift": Machine(0.1, 0.8, 0.05),
    "drift in noise": Machine(0.02, 0.9, 0.05, spikes=0.03),
}
"""On which the percentiles themselves are judged."""
SPEEDUP_MACHINES = {**MACHINES, "slow strong drift": Machine(0.2, 0.98, 0.05, spikes=0.02)}
FASTER = 0.8
"""The candidate is slower, so that it has dropped, too: a gate's max_drop is positive."""


def timing_subjects() -> Iterator[Subject]:
    percentiles = {"latency_p50": 50, "latency_p95": 95, "latency_p99": 99}
    for shape, machine in SPEEDUP_MACHINES.items():

        def draw(rng: Rng, n: int, machine: Machine = machine) -> Mapping[str, Evidence]:
            pace = machine.pace(rng, n)
            seconds = np.stack([machine.calls(rng, pace), machine.calls(rng, pace) / FASTER])
            judgement = Judgement()
            found = {name: timing_evidence(name, p, seconds, judgement) for name, p in percentiles.items()}
            return found | {"throughput": timing_evidence("throughput", 50, seconds, judgement, 8)}

        truths: dict[Rule, float] = {(name, "min_speedup"): FASTER for name in (*percentiles, "throughput")}
        if shape in MACHINES:
            for name, percentile in percentiles.items():
                ms = 1000 * machine.quantile(percentile)
                truths |= {(name, "max"): ms / FASTER, (name, "max_drop"): ms / FASTER - ms}
            rate = 8 / machine.quantile(50)
            truths |= {("throughput", "min"): rate * FASTER, ("throughput", "max_drop"): rate - rate * FASTER}
        yield Subject("times", shape, draw, truths)


def settling_subjects() -> Iterator[Subject]:
    """Speed-ups on a machine that treats one of the models better for a while: rounds are added while they drift."""
    for keeps in (0.8, 0.9, 0.98):
        machine = Machine(0.1, keeps, 0.05)

        def draw(rng: Rng, n: int, machine: Machine = machine) -> Mapping[str, Evidence]:
            most = MOST_ADDED * n
            seconds = np.exp(0.05 * rng.normal(size=(2, most)))
            seconds[1] *= machine.calls(rng, machine.pace(rng, most)) / FASTER
            while n < most and may_drift(seconds[0, :n] / seconds[1, :n]):
                n *= 2
            return {"latency_p50": timing_evidence("latency_p50", 50, seconds[:, :n], Judgement())}

        truths: dict[Rule, float] = {("latency_p50", "min_speedup"): FASTER}
        yield Subject("added rounds", f"ratio keeps {keeps:g}", draw, truths, sizes=(100, 200, 500))


def pace_subjects() -> Iterator[Subject]:
    """Speed-ups on a machine of two paces, which takes turns in seconds and slows one of the models more.

    The rounds are those of so many seconds; a pace lasts two on average in its slower, four in its faster turn.
    """
    for a_second in (100, 1000):

        def draw(rng: Rng, n: int, a_second: int = a_second) -> Mapping[str, Evidence]:
            slow, lasts, rounds = rng.random() < 1 / 3, (4 * a_second, 2 * a_second), n * a_second
            paces = np.empty(rounds, bool)
            begun = 0
            while begun < rounds:
                ended = begun + 1 + int(rng.exponential(lasts[slow]))
                paces[begun:ended] = slow
                begun, slow = ended, not slow
            seconds = np.exp(0.05 * rng.normal(size=(2, rounds))) * np.where(rng.random((2, rounds)) < 0.02, 3.0, 1.0)
            seconds[0] *= np.where(paces, 1.4, 1.0)
            seconds[1] *= np.where(paces, 1.4 * SLOWED, 1.0) / FASTER
            return {"latency_p50": timing_evidence("latency_p50", 50, seconds, Judgement())}

        ratios = Machine(0, 0, math.hypot(0.05, 0.05))
        truths: dict[Rule, float] = {("latency_p50", "min_speedup"): FASTER * _find_median_of_paces(ratios)}
        yield Subject("two paces", f"{a_second} rounds a second", draw, truths, sizes=(2, 5, 20, 60))


def _find_median_of_paces(ratios: Machine) -> float:
    """Return the median of ratios a third of which are SLOWED; spikes of either side are as many above as below."""
    normal = NormalDist(0, ratios.noise)
    low, high = -1.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        below = 0.0
        for share, shift in ((2 / 3, 0.0), (1 / 3, -math.log(SLOWED))):
            for chance, spike in ((0.9608, 0.0), (0.0196, math.log(3)), (0.0196, -math.log(3))):
                below += share * chance * normal.cdf(middle - shift - spike)
        low, high = (middle, high) if below < 0.5 else (low, middle)
    return math.exp(low)


def limited_subjects() -> Iterator[Subject]:
    """Each side at its own largest batch in time: rounds that are not paired."""
    for shape in ("idle", "spikes", "short drift"):
        machine = MACHINES[shape]

        def draw(rng: Rng, n: int, machine: Machine = machine) -> Mapping[str, Evidence]:
            sides = [machine.calls(rng, machine.pace(rng, n)) for _ in range(2)]
            found = throughput_under_latency_evidence(((16, sides[0]), (8, sides[1])), Judgement())
            return {found.name: found}

        rate = 8 / machine.quantile(50)
        name = "throughput_under_latency"
        yield Subject(name, shape, draw, {(name, "min"): rate, (name, "min_speedup"): 0.5, (name, "max_drop"): rate})


SLOWED = 1.25
"""How much more a candidate suffers from the slow one of two paces."""
MOST_ADDED = 16
"""How many times as many rounds `timing.time_rounds` has made when its time is up, in this simulation."""
TOKENS = 16
"""That a simulated request generates after its first."""


def request_subjects() -> Iterator[Subject]:
    """A decoder's requests: all tokens of a round share its pace."""
    for shape in ("idle", "short drift", "drift in noise"):
        machine = MACHINES[shape]

        def draw(rng: Rng, n: int, machine: Machine = machine) -> Mapping[str, Evidence]:
            pace = machine.pace(rng, n)
            first = np.stack([10 * machine.calls(rng, pace), 10 / FASTER * machine.calls(rng, pace)])
            steps = np.stack([machine.calls(rng, np.tile(pace[:, None], TOKENS)) for _ in range(2)])
            steps[1] /= FASTER
            return request_evidence(RequestTimes(first, steps), Judgement(benchmark=Benchmark(new_tokens=TOKENS + 1)))

        truths: dict[Rule, float] = {
            ("ttft", "max"): 1e4 * machine.quantile(50) / FASTER,
            ("ttft", "min_speedup"): FASTER,
            ("tpot", "min_speedup"): FASTER,
            ("decode_rate", "min_speedup"): FASTER,
        }
        for name, percentile in (("itl_p50", 50), ("itl_p95", 95), ("itl_p99", 99)):
            ms = 1000 * machine.quantile(percentile)
            truths |= {(name, "max"): ms / FASTER, (name, "min_speedup"): FASTER}
        yield Subject("requests", shape, draw, truths, sizes=tuple(n for n in SIZES if n <= 200))


def process_subjects() -> Iterator[Subject]:
    """Memory and load time of 3 to 10 fresh processes; one in ten loads from a cold disk."""
    for cold in (0.0, 0.1):

        def draw(rng: Rng, n: int, cold: float = cold) -> Mapping[str, Evidence]:
            sides = np.exp(0.1 * rng.normal(size=(2, n))) * np.where(rng.random((2, n)) < cold, 2.0, 1.0)
            before, after = tuple(sides[0]), tuple(sides[1] / FASTER)
            names = ("load_time", "peak_memory")
            return {name: range_evidence(name, before, after, Judgement()) for name in names}

        median = Machine(0, 0, 0.1).quantile(50)
        if cold:
            low, high = 0.9, 1.3
            normal = NormalDist(0, 0.1)
            for _ in range(60):
                middle = (low + high) / 2
                below = (1 - cold) * normal.cdf(math.log(middle)) + cold * normal.cdf(math.log(middle / 2))
                low, high = (middle, high) if below < 0.5 else (low, middle)
            median = low
        truths = {
            ("load_time", "min_speedup"): FASTER,
            ("load_time", "max"): median / FASTER,
            ("peak_memory", "max"): median / FASTER,
            ("peak_memory", "max_drop"): median / FASTER - median,
        }
        yield Subject("fresh processes", f"{cold:g} cold", draw, truths, sizes=(3, 6, 10))


def time_subjects() -> Iterator[Subject]:
    yield from timing_subjects()
    yield from settling_subjects()
    yield from pace_subjects()
    yield from limited_subjects()
    yield from request_subjects()
    yield from process_subjects()
