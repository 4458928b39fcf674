"""Which of two trials is better: goals by their directions, gates by how far they are missed, fronts by definition."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies import make_report, searched

from compress.recipe.search import Search
from compress.search.outcome import find_best, find_front, find_nearest, rank, read_gates, read_goals
from compress.search.trials import UNKNOWN, GoalValue, Run, Trial
from runtime.bundle.format import Gate
from runtime.judge.gates import GateResult
from runtime.report.report import finite

GOALS = ("minimize size", "maximize top1", "minimize ece")


def make_search(*goals: str) -> Search:
    return Search.model_validate({"space": {"seed": {"range": (0, 9)}}, "goals": goals})


def trial(number: int, size: float, top1: float, ece: float, verdict: str = "pass") -> Trial:
    goals = {"size": GoalValue(1 / size, size), "top1": GoalValue(top1), "ece": GoalValue(ece)}
    return Trial(number, 0, {"seed": number}, (Run(0, 1.0, "judged", verdict=verdict, goals=goals),))


@given(st.lists(st.tuples(*[st.integers(1, 3)] * 3), max_size=8))
def test_the_front_is_what_nothing_else_is_better_than(values: list[tuple[int, int, int]]) -> None:
    """Held against the definition, in which more size ratio and top1, and less ece, is better."""
    trials = [trial(i, *map(float, each)) for i, each in enumerate(values)]

    def is_better(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
        return a != b and a[0] >= b[0] and a[1] >= b[1] and a[2] <= b[2]

    kept = {v for v in values if not any(is_better(other, v) for other in values)}
    front = find_front(trials, make_search(*GOALS))
    assert {values[each.number] for each in front} == kept
    assert len(front) == len(kept)  # of equals one
    best = find_best(trials, make_search(*GOALS))
    assert best is None if not values else best in front


def test_a_trial_whose_gates_do_not_hold_is_on_no_front() -> None:
    search = make_search("minimize size")
    trials = [trial(0, 9.0, 1, 1, "undecided"), trial(1, 2.0, 1, 1), trial(2, 5.0, 1, 1, "fail")]
    assert [each.number for each in find_front(trials, search)] == [1]
    assert find_best(trials[:1], search) is None
    assert find_nearest(trials[:1], search) == trials[0]


def judged_gate(metric: str, rule: str, value: float | None, interval: tuple[float, float], holds: bool) -> GateResult:
    return GateResult(metric, rule, value, interval, "pass" if holds else "undecided", holds, "")


@pytest.mark.parametrize(
    ("gate", "short", "miss"),
    [
        (judged_gate("top1", "max_drop 0.02", 0.01, (0.0, 0.015), True), 0.0, 0.0),
        (judged_gate("top1", "max_drop 0.02", 0.01, (0.0, 0.03), False), 0.0, 0.5),  # undecided: by its interval
        (judged_gate("top1", "max_drop 0.02, worst label", 0.05, (0.04, 0.06), False), 1.5, 2.0),
        (judged_gate("size_ratio", "min 4", 3.0, (3.0, 3.0), False), 0.25, 0.25),
        (judged_gate("latency_p50", "min_speedup 2", 2.5, (float("-inf"), 3.0), False), 0.0, 1.0),
        (judged_gate("energy", "max 2", None, (0.0, 0.0), False), UNKNOWN, UNKNOWN),
    ],
)
def test_a_gate_is_missed_by_the_value_and_by_the_interval(gate: GateResult, short: float, miss: float) -> None:
    from dataclasses import asdict

    (read,) = read_gates({"gates": [finite(asdict(gate))]})
    assert (read.short, read.miss) == (pytest.approx(short), pytest.approx(miss))


def test_before_the_end_of_a_race_values_decide_and_in_full_intervals(tmp_path: Path) -> None:
    """A drop of 0.045 is within 0.05, and the end of its interval is not."""
    search = searched(tmp_path).search
    assert search is not None
    runs = []
    for size, drop in ((3.0, 0.045), (2.0, 0.01)):
        report = make_report(size, drop)
        report["gates"][0]["holds"] = drop < 0.02
        runs.append(Run(0, 1.0, "judged", goals=read_goals(report, search), gates=read_gates(report)))
    full = [Trial(i, 0, {}, (run,)) for i, run in enumerate(runs)]
    from dataclasses import replace

    cheap = [Trial(i, 0, {}, (replace(run, share=0.1),)) for i, run in enumerate(runs)]
    assert [each.number for each in rank(full, lambda each: each.last, search)] == [1, 0]
    assert [each.number for each in rank(cheap, lambda each: each.last, search)] == [0, 1]


def test_what_misses_one_tight_gate_is_nearer_than_what_misses_two_by_half(tmp_path: Path) -> None:
    """However wide its interval is: a drop of 0.0136 of 0.010, up to 0.0213, against half of size and speed."""
    search = searched(tmp_path).search
    assert search is not None
    runs = []
    for size, drop, wide, speed in ((3.6, 0.0, 0.001, 2.4), (6.1, 0.0136, 0.0077, 4.6)):
        report = make_report(size, drop, limit=0.01)
        report["gates"][0]["interval"] = [drop - wide, drop + wide]
        for metric, kind, least, value in (("size_ratio", "min", 6, size), ("latency_p50", "min_speedup", 4, speed)):
            holds = value >= least
            rule = {"metric": metric, "rule": f"{kind} {least}", "kind": kind, "limit": least}
            found = {"value": value, "interval": [value, value], "holds": holds}
            report["gates"].append({**rule, **found, "verdict": "pass" if holds else "fail", "why": ""})
        runs.append(Run(0, 1.0, "judged", goals=read_goals(report, search), gates=read_gates(report)))
    nearest = find_nearest([Trial(i, 0, {}, (run,)) for i, run in enumerate(runs)], search)
    assert nearest is not None and nearest.number == 1


def test_a_forecast_refuses_only_what_is_far_from_its_gate() -> None:
    from compress.search.outcome import explain_foreseen_miss

    gates = [Gate("size_ratio", min=4.0)]
    assert explain_foreseen_miss(gates, {("size_ratio", "min"): 3.5}) == ""
    assert "foreseen to be 2, far from min 4" in explain_foreseen_miss(gates, {("size_ratio", "min"): 2.0})
