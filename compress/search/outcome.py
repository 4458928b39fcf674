"""What a report says of a study's goals and gates; which trials are better than others, and which are the front."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from compress.recipe.search import Search
from compress.search.trials import UNKNOWN, GateMiss, GoalValue, Run, Trial
from runtime.bundle.format import Gate
from runtime.judge.findings import MEASURED_FIELDS
from runtime.metrics import MEASURED
from runtime.metrics.measured import LATENCY_PERCENTILES

RATIO_OF = {"size_ratio": "size"}
"""A metric that is a ratio itself -> the one of whose two values it is."""
Foreseen = Mapping[tuple[str, str], float]
"""(metric, rule of a gate) -> what the rule will bound: ("latency_p50", "min_speedup") -> 2.1."""


def read_goals(report: Mapping[str, Any], search: Search) -> dict[str, GoalValue]:
    """Return what a report (its JSON values) says of each goal that it measured."""
    values = {metric: _read_value(report, metric) for _, metric in search.split_goals()}
    return {metric: value for metric, value in values.items() if value is not None}


def _read_value(report: Mapping[str, Any], metric: str) -> GoalValue | None:
    side, of = report["candidate"], RATIO_OF.get(metric, metric)
    ratio = report["ratios"].get(of) if metric in MEASURED else None
    if of in MEASURED:
        value = _find_measured(side, of) if of == metric else ratio
    else:
        value = side["metrics"].get(_shorten(metric))
    if value is None:
        return None
    intervals = report["ratio_intervals"] if ratio is not None else side["intervals"]
    low, high = intervals.get(of) or intervals.get(_shorten(metric)) or (None, None)
    return GoalValue(value, ratio, low, high)


def _find_measured(side: Mapping[str, Any], metric: str) -> float | None:
    """Return a measured metric of one side of a report, wherever it stands there."""
    if metric in side["generation"] or metric in side["further"]:
        return side["generation"].get(metric, side["further"].get(metric))
    if metric in LATENCY_PERCENTILES:
        return side["latency_ms"].get(metric.removeprefix("latency_"))
    return side.get(MEASURED_FIELDS.get(metric, ""))


def _shorten(metric: str) -> str:
    """Return the name that a bundle has for a metric: of a recipe's own the file without its folders."""
    kind, colon, rest = metric.partition(":")
    return f"{kind}:{rest.rsplit('/', 1)[-1]}" if colon else metric


def read_gates(report: Mapping[str, Any]) -> tuple[GateMiss, ...]:
    """Return how far each gate of a report (its JSON values) is missed."""
    return tuple(_read_gate(gate) for gate in report["gates"])


def _read_gate(gate: Mapping[str, Any]) -> GateMiss:
    limit, floor = gate["limit"], gate["kind"].startswith("min")
    value, interval = gate["value"], gate["interval"] or (None, None)
    worse = interval[0] if floor else interval[1]
    short = UNKNOWN if value is None else _measure_miss(value, limit, floor)
    miss = 0.0 if gate["holds"] else max(short, _measure_miss(worse, limit, floor), 1e-6)
    return GateMiss(gate["metric"], gate["rule"], gate["verdict"], gate["holds"], gate["why"], miss, short)


def _measure_miss(value: float | None, limit: float, floor: bool) -> float:
    """Return how far a value is on the bad side of its bound, in parts of the bound; at most UNKNOWN."""
    if value is None:  # an interval without an end
        return 1.0
    beyond = limit - value if floor else value - limit
    return min(max(beyond, 0.0) / (abs(limit) or max(abs(value), 1e-9)), UNKNOWN)


def explain_foreseen_miss(gates: Sequence[Gate], foreseen: Foreseen) -> str:
    """Return which gate a forecast misses by more than it may be wrong; "" where none."""
    for gate in gates:
        for rule, limit in gate.bounds.items():
            value = foreseen.get((gate.metric, rule))
            whole = value is not None and not gate.worst and not gate.slice
            # forecasts are right within some 20 %
            if whole and _measure_miss(value, limit, rule.startswith("min")) > 0.25:
                return f"{gate.metric} is foreseen to be {value:.4g}, far from {rule} {limit:g}"
    return ""


def foresee_sizes(before_bytes: int, after_bytes: int) -> dict[tuple[str, str], float]:
    """Return what a plan's weights, which are most of a file, foretell of the gates on size."""
    return {("size", "max"): float(after_bytes), ("size_ratio", "min"): before_bytes / max(after_bytes, 1)}


def scores(run: Run, search: Search) -> tuple[float, ...]:
    """Return a number for each goal of a judged run, of which the lower is better; ratios by their logarithm."""
    found = []
    for direction, metric in search.split_goals():
        goal = run.goals[metric]
        if goal.ratio is not None:  # of which more is better, whatever the metric
            found.append(-math.log(max(goal.ratio, 1e-9)))
        else:
            found.append(goal.value if direction == "minimize" else -goal.value)
    return tuple(found)


def total_miss(run: Run) -> float:
    """Return by how much all gates together are missed: in full by the intervals, before that by the values."""
    return sum(gate.miss if run.share == 1 else gate.short for gate in run.gates)


def dominates(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether the first is nowhere worse and somewhere better."""
    return all(a <= b for a, b in zip(first, second, strict=True)) and tuple(first) != tuple(second)


def find_front(trials: Sequence[Trial], search: Search) -> list[Trial]:
    """Return the trials in full whose gates hold and that no other one is better than in all goals, by number.

    Of those that are equal in all goals the first.
    """
    held = [(trial, scores(trial.full, search)) for trial in trials if trial.full is not None and trial.holds]
    best = [(trial, own) for trial, own in held if not any(dominates(other, own) for _, other in held)]
    return list({own: trial for trial, own in reversed(best)}.values())[::-1]


def find_best(trials: Sequence[Trial], search: Search) -> Trial | None:
    """Return the trial of the front that is best over all goals together; None while no trial's gates hold.

    Of several goals: the least sum of distances from each goal's best, in parts of the front's range of that goal.
    """
    front = find_front(trials, search)
    order = rank(front, lambda trial: trial.full, search)
    return order[0] if order else None


def find_nearest(trials: Sequence[Trial], search: Search) -> Trial | None:
    """Return the trial in full that misses its gates least; None where no trial was judged in full."""
    return next(iter(rank([trial for trial in trials if trial.full], lambda trial: trial.full, search)), None)


def rank(trials: Sequence[Trial], run_of: Callable[[Trial], Run | None], search: Search) -> list[Trial]:
    """Return the judged trials from the best on: gates first, then all goals together, then the earlier one.

    Of gates first by how much their values fall short: one that misses by its interval alone is nearer than one that
    misses, however tight the bound is and however wide the interval.
    """
    judged = [(trial, run) for trial in trials if (run := run_of(trial)) is not None and run.state == "judged"]
    columns = list(zip(*(scores(run, search) for _, run in judged), strict=True))
    lows, highs = [min(column) for column in columns], [max(column) for column in columns]

    def distance(run: Run) -> float:
        own = scores(run, search)
        return sum((s - low) / ((high - low) or 1.0) for s, low, high in zip(own, lows, highs, strict=True))

    def miss(run: Run) -> tuple[float, float]:
        return sum(gate.short for gate in run.gates), total_miss(run)

    keyed = [((*miss(run), distance(run), trial.number), trial) for trial, run in judged]
    return [trial for _, trial in sorted(keyed, key=lambda pair: pair[0])]
