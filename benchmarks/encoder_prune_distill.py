"""Claims of recipes/claims/minilm-prune-distill-int8.yaml and minilm-3-layers.yaml: all-MiniLM-L6-v2 made smaller.

On the 1,500 pairs of STS-B dev and one CPU thread, against ONNX Runtime on the float model, one text of 128 tokens:
once pruned and distilled at least 2 times as fast with a Spearman correlation of 0.84 or more, in int8 at least 4.5
times as fast; a student of three of the six layers at least 1.8 times as fast with 0.83. Training reads sentences of
SST-2 and STS-B, no labels. The figures of the first recipe's passes are those of its report. No peer does all of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import ROOT, Call, Claim, Measured, Row, at_least, metric, run_recipe, run_script
from measuring import ONNXRUNTIME, Entry, Timing, compare, find_row, open_judged

CHAIN, STUDENT = (ROOT / "recipes/claims" / name for name in ("minilm-prune-distill-int8.yaml", "minilm-3-layers.yaml"))
NEEDS = ("data/stsb/sts-train.csv", "data/stsb/sts-dev.csv", "data/sst2/train.tsv")
SPEED = "latency_p50_ratio"
TIMINGS = {SPEED: Timing(1, 100, 128)}
QUICK = ("passes.2.epochs=0.1",), ("passes.0.epochs=0.1",)


def measure(call: Call) -> Measured:
    quick = QUICK if call.quick else ((), ())
    chain, report = run_recipe(CHAIN, call, "chain", quick[0])
    student, other = run_recipe(STUDENT, call, "student", quick[1])
    rows = pass_rows(chain) + timed(chain, "chain") + timed(student, "3 layers")
    taught = find_row(rows, "distill", "step")
    claims: list[Claim] = [
        at_least("evaluated_pairs", report["n_samples"], 1500),
        at_least("distilled_spearman", taught.get("spearman"), 0.84),
        at_least("distilled_latency_p50_ratio", taught.get(SPEED), 2.0),
        at_least("int8_latency_p50_ratio", find_row(rows, "chain").get(SPEED), 4.5),
        at_least("3_layers_spearman", metric(other, "candidate", "spearman"), 0.83),
        at_least("3_layers_latency_p50_ratio", find_row(rows, "3 layers").get(SPEED), 1.8),
    ]
    return claims, rows


def pass_rows(bundle: Path) -> list[Row]:
    """A row for each pass of the chain, as its report has it."""
    table: dict[str, Any] = json.loads((bundle / "report.steps.json").read_text(encoding="utf-8"))
    return [
        {"model": one["name"], "backend": "step", "size_ratio": one["smaller"], SPEED: one["faster"], **one["metrics"]}
        for one in table["rows"]
    ]


def timed(bundle: Path, name: str) -> list[Row]:
    """The bundle's model beside its float one."""
    judged = open_judged(bundle)
    entries = [Entry("float", judged.float_model), Entry(name, judged.model_for(ONNXRUNTIME))]
    return compare(judged, entries, ("spearman",), TIMINGS)[1:]


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
