"""What `gate_confidence.py` simulates of time: timed calls on machines whose true percentiles are known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from runtime.measure.timing import RequestTimes, may_drift
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
    """Speed-ups on a machine of two paces that take turns, of which the slow one holds up the candidate more.

    `n` are seconds of rounds, and as many again are added while they drift. The slow pace lasts two seconds on average,
    the fast one four. What outlasts the rounds is not seen: this tells how often that deceives.
    """
    for a_second in (100, 1000):

        def draw(rng: Rng, n: int, a_second: int = a_second) -> Mapping[str, Evidence]:
            most = 2 * n * a_second
            is_slow = _draw_paces(rng, most, 4 * a_second, 2 * a_second)
            seconds = np.exp(PACES.noise * rng.normal(size=(2, most)))
            seconds *= np.where(rng.random((2, most)) < PACES.spikes, 3.0, 1.0)
            seconds *= np.where(is_slow, [[1.4], [1.4 * HELD_UP]], 1.0)
            seconds[1] /= FASTER
            first = n * a_second
            made = most if may_drift(seconds[0, :first] / seconds[1, :first]) else first
            return {"latency_p50": timing_evidence("latency_p50", 50, seconds[:, :made], Judgement())}

        truths: dict[Rule, float] = {("latency_p50", "min_speedup"): FASTER * _find_median_of_paces()}
        yield Subject("two paces", f"{a_second} rounds a second", draw, truths, sizes=(1, 5, 10, 30))


def _draw_paces(rng: Rng, rounds: int, fast: float, slow: float) -> Array:
    """Return for each round whether the machine is slow, bool [rounds]; paces last so many rounds on average."""
    paces, begun, is_slow = np.empty(rounds, bool), 0, bool(rng.random() < slow / (fast + slow))
    while begun < rounds:
        ended = begun + 1 + int(rng.exponential(slow if is_slow else fast))
        paces[begun:ended] = is_slow
        begun, is_slow = ended, not is_slow
    return paces


def _find_median_of_paces() -> float:
    """Return the median of baseline over candidate where a third of the rounds hold the candidate up, by halving."""
    normal, once = NormalDist(0, math.sqrt(2) * PACES.noise), PACES.spikes * (1 - PACES.spikes)
    spikes = ((1 - 2 * once, 0.0), (once, math.log(3)), (once, -math.log(3)))  # of neither or both, of one of them
    low, high = -1.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        below = sum(
            share * chance * normal.cdf(middle + held_up - spike)
            for share, held_up in ((2 / 3, 0.0), (1 / 3, math.log(HELD_UP)))
            for chance, spike in spikes
        )
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


PACES = Machine(0, 0, 0.05, spikes=0.02)
"""Either of them."""
HELD_UP = 1.25
"""How much more the slow pace slows the candidate than the baseline."""
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
    yield from limited_subjects()
    yield from request_subjects()
    yield from process_subjects()
