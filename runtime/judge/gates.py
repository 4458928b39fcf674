"""Deciding a gate: does the whole confidence interval keep to the bound?

A gate passes when the whole two-sided interval (at `judgement.confidence`) is on the good side of its bound, fails when
the whole interval is on the bad side, and is undecided otherwise. Being two-sided, a pass at confidence 0.95 is a
one-sided test at 0.975. Undecided counts as fail unless the gate or the judgement says `undecided: pass`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from runtime.bundle.format import Benchmark, Gate, Judgement
from runtime.errors import UsageError
from runtime.judge.evidence import Evidence
from runtime.judge.stats import Estimate, change_scale, samples_needed
from runtime.metrics import MEASURED, METRICS, check_name, fitting
from runtime.report.units import interval_words
from runtime.tasks import find_task

Verdict = Literal["pass", "fail", "undecided"]


@dataclass(frozen=True)
class GateResult:
    """One rule of one gate, decided.

    `value` is what the rule bounds: the drop, the value or the speed-up; None where it could not be measured. `holds`
    is the verdict after `undecided` has been counted as fail or pass.
    """

    metric: str
    rule: str
    value: float | None
    interval: tuple[float, float] | None
    verdict: Verdict
    holds: bool
    why: str


def check_gates(judgement: Judgement, task: str, has_labels: bool) -> None:
    """Refuse, before anything runs, a gate or a metric that cannot be judged here: UsageError with every problem."""
    problems: list[str] = []
    for name in dict.fromkeys((*judgement.metrics, *(gate.metric for gate in judgement.gates))):
        try:
            _check_metric(name, task, has_labels, judgement)
        except UsageError as error:
            problems += error.problems
    problems += [problem for gate in judgement.gates for problem in _rule_problems(gate)]
    if problems:
        raise UsageError(problems)


def _check_metric(name: str, task: str, has_labels: bool, judgement: Judgement) -> None:
    check_name(name)
    if name in MEASURED:
        _check_measured(name, task, judgement.benchmark)
        return
    metric = METRICS[name]
    fits = ", ".join(fitting(task, has_labels))
    if not metric.suits(find_task(task).outputs):
        raise UsageError(f"metric '{name}' does not fit task {task}; what fits: {fits}")
    if metric.against == "labels" and not has_labels:
        raise UsageError(f"metric '{name}' needs labels, and the evaluation set has none; without labels fit: {fits}")


def _check_measured(name: str, task: str, benchmark: Benchmark) -> None:
    found = find_task(task)
    if not MEASURED[name].suits(found):
        fits = ", ".join(other for other, metric in MEASURED.items() if metric.suits(found))
        raise UsageError(f"metric '{name}' does not fit task {task}; what fits: {fits}")
    if name == "throughput_under_latency" and benchmark.latency_limit_ms is None:
        raise UsageError("metric 'throughput_under_latency' needs benchmark.latency_limit_ms")
    if name == "goodput" and benchmark.ttft_limit_ms is None and benchmark.tpot_limit_ms is None:
        raise UsageError("metric 'goodput' needs benchmark.ttft_limit_ms or benchmark.tpot_limit_ms")
    if name == "cost_per_million" and benchmark.price_per_hour is None:
        raise UsageError("metric 'cost_per_million' needs benchmark.price_per_hour")


def _rule_problems(gate: Gate) -> list[str]:
    if gate.metric not in MEASURED and gate.metric not in METRICS:
        return []  # refused by name already
    problems = []
    speed = [name for name, metric in MEASURED.items() if metric.speed]
    if gate.min_speedup is not None and gate.metric not in speed:
        problems.append(f"gate on '{gate.metric}': min_speedup fits only {', '.join(speed)}")
    if gate.max_drop is not None and gate.metric in ("sqnr_db", "size_ratio"):
        problems.append(f"gate on '{gate.metric}': max_drop has no baseline value to drop from; use min")
    return problems


def judge(
    judgement: Judgement,
    evidence: Mapping[str, Evidence],
    failures: Mapping[str, str] | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> tuple[GateResult, ...]:
    """Decide every rule of every gate.

    A metric in `failures` could not be measured: its gates fail, saying why. A metric in `elsewhere` cannot be told on
    this machine, for the reason there: its gates are undecided.
    """
    results = []
    for gate in judgement.gates:
        undecided_holds = (gate.undecided or judgement.undecided) == "pass"
        for rule, limit in gate.bounds.items():
            if failures and gate.metric in failures:
                why = failures[gate.metric]
                results.append(GateResult(gate.metric, f"{rule} {limit:g}", None, None, "fail", False, why))
            elif elsewhere and gate.metric in elsewhere:
                counted = "; counted as a pass" if undecided_holds else "; counted as a failure"
                why = elsewhere[gate.metric] + counted
                results.append(
                    GateResult(gate.metric, f"{rule} {limit:g}", None, None, "undecided", undecided_holds, why)
                )
            else:
                results.append(_decide_rule(evidence[gate.metric], rule, limit, judgement.confidence, undecided_holds))
    return tuple(results)


def overall(gates: tuple[GateResult, ...]) -> Verdict:
    """Return fail if a gate fails, else undecided if an undecided gate does not hold, else pass."""
    if any(gate.verdict == "fail" for gate in gates):
        return "fail"
    return "pass" if all(gate.holds for gate in gates) else "undecided"


def find_bounded(evidence: Evidence, rule: str) -> Estimate:
    """Return what the rule bounds: the drop (positive is worse), the speed-up, or the candidate's value."""
    if rule == "max_drop":
        difference = evidence.difference
        if difference is None:
            raise UsageError(f"gate on '{evidence.name}': max_drop has no baseline value to drop from")
        if not evidence.higher_is_better:
            return difference
        return change_scale(difference, lambda change: -change + 0.0)
    if rule == "min_speedup":
        if evidence.speedup is None:
            raise UsageError(f"gate on '{evidence.name}': there is no baseline speed to compare with")
        return evidence.speedup
    return evidence.candidate


