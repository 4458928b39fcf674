"""How long judging a bundle will take: the runtime's processes and budgets, and calls whose time is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.bundle.manifest import Benchmark, Gate, Judgement
from runtime.clock.turns import BLOCK_S, MIN_ROUNDS, SETTLED_S, WARMUP_BUDGET_S
from runtime.judge.alternatives import FIDELITY_SAMPLES
from runtime.measure.benchmark import (
    ANSWERS_BUDGET_S,
    LASTING_S,
    LATENCIES,
    LATENCY_BUDGET_S,
    RATES,
    SHOWN,
    THROUGHPUT_BUDGET_S,
    count_processes,
)
from runtime.measure.requests import LEAST_REQUESTS

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
    """Return the seconds of judging a model that is called, as `runtime.judge.bundle` does it: no decoder's."""
    processes = count_processes(Judgement(gates=tuple(gates), benchmark=speed))
    gated = {gate.metric for gate in gates}
    single, many = calls.of_batch(speed.batch_size), calls.of_batch(speed.throughput_batch_size)
    beside = [calls.float_s * speed.batch_size] * (1 + calls.n_between + calls.n_ways - 2)
    parts = [
        (single, speed.iterations, LATENCY_BUDGET_S, LASTING_S if gated & LATENCIES else 0.0),
        (many, speed.iterations // 4, THROUGHPUT_BUDGET_S, LASTING_S if gated & RATES else 0.0),
    ]
    if len(beside) > 1:
        parts.append((beside, speed.iterations // 2, LATENCY_BUDGET_S * len(beside) / 4, 0.0))
    each = sum(
        turns_seconds(some, -(-count // processes), speed.warmup, budget_s / processes, least_s / processes)
        for some, count, budget_s, least_s in parts
    )
    answers = SHOWN * min(speed.iterations * sum(single), ANSWERS_BUDGET_S) / processes
    fidelity = min(n_samples, FIDELITY_SAMPLES) * calls.float_s * (calls.n_ways if calls.others else 0)
    return n_samples * calls.candidate_s + processes * (calls.process_s + each) + answers + fidelity


def requests_seconds(speed: Benchmark, calls: Calls, tokens_s: Sequence[float]) -> float:
    """Return the seconds of timing decoders by the request: `tokens_s` of a further token, of each model.

    `calls`: its samples are prompts of `prompt_tokens`.
    """
    processes = count_processes(Judgement(benchmark=speed))
    prompts = calls.of_batch(speed.batch_size)[-len(tokens_s) :]
    requests = [prompt + speed.new_tokens * token for prompt, token in zip(prompts, tokens_s, strict=True)]
    requests += [requests[0]] * calls.n_between
    pace, warmup = sum(requests), max(min(speed.warmup, 3), 1)
    rounds = min(-(-speed.iterations // processes), LATENCY_BUDGET_S / processes / max(pace, 1e-9))
    each = min(warmup * pace, WARMUP_BUDGET_S + pace) + max(rounds, LEAST_REQUESTS) * pace
    return processes * (calls.process_s + each)


def turns_seconds(calls: Sequence[float], count: int, warmup: int, budget_s: float, least_s: float = 0.0) -> float:
    """Return the seconds of `runtime.clock.turns.time_in_turns`, of models whose calls take so long."""
    in_block = max(1.0, BLOCK_S / max(*calls, 1e-9))
    per_round = sum(seconds * (in_block + (seconds < SETTLED_S)) for seconds in calls)
    rounds = max(MIN_ROUNDS, min(count / in_block, budget_s / max(per_round, 1e-9)), least_s / max(per_round, 1e-9))
    warm = sum(min(max(warmup, 1) * seconds, WARMUP_BUDGET_S + seconds) for seconds in calls)
    return warm + rounds * per_round
