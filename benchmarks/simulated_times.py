"""What `gate_confidence.py` simulates of time: fresh processes whose medians are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from simulated_quality import Array, Rng, Rule, Subject

from runtime.bundle.format import Benchmark, Judgement
from runtime.judge.evidence import Evidence
from runtime.judge.speed import process_evidence, range_evidence, request_evidence, timing_evidence
from runtime.measure.requests import RequestTimes

FASTER = 0.8
"""The candidate is slower, so that it has dropped, too: a gate's max_drop is positive."""
ROUNDS, CALLS, TOKENS = 12, 25, 16
"""Of a process: enough calls for its own p95, not for its p99."""
PROCESSES = (6, 9, 12, 20)
TRUTH = 30_001
"""Processes whose medians are the truth; an odd number has one in the middle. With 3,001 the truth itself was so far
off that 2.1 % of wrong verdicts of 20 processes became 3.4 %."""


@dataclass(frozen=True)
class Machine:
    """How processes differ: log ratios of their two models are drawn of `layout`, log paces are normal.

    `far`: share of processes in which the candidate has another layout, `jump` slower; `noise`: of calls; `spikes`:
    share of calls that take three times as long.
    """

    layout: float
    far: float = 0.0
    jump: float = 0.0
    noise: float = 0.03
    spikes: float = 0.0
    pace: float = 0.1

    def times(self, rng: Rng, n: int, calls: int = CALLS) -> Array:
        """Return seconds [processes, models, rounds, calls]; all rounds of a process share its pace and its layout."""
        pace = self.pace * rng.normal(size=(n, 1, 1, 1)) + 0.05 * rng.normal(size=(n, 1, ROUNDS, 1))
        layout = np.zeros((n, 2, 1, 1))
        layout[:, 1, 0, 0] = self.layout * rng.normal(size=n) + self.jump * (rng.random(n) < self.far)
        shape = (n, 2, ROUNDS, calls)
        seconds = np.exp(pace + layout + self.noise * rng.normal(size=shape))
        seconds *= np.where(rng.random(shape) < self.spikes, 3.0, 1.0)
        seconds[:, 1] /= FASTER
        return np.asarray(seconds)


MACHINES = {
    "alike": Machine(0.003),
    "layouts of 1 %": Machine(0.01, spikes=0.03),
    "two layouts": Machine(0.003, far=0.4, jump=0.03),
    "an odd process in ten": Machine(0.005, far=0.1, jump=0.5, spikes=0.1),
}


def timing_subjects() -> Iterator[Subject]:
    """Latency percentiles and throughput, of the same processes."""
    for shape, machine in MACHINES.items():

        def find(seconds: Array) -> dict[str, Evidence]:
            percentiles = {"latency_p50": 50, "latency_p90": 90, "latency_p95": 95}
            found = {name: timing_evidence(name, p, seconds, 0.95) for name, p in percentiles.items()}
            return found | {"throughput": timing_evidence("throughput", 50, seconds, 0.95, lambda s: 8 / s)}

        def draw(rng: Rng, n: int, machine: Machine = machine) -> Mapping[str, Evidence]:
            return find(machine.times(rng, n))

        yield Subject("times", shape, draw, partial(_find_truths, draw, TRUTH), sizes=PROCESSES)


def _find_truths(draw: Callable[[Rng, int], Mapping[str, Evidence]], n: int) -> dict[Rule, float]:
    """Return what every rule of a metric bounds, of `n` processes, as many as make the truth."""
    truths: dict[Rule, float] = {}
    for name, known in draw(np.random.default_rng(0), n).items():
        truths[name, "min" if known.higher_is_better else "max"] = known.candidate.value
        if known.difference is not None:
            truths[name, "max_drop"] = known.difference.value * (-1 if known.higher_is_better else 1)
        if known.speedup is not None:
            truths[name, "min_speedup"] = known.speedup.value
    return {rule: truth for rule, truth in truths.items() if truth > 0}


def request_subjects() -> Iterator[Subject]:
    """A decoder's requests: all tokens of a round share its pace."""
    machine = MACHINES["layouts of 1 %"]

    def find(rng: Rng, n: int) -> dict[str, Evidence]:
        seconds = machine.times(rng, n, calls=1 + TOKENS)
        times = RequestTimes(10 * seconds[..., 0], seconds[..., 1:], seconds.shape[-1])
        found = request_evidence(times, Judgement(benchmark=Benchmark(new_tokens=TOKENS + 1)))
        return {name: found[name] for name in ("ttft", "tpot", "itl_p95", "decode_rate")}

    yield Subject("requests", "layouts of 1 %", find, partial(_find_truths, find, TRUTH), sizes=PROCESSES)


def limited_subjects() -> Iterator[Subject]:
    """Each side at its own largest batch in time."""
    machine = MACHINES["two layouts"]

    def find(rng: Rng, n: int) -> dict[str, Evidence]:
        rates = np.array([16.0, 8.0]) / np.median(machine.times(rng, n).reshape(n, 2, -1), axis=2)
        return {"throughput_under_latency": process_evidence("throughput_under_latency", rates, 0.95)}

    yield Subject("throughput_under_latency", "two layouts", find, partial(_find_truths, find, TRUTH), sizes=PROCESSES)


def process_subjects() -> Iterator[Subject]:
    """Memory and load time, each of processes of its own; one in ten loads from a cold disk."""
    for cold in (0.0, 0.1):

        def find(rng: Rng, n: int, cold: float = cold) -> dict[str, Evidence]:
            sides = np.exp(0.1 * rng.normal(size=(2, n))) * np.where(rng.random((2, n)) < cold, 2.0, 1.0)
            before, after = tuple(sides[0]), tuple(sides[1] / FASTER)
            return {name: range_evidence(name, before, after, 0.95) for name in ("load_time", "peak_memory")}

        truths = partial(_find_truths, find, 10 * TRUTH)
        yield Subject("fresh processes", f"{cold:g} cold", find, truths, sizes=(3, 6, 10))


def time_subjects() -> Iterator[Subject]:
    yield from timing_subjects()
    yield from limited_subjects()
    yield from request_subjects()
    yield from process_subjects()
