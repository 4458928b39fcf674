"""Claims of recipes/claims/cifar10-resnet56-prune-distill.yaml, -prune-distill-int8.yaml: ResNet-56 distilled, in int8.

Against ONNX Runtime on the float model, one CPU thread, 5,000 CIFAR-10 test images. Blocks removed and the rest taught,
in float: the median call at batch 1 at least 1.6 times as fast, top-1 lower by at most 0.01. Channels removed, too, and
in int8: at least 3.5 times as fast, the file at least 6 times smaller, top-1 lower by at most 0.013. Each training is
bounded to 20 minutes by its recipe. There is no peer: no other tool chains these. Its rows are the passes of the second
chain, as the report has them.
"""

from __future__ import annotations

from common import ROOT, Call, Measured, at_least, at_most, drop, make_bundle, run_recipe, run_script, size_ratio
from measuring import ONNXRUNTIME, Entry, Timing, compare, find_row, open_judged

RECIPE = ROOT / "recipes/claims" / "cifar10-resnet56-prune-distill-int8.yaml"
TAUGHT = ROOT / "recipes/claims" / "cifar10-resnet56-prune-distill.yaml"
NEEDS = ("models/cifar10-resnet56/model.safetensors", "data/cifar10/train.npz", "data/cifar10/test.npz")
TIMINGS = {"latency_p50_ratio_batch1": Timing(1, 300), "latency_p50_ratio_batch64": Timing(64, 60)}


def measure(call: Call) -> Measured:
    _, taught = run_recipe(TAUGHT, call, "taught")
    bundle, report = make_bundle(RECIPE, call)
    judged = open_judged(bundle)
    entries = [Entry("float", judged.float_model), Entry("ours", judged.model_for(ONNXRUNTIME))]
    rows = compare(judged, entries, ("top1", "agreement"), TIMINGS)
    ours = find_row(rows, "ours")
    claims = [
        at_least("evaluated_images", report["n_samples"], 5000),
        at_most("taught_top1_drop", drop(taught, "top1"), 0.01),
        at_least("taught_latency_p50_ratio_batch1", taught["ratios"]["latency_p50"], 1.6),
        at_most("top1_drop", drop(report, "top1"), 0.013),
        at_least("size_ratio", size_ratio(report), 6.0),
        at_least("latency_p50_ratio_batch1", ours.get("latency_p50_ratio_batch1"), 3.5),
    ]
    return claims, rows


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