def _decide_rule(evidence: Evidence, rule: str, limit: float, confidence: float, undecided_holds: bool) -> GateResult:
    estimate = find_bounded(evidence, rule)
    verdict = _compare_with_bound(estimate, limit, at_least=rule in ("min", "min_speedup"))
    why = _explain_verdict(evidence, rule, estimate, limit, verdict, confidence)
    if verdict == "undecided":
        why += "; counted as a pass" if undecided_holds else "; counted as a failure"
    holds = verdict == "pass" or (verdict == "undecided" and undecided_holds)
    interval = (estimate.low, estimate.high)
    return GateResult(evidence.name, f"{rule} {limit:g}", estimate.value, interval, verdict, holds, why)


def _compare_with_bound(estimate: Estimate, limit: float, at_least: bool) -> Verdict:
    low, high, bound = (estimate.low, estimate.high, limit) if at_least else (-estimate.high, -estimate.low, -limit)
    return "pass" if low >= bound else "fail" if high < bound else "undecided"


def _explain_verdict(
    evidence: Evidence, rule: str, estimate: Estimate, limit: float, verdict: Verdict, confidence: float
) -> str:
    what = {"max_drop": "drop", "min_speedup": "speed-up"}.get(rule, evidence.name)
    bound = f"{'at least' if rule.startswith('min') else 'at most'} {limit:g}"
    if estimate.method == "exact":
        return f"{what} {estimate.value:.6g} is {'' if verdict == 'pass' else 'not '}{bound}"
    count = f"{evidence.n} {evidence.counted}"
    interval = f"{100 * confidence:g}% interval {interval_words(estimate.low, estimate.high)}"
    seen = f"{what} {estimate.value:.4g} ({interval}, {estimate.method}, {count})"
    if verdict == "pass":
        return f"{seen} is {bound}"
    if verdict == "fail":
        return f"{seen} is not {bound}"
    return f"cannot tell with {count} whether it is {bound}: {seen}; {_format_needed(evidence, estimate, limit)}"


def _format_needed(evidence: Evidence, estimate: Estimate, limit: float) -> str:
    if not math.isfinite(estimate.high if limit >= estimate.value else estimate.low):
        return estimate.lacking
    if evidence.counted == "fresh processes":
        return "they differ by more than their distance from the bound"
    needed = samples_needed(estimate, limit, evidence.n)
    if needed is None:
        return "the value is so near the bound that more of them may not tell"
    return f"about {needed} would be needed" + (" (benchmark.iterations)" if evidence.counted == "timed rounds" else "")
