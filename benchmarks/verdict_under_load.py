"""Claims about verdicts on speed beside other work: they are right, they are made, their intervals hold the truth.

Pairs of models whose truth is known are judged again and again, as `compress-run validate` times them: alone, beside a
spinning process, beside bursts of 50 to 500 ms, and beside a `compress apply`. The truth of a pair is the median of 50
idle processes, of judgements one after the other: each process lasts as long as in any other judgement. Gates lie on
both sides of it, none within 3 %. Over all cells together: at most 2 % of verdicts are wrong, at most 5 % of those
whose gate is 1.15 times or more away are undecided, at least 90 % of the intervals hold the truth, and a verdict of a
model of a millisecond takes 30 s in the median.

What is measured is kept in WORK/verdicts.json, or in the file that COMPRESS_VERDICTS names; a run that was broken off
goes on there. It must begin on an idle machine, and takes 40 minutes (--quick: ten minutes, which decide nothing).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, Call, Claim, Measured, Row, at_least, at_most, run_script, say

from runtime.bundle.format import (
    Artifact,
    Benchmark,
    Gate,
    Judgement,
    Manifest,
    read_samples,
    write_outputs,
    write_samples,
)
from runtime.bundle.tensors import TensorSpec
from runtime.clock.graphs import Node, write_model
from runtime.judge.gates import judge
from runtime.judge.speed import make_evidence, speed_evidence
from runtime.measure.benchmark import measure
from runtime.stats import Estimate, exact
from runtime.tasks.manifest import write_bundle

NEEDS = ()
IDLE_PROCESSES, QUICK_PROCESSES = 50, 6
VERDICTS, QUICK_VERDICTS = 7, 1
"""Of each pair in each surrounding."""
BOUNDS = (0.7, 1 / 1.15, 1 / 1.06, 1 / 1.035, 1.035, 1.06, 1.15, 1.4)
"""Gates, as multiples of the truth."""
FAR = 1.15
SPIN = "while True: pass"
BURSTS = """
import random, time
while True:
    until = time.perf_counter() + random.uniform(0.05, 0.5)
    while time.perf_counter() < until: pass
    time.sleep(random.uniform(0.05, 0.5))
"""
APPLY = """
import subprocess, sys, tempfile
while True:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "compress", "apply", "recipes/quickstart.yaml", "--out", folder + "/b",
                        "--cache", folder + "/c", "--quiet"], capture_output=True)
"""
SURROUNDINGS = {"alone": "", "beside a spinning process": SPIN, "beside bursts": BURSTS, "beside an apply": APPLY}


def chain(width: int, layers: int, rows: int) -> bytes:
    """Return a model of so many products x [rows, width] W, each followed by a Relu."""
    rng, nodes, weights, current = np.random.default_rng(0), list[Node](), dict[str, np.ndarray](), "x"
    for number in range(layers):
        weights[f"w{number}"] = rng.normal(size=(width, width)).astype(np.float32) / np.float32(np.sqrt(width))
        nodes += [
            ("MatMul", [current, f"w{number}"], [f"m{number}"], {}),
            ("Relu", [f"m{number}"], [f"r{number}" if number + 1 < layers else "y"], {}),
        ]
        current = f"r{number}"
    shape = ("float32", (rows, width))
    return write_model(nodes, weights, {"x": shape}, {"y": shape})


PAIRS = {
    "the same model twice": ((128, 12, 128), (128, 12, 128)),
    "near 1.9": ((128, 19, 128), (128, 10, 128)),
    "near 1.25": ((128, 15, 128), (128, 12, 128)),
    "near 0.8": ((128, 12, 128), (128, 15, 128)),
    "bound by memory": ((2048, 10, 1), (2048, 8, 1)),
}
"""Width, layers and rows of each pair's two models; the last reads 160 and 128 MiB of weights in a call."""


def make_bundle(root: Path, pair: tuple[tuple[int, int, int], tuple[int, int, int]]) -> Manifest:
    """Write a bundle of two models without samples that anything is judged by but time."""
    artifacts = []
    (_, _, rows), width = pair[0], pair[0][0]
    samples = {"x": np.random.default_rng(1).normal(size=(4 * rows, width)).astype(np.float32)}
    for name, folder, sizes in (("baseline", "baseline", pair[0]), ("candidate", "model", pair[1])):
        path = root / folder / "model.onnx"
        path.parent.mkdir(parents=True)
        path.write_bytes(chain(*sizes))
        x, y = (TensorSpec(tensor, "float32", (rows, width)) for tensor in ("x", "y"))
        size = path.stat().st_size
        artifacts.append(Artifact(name, f"{folder}/model.onnx", "onnxruntime-cpu", "float32", (x,), (y,), size))
    write_outputs(root, {"y": samples["x"]})
    manifest = Manifest(
        name=root.name,
        task="generic",
        target="onnxruntime-cpu",
        artifacts=tuple(artifacts),
        preprocess={"kind": "tensor"},
        evaluation=write_samples(root, samples),
        judgement=Judgement(benchmark=Benchmark(batch_size=rows, throughput_batch_size=rows)),
        created_by="benchmarks/verdict_under_load.py",
    )
    return write_bundle(root, manifest)


