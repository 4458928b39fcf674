"""Claims about `compress compare`: at most 5 % of comparisons call real what does not differ, and what does is found.

Simulated, on 100 to 2,000 samples: two candidates equally far from one float model, whose difference is chance; and one
of them a little farther. Measured, on recipes/quickstart.yaml: one bundle judged again and again, every two runs being
compared in speed; two builds with two seeds; and its last layer in 2 bits. No files of the bench folder are needed.

Every simulated cell is drawn 1,000 times (100 with --quick). The bundle is judged 10 times (3 with --quick), each time
in a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
from common import (
    ROOT,
    Call,
    Claim,
    Measured,
    Row,
    RunError,
    apply_recipe,
    at_least,
    at_most,
    run_child,
    run_script,
    say,
)

from runtime.bundle.format import Judgement
from runtime.judge.evidence import quality_evidence
from runtime.judge.findings import Comparison, Side, side
from runtime.judge.samples import EvaluatedOn
from runtime.report.pairing import compare_reports
from runtime.report.report import Report
from runtime.report.stored import StoredReport, read_stored_report
from runtime.stats import proportion_interval
from runtime.tasks.metrics import METRICS

NEEDS = ()
STATED = 0.05
"""The share of comparisons that may call a difference real which is none."""
CHANCE = 0.001
SIZES = (100, 500, 2000)
METRICS_OF_CLASSES = ("top1", "top5", "f1_macro", "ece", "agreement", "kl", "cosine", "sqnr_db", "mse_baseline")
NOISE, MORE_NOISE = 0.3, 0.45
"""Of the logits, which have a standard deviation of 1: of both candidates, and of the one that is farther."""
RUNS, QUICK_RUNS, JUDGEMENTS, QUICK_JUDGEMENTS = 1000, 100, 10, 3
QUICKSTART = ROOT / "recipes/quickstart.yaml"
TWO_BITS = "passes=[{kind: rtn, bits: 2, group_size: 16}, {kind: int8}]"


def measure(call: Call) -> Measured:
    rows = [row for n in SIZES for row in simulate(n, QUICK_RUNS if call.quick else RUNS)]
    rows += judge_again(call)
    return claims(rows), rows


def simulate(n: int, runs: int) -> Iterator[Row]:
    """Yield how often anything was called real of two candidates that differ by chance, and that differ."""
    for noise in (NOISE, MORE_NOISE):
        compared = [compare_once(n, noise, np.random.default_rng((run, n))) for run in range(runs)]
        real = sum(bool(found.find("better") or found.find("worse")) for found in compared)
        seen = sum("kl" in {difference.metric for difference in found.find("worse")} for found in compared)
        yield {"what": f"noise {noise:g}", "n": n, "compared": runs, "real": real, "kl_worse": seen}
        say(f"{n} samples, noise {NOISE:g} and {noise:g}: {real} of {runs} called real")


def compare_once(n: int, noise: float, rng: np.random.Generator) -> Comparison:
    logits = rng.normal(size=(n, 10))
    labels = (logits + rng.normal(size=logits.shape)).argmax(axis=1)
    stored = []
    for name, of_model in (("a", NOISE), ("b", noise)):
        outputs = {"logits": logits + of_model * rng.normal(size=logits.shape)}
        metrics = [METRICS[metric] for metric in METRICS_OF_CLASSES]
        evidence = quality_evidence(metrics, outputs, {"logits": logits}, labels, Judgement())
        report = Report("pass", name, "", Side(), side(evidence, "candidate", None), evaluation=EvaluatedOn("", ("",)))
        stored.append(StoredReport(name, report, {metric: known.columns for metric, known in evidence.items()}))
    return compare_reports(stored)[0]


def judge_again(call: Call) -> Iterator[Row]:
    """Yield what real runs and builds of the quickstart come to."""
    bundles = {name: call.out / name for name in ("seed 0", "seed 1", "2 bits")}
    sets = {"seed 0": "seed=0", "seed 1": "seed=1", "2 bits": TWO_BITS}
    for name, bundle in bundles.items():
        apply_recipe(QUICKSTART, ("validate.steps=false", sets[name]), bundle, call.out / "cache")
    reports = [judge_bundle(bundles["seed 0"], call.out / f"run{run}") for run in range(count_judgements(call))]
    pairs = [compare_reports(pair)[0] for pair in combinations(reports, 2)]
    speeds = [[d for d in found.differences if d.scale == "ratio" and d.verdict != "not known"] for found in pairs]
    medians = [stored.report.ratios["latency_p50"] for stored in reports]
    yield {
        "what": "one bundle, every two runs",
        "compared": len(pairs),
        "real": sum(any(d.verdict != "within noise" for d in found) for found in speeds),
        "p50_speedup_low": min(medians),
        "p50_speedup_high": max(medians),
    }
    stored = {name: read_stored_report(bundle) for name, bundle in bundles.items()}
    for name in ("seed 1", "2 bits"):
        (found,) = compare_reports([stored["seed 0"], stored[name]])
        worse, better = ([d.metric for d in found.find(verdict)] for verdict in ("worse", "better"))
        yield {"what": f"seed 0 and {name}", "compared": 1, "real": len(worse + better), "kl_worse": int("kl" in worse)}
        say(f"seed 0 and {name}: worse {worse}, better {better}")


def count_judgements(call: Call) -> int:
    return QUICK_JUDGEMENTS if call.quick else JUDGEMENTS


def judge_bundle(bundle: Path, folder: Path) -> StoredReport:
    """Judge a bundle in a fresh process; its report, under the run's name."""
    command = [sys.executable, "-m", "runtime", "validate", str(bundle), "--report", str(folder)]
    code, _ = run_child([*command, "--backend", "onnxruntime-cpu"])
    if code not in (0, 3):
        raise RunError(f"compress-run validate ended with exit code {code}")
    stored = read_stored_report(folder)
    return replace(stored, name=folder.name)


def claims(rows: list[Row]) -> list[Claim]:
    simulated = [row for row in rows if row.get("n")]
    same = [row for row in simulated if row["what"] == f"noise {NOISE:g}"]
    farther = [row for row in simulated if row not in same and row["n"] > min(SIZES)]
    runs, seeds, two_bits = rows[-3:]
    return [
        at_most("cells_with_more_than_5_percent_called_real", sum(map(exceeds, same)), 0),
        at_least("planted_found", min(row["kl_worse"] / row["compared"] for row in farther), 0.95),
        at_most("pairs_of_runs_of_one_bundle_with_a_real_speed", float(exceeds(runs)), 0),
        at_most("two_seeds_real", seeds["real"], 0),
        at_least("two_bits_kl_worse", two_bits["kl_worse"], 1),
    ]


def exceeds(row: Row) -> bool:
    """Whether so many comparisons that call something real are more than a share of STATED explains."""
    return proportion_interval(row["real"], row["compared"], 1 - 2 * CHANCE).low > STATED


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
