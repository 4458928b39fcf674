"""Claim about gates: on the edge of its bound a gate passes wrongly in at most 3 % of runs, and fails wrongly in 3 %.

Evaluation sets and fresh processes are simulated whose true values are known, every gate is put exactly on the truth,
and the product itself judges them: `runtime.judge.evidence` makes the interval and `runtime.judge.gates` the verdict. A
two-sided interval of 95 % promises 2.5 % to either side; a gate that is undecided breaks no promise. Every kind of
metric and every rule is simulated, on shapes from normal to lognormal with sigma 2, at 10 to 5,000 samples and 3 to 20
processes.
The rules of one metric and shape are judged on the same draws. No recipes/ are needed.

Each cell is drawn 4,000 times, from 1,000 samples on 2,000 times (400 with --quick). Chance alone puts a true 2.5 %
above 3 % in one cell of fifty, so a cell above 3 % is drawn up to 20,000 times; the claim fails where 3 % itself would
give so many in fewer than one run of a thousand (exact binomial bound).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from common import Call, Claim, Measured, Row, at_least, at_most, run_script, say
from simulated_quality import SIZES, Rule, Subject, quality_subjects
from simulated_times import time_subjects

from runtime.bundle.format import Gate, Judgement
from runtime.judge.gates import judge
from runtime.stats import proportion_interval

NEEDS = ()
ALLOWED = 0.03
QUICK_SIZES = (30, 100, 500)
RUNS, MOST_RUNS = 4000, 20_000
LARGE, LARGE_RUNS = 1000, 2000
"""From so many samples on, so many runs to begin with."""
QUICK_RUNS = 400
CHANCE = 0.001
"""How seldom 3 % itself would give as many wrong verdicts as a cell must have for the claim to fail."""


def judge_at_the_edge(subject: Subject, n: int, runs: range) -> dict[Rule, dict[str, int]]:
    """How often each rule of the subject passed, failed and was undecided, its bound being the truth."""
    gates = tuple(
        Gate(metric, **{rule: truth})  # type: ignore[arg-type]
        for (metric, rule), truth in subject.truths.items()
    )
    judgement = Judgement(gates=gates)
    counts = {rule: {"pass": 0, "fail": 0, "undecided": 0} for rule in subject.truths}
    label = zlib.crc32(f"{subject.name} {subject.shape} {n}".encode())
    for run in runs:
        evidence = subject.draw(np.random.default_rng((label, run)), n)
        for rule, result in zip(subject.truths, judge(judgement, evidence), strict=True):
            counts[rule][result.verdict] += 1
    return counts


def subjects() -> Iterator[Subject]:
    yield from quality_subjects()
    yield from time_subjects()


def measure(call: Call) -> Measured:
    rows = [row for subject in subjects() for row in measure_subject(call, subject)]
    return claims(rows), rows


def measure_subject(call: Call, subject: Subject) -> list[Row]:
    rows: list[Row] = []
    for n in subject.sizes:
        if not call.quick or n in QUICK_SIZES or n < min(SIZES):
            runs = LARGE_RUNS if n >= LARGE else RUNS
            rows += measure_cell(subject, n, *((QUICK_RUNS, QUICK_RUNS) if call.quick else (runs, MOST_RUNS)))
    say(f"{subject.name}, {subject.shape}: {sum(row['exceeds'] for row in rows)} of {len(rows)} cells wrong too often")
    return rows


def measure_cell(subject: Subject, n: int, runs: int, most: int) -> list[Row]:
    """A row for each rule. Where one is wrong in more than ALLOWED, the cell is drawn again, up to `most` times."""
    counts = judge_at_the_edge(subject, n, range(runs))
    while runs < most and any(max(c["pass"], c["fail"]) > ALLOWED * runs for c in counts.values()):
        further = judge_at_the_edge(subject, n, range(runs, min(most, 3 * runs)))
        counts = {rule: {verdict: c[verdict] + further[rule][verdict] for verdict in c} for rule, c in counts.items()}
        runs = min(most, 3 * runs)
    return [
        {
            "metric": metric,
            "rule": rule,
            "shape": subject.shape,
            "n": n,
            "runs": runs,
            "wrong_pass": c["pass"] / runs,
            "wrong_fail": c["fail"] / runs,
            "undecided": c["undecided"] / runs,
            "exceeds": exceeds(max(c["pass"], c["fail"]), runs),
        }
        for (metric, rule), c in counts.items()
    ]


def exceeds(wrong: int, runs: int) -> bool:
    """Whether so many wrong verdicts are more than a share of ALLOWED explains."""
    return proportion_interval(wrong, runs, 1 - 2 * CHANCE).low > ALLOWED


def claims(rows: Sequence[Row]) -> list[Claim]:
    decided = [row for row in rows if row["undecided"] < 1]
    return [
        at_most("cells_wrong_in_more_than_3_percent", sum(row["exceeds"] for row in rows), 0),
        at_least("cells_in_which_some_runs_are_decided", len(decided), 1),
    ]


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