def time_pair(root: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the speed-up that one judgement finds and in each of its processes, its interval, what it took, and what
    others took."""
    gates = (Gate("latency_p50", min_speedup=1.0),)
    asked = replace(manifest, judgement=replace(manifest.judgement, gates=gates))
    begun = time.monotonic()
    result = measure(root, asked, read_samples(root, asked), "onnxruntime-cpu")
    speedup = speed_evidence(result, asked.judgement)["latency_p50"].speedup
    assert speedup is not None and result.calls is not None
    medians = np.median(result.calls, axis=3)  # [processes, models, rounds]
    return {
        "value": speedup.value,
        "interval": [speedup.low, speedup.high],
        "seconds": time.monotonic() - begun,
        "taken": result.taken,
        "processes": np.median(medians[:, 0] / medians[:, 1], axis=1).tolist(),
    }


def find_truth(root: Path, manifest: Manifest, least: int) -> dict[str, Any]:
    """Return the median of at least so many processes of judgements, and how far these judgements lie apart."""
    judged: list[dict[str, Any]] = []
    while sum(len(each["processes"]) for each in judged) < least:
        judged.append(time_pair(root, manifest))
    values = [each["value"] for each in judged]
    pooled = [ratio for each in judged for ratio in each["processes"]]
    seconds = sum(each["seconds"] for each in judged)
    return {"value": float(np.median(pooled)), "interval": [min(values), max(values)], "seconds": seconds}


@contextmanager
def surroundings(code: str) -> Iterator[None]:
    """Run other work while the context is open."""
    if not code:
        yield
        return
    work = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    try:
        time.sleep(1.0)
        yield
    finally:
        os.killpg(work.pid, 9)
        work.wait()


def measure_all(call: Call) -> Measured:
    kept = Path(os.environ.get("COMPRESS_VERDICTS", call.out / "verdicts.json"))
    seen: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}

    def remember(key: str, work: Any) -> Any:
        if key not in seen:
            seen[key] = work()
            kept.write_text(json.dumps(seen, indent=1))
            say(f"{key}: {seen[key]['value']:.4f} {seen[key]['interval']} in {seen[key]['seconds']:.0f} s")
        return seen[key]

    bundles = {}
    for number, (name, pair) in enumerate(PAIRS.items()):
        root = call.out / str(number)
        bundles[name] = root, make_bundle(root, pair)
    processes = QUICK_PROCESSES if call.quick else IDLE_PROCESSES
    truths = {}
    for name, (root, manifest) in bundles.items():
        key, work = f"truth of {processes}, {name}", partial(find_truth, root, manifest, processes)
        truths[name] = remember(key, work)["value"]
    rows: list[Row] = []
    for number in range(QUICK_VERDICTS if call.quick else VERDICTS):
        for around, code in SURROUNDINGS.items():
            with surroundings("" if all(f"{number}, {around}, {name}" in seen for name in bundles) else code):
                for name, given in bundles.items():
                    found = remember(f"{number}, {around}, {name}", lambda given=given: time_pair(*given))
                    rows.append({"model": name, "backend": around, "truth": truths[name], **found})
    return claims(rows), list(summarize(rows))


def decide(row: Row, bound: float) -> str:
    """Return the verdict of a gate from the interval that a judgement found."""
    speedup = Estimate(row["value"], row["interval"][0], row["interval"][1], "")
    evidence = make_evidence("latency_p50", 9, before=exact(1.0), after=exact(1.0), difference=None, speedup=speedup)
    (result,) = judge(Judgement(gates=(Gate("latency_p50", min_speedup=bound),)), {"latency_p50": evidence})
    return result.verdict


def count(rows: list[Row]) -> Mapping[str, float]:
    """Return the shares of wrong and of undecided verdicts, of intervals that hold the truth, and the seconds."""
    wrong = undecided = far = gates = 0
    for row in rows:
        for factor in BOUNDS:
            verdict, right = decide(row, row["truth"] * factor), "pass" if factor < 1 else "fail"
            gates += 1
            wrong += verdict not in (right, "undecided")
            if max(factor, 1 / factor) >= FAR - 1e-9:
                far += 1
                undecided += verdict == "undecided"
    held = sum(row["interval"][0] <= row["truth"] <= row["interval"][1] for row in rows)
    return {
        "verdicts": gates,
        "wrong": wrong / gates,
        "undecided": undecided / far,
        "holds": held / len(rows),
        "seconds": float(np.median([row["seconds"] for row in rows])),
        "taken": float(np.median([row["taken"] for row in rows])),
    }


def summarize(rows: list[Row]) -> Iterator[Row]:
    for name in PAIRS:
        for around in SURROUNDINGS:
            some = [row for row in rows if (row["model"], row["backend"]) == (name, around)]
            yield {"model": name, "backend": around, "truth": round(some[0]["truth"], 4), **count(some)}


def claims(rows: list[Row]) -> list[Claim]:
    whole = count(rows)
    return [
        at_most("wrong_verdicts", whole["wrong"], 0.02),
        at_most("undecided_of_gates_1.15_away", whole["undecided"], 0.05),
        at_least("intervals_that_hold_the_truth", whole["holds"], 0.90),
        at_most("median_seconds_of_a_verdict", whole["seconds"], 30.0),
    ]


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure_all))
