"""How long judging a bundle will take: the runtime's rounds and budgets, and calls whose time is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.bundle.manifest import Benchmark, Gate
from runtime.judge.alternatives import FIDELITY_SAMPLES
from runtime.measure.benchmark import (
    ANSWERS_BUDGET_S,
    LATENCIES,
    LATENCY_BUDGET_S,
    RATES,
    SHOWN_PROCESSES,
    THROUGHPUT_BUDGET_S,
    find_lasting_s,
)
from runtime.measure.probe import RUNS
from runtime.measure.timing import (
    MIN_ROUNDS,
    SETTLED_S,
    SETTLING_S,
    SURE_ROUNDS,
    WARMUP_BUDGET_S,
    large_batch_rounds,
)

ELSEWHERE = {"openvino": 3}
"""Backend -> ways in which it is timed beside the one that is judged: both files, OpenVINO's float one in two types."""


@dataclass(frozen=True)
class Calls:
    """Seconds of one sample: in the float model, in the candidate, and of a fresh process that imports a backend.

    `n_between`: models between the passes that are timed, too. `others`: backends that are compared.
    """

    float_s: float
    candidate_s: float
    process_s: float
    n_between: int = 0
    others: Sequence[str] = ()

    @property
    def n_ways(self) -> int:
        """Return how many sessions are compared: baseline and candidate, and those elsewhere."""
        return 2 + sum(ELSEWHERE.get(name, 2) for name in self.others)

    def of_batch(self, size: int) -> list[float]:
        """Return the seconds of a call of both models with so many samples."""
        return [self.float_s * size, self.candidate_s * size]


def judging_seconds(speed: Benchmark, n_samples: int, calls: Calls, gates: Sequence[Gate] = ()) -> float:
    """Return the seconds of judging a model that is called, as `runtime.judge.validate` does it: no decoder's."""
    single = [*calls.of_batch(speed.batch_size), *[calls.float_s * speed.batch_size] * calls.n_between]
    many = calls.of_batch(speed.throughput_batch_size)
    budget = LATENCY_BUDGET_S * (1 + calls.n_between / 2)
    seconds = n_samples * calls.candidate_s
    seconds += rounds_seconds(
        single, speed.iterations, speed.warmup, budget, SETTLING_S, find_lasting_s(gates, LATENCIES)
    )
    rounds, warmup = large_batch_rounds(speed), min(speed.warmup, 3)
    seconds += rounds_seconds(many, rounds, warmup, THROUGHPUT_BUDGET_S, SETTLING_S, find_lasting_s(gates, RATES))
    answers = sum(calls.of_batch(speed.batch_size))
    seconds += speed.warmup * answers + min(speed.iterations * answers, max(ANSWERS_BUDGET_S, MIN_ROUNDS * answers))
    seconds += sum(SHOWN_PROCESSES * (calls.process_s + RUNS * call) for call in calls.of_batch(speed.batch_size))
    if not calls.others:
        return seconds
    ways = [calls.float_s, calls.candidate_s, *[calls.float_s] * (calls.n_ways - 2)]
    seconds += min(n_samples, FIDELITY_SAMPLES) * sum(ways) + len(calls.others) * calls.process_s
    timed = [speed.batch_size * call for call in ways]
    return seconds + rounds_seconds(timed, speed.iterations, speed.warmup, LATENCY_BUDGET_S)


def requests_seconds(speed: Benchmark, calls: Calls, tokens_s: Sequence[float]) -> float:
    """Return the seconds of timing decoders by the request: `tokens_s` of a further token, of each model.

    `calls`: its samples are prompts of `prompt_tokens`.
    """
    prompts = calls.of_batch(speed.batch_size)[-len(tokens_s) :]
    requests = [prompt + speed.new_tokens * token for prompt, token in zip(prompts, tokens_s, strict=True)]
    requests += [requests[0]] * calls.n_between
    pace, warmup = sum(requests), max(min(speed.warmup, 3), 1)
    budget = LATENCY_BUDGET_S * (1 + calls.n_between / 2)
    made = max(min(speed.iterations, MIN_ROUNDS), min(speed.iterations, budget / max(pace, 1e-9)))
    probes = SHOWN_PROCESSES * sum(calls.process_s + (RUNS - 1) * request for request in requests[: len(tokens_s)])
    return min(warmup * pace, WARMUP_BUDGET_S + pace) + made * pace + probes


def rounds_seconds(
    calls: Sequence[float],
    rounds: int,
    warmup: int,
    budget_s: float,
    settling_s: float = 0.0,
    lasting_s: float = 0.0,
) -> float:
    """Return the seconds of `runtime.measure.timing.time_rounds`, of models whose calls take so long."""
    pace = sum(seconds * (1 if seconds >= SETTLED_S else 2) for seconds in calls)
    made = max(min(rounds, MIN_ROUNDS), min(rounds, int(budget_s / max(pace, 1e-9))), int(lasting_s / max(pace, 1e-9)))
    warm = sum(min(max(warmup, 1) * seconds, WARMUP_BUDGET_S + seconds) for seconds in calls)
    settled = min(max(SURE_ROUNDS - made, 0) * pace, settling_s) if made >= MIN_ROUNDS else 0.0
    return warm + made * pace + settled
