"""Claims of recipes/claims/cifar10-resnet56-prune.yaml: ResNet-56 with a part removed, nothing trained, one CPU thread.

On 5,000 CIFAR-10 test images top-1 stays at 0.905 or more where the median call at batch 1 is at least 1.6 times as
fast as the float model's, in ONNX Runtime. Beside it, not as claims: Torch-Pruning, one shot at half the
multiplications, by its default grouping and with only the blocks' inner channels, rounded to 8.
"""

from __future__ import annotations

from common import (
    ROOT,
    Call,
    Claim,
    Measured,
    Peer,
    Row,
    RunError,
    at_least,
    make_bundle,
    metric,
    run_job,
    run_script,
    say,
)
from measuring import ONNXRUNTIME, Entry, Judged, Timing, compare, find_row, open_judged

RECIPE = ROOT / "recipes/claims" / "cifar10-resnet56-prune.yaml"
WEIGHTS = "models/cifar10-resnet56/model.safetensors"
NEEDS = (WEIGHTS, "data/cifar10/train.npz", "data/cifar10/test.npz")
TIMINGS = {"latency_p50_ratio_batch1": Timing(1, 300)}
PEER = Peer("torch-pruning", "torchpruning_oneshot.py", venv="torchpruning")
RATIOS = {"default": 0.35, "inner": 0.5}
"""Grouping -> the ratio of channels that halves the multiplications, nearly."""


def measure(call: Call) -> Measured:
    bundle, report = make_bundle(RECIPE, call)
    judged = open_judged(bundle)
    entries = [Entry("float", judged.float_model), Entry("ours", judged.model_for(ONNXRUNTIME))]
    more: dict[str, Row] = {}
    failures: list[Row] = []
    for grouping in () if call.ours else RATIOS:
        name = f"{PEER.name} {grouping}"
        try:
            entry, more[name] = peer_entry(grouping, judged, call)
            entries.append(entry)
        except RunError as error:
            say(f"{name}: {error}")
            failures.append({"model": name, "failed": str(error)})
    rows = compare(judged, entries, ("top1", "agreement"), TIMINGS)
    rows = [row | more.get(str(row["model"]), {}) for row in rows]
    ours = find_row(rows, "ours")
    claims: list[Claim] = [
        at_least("evaluated_images", report["n_samples"], 5000),
        at_least("top1", metric(report, "candidate", "top1"), 0.905),
        at_least("latency_p50_ratio_batch1", ours.get("latency_p50_ratio_batch1"), 1.6),
    ]
    return claims, rows + failures


def peer_entry(grouping: str, judged: Judged, call: Call) -> tuple[Entry, Row]:
    """The peer's model file, and what it says of it. RunError."""
    out = call.out / f"{PEER.slug}-{grouping}.onnx"
    job = {
        "network": ROOT / "compress" / "zoo" / "cifar_resnet.py",
        "factory": "resnet56",
        "weights": call.bench / WEIGHTS,
        "ratio": RATIOS[grouping],
        "grouping": grouping,
        "input": judged.manifest.artifact("baseline").inputs[0].name,
        "out": out,
    }
    answer = run_job(PEER, job, call.out, out.stem)
    return Entry(f"{PEER.name} {grouping}", out), {"macs_ratio": answer["macs_ratio"]}


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
