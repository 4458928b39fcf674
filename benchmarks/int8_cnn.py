"""Claims of recipes/claims/cifar10-resnet56-int8.yaml: ResNet-56 in int8, 5,000 CIFAR-10 test images, one CPU thread.

Against ONNX Runtime on the float model: top-1 drops by at most 0.002, at least 99.3 % of the answers stay, the file is
at least 3.2 times smaller, the median call at least 2.4 (batch 1) and 2.5 (batch 64) times faster. Beside it, not as
claims: ONNX Runtime's own static quantizer and NNCF, from the same float file and the same calibration images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common import (
    ROOT,
    Call,
    Claim,
    Measured,
    Peer,
    Row,
    at_least,
    at_most,
    drop,
    make_bundle,
    metric,
    run_script,
    size_ratio,
)
from measuring import (
    ONNXRUNTIME,
    OPENVINO,
    Entry,
    Timing,
    compare,
    find_row,
    make_peer_models,
    open_judged,
)

from runtime.backends import find_backend

RECIPE = ROOT / "recipes/claims" / "cifar10-resnet56-int8.yaml"
NEEDS = ("models/cifar10-resnet56/model.safetensors", "data/cifar10/train.npz", "data/cifar10/test.npz")
METRICS = ("top1", "agreement")
TIMINGS = {"latency_p50_ratio_batch1": Timing(1, 300), "latency_p50_ratio_batch64": Timing(64, 60)}


PEERS = (Peer("onnxruntime static", "onnxruntime_static.py"), Peer("nncf", "nncf_quantize.py", venv="nncf"))


def measure(call: Call) -> Measured:
    bundle, report = make_bundle(RECIPE, call)
    judged = open_judged(bundle)
    entries = [Entry("float", judged.float_model), Entry("ours", judged.model_for(ONNXRUNTIME))]
    failures: list[Row] = []
    if not call.ours:
        made, failures = make_peer_models(PEERS, judged, RECIPE, call)
        entries += [Entry(name, path) for name, path in made.items()]
        missing = find_backend(OPENVINO).available()
        if missing:
            failures.append({"model": "all", "backend": OPENVINO, "failed": missing})
        else:
            models = {"float": judged.float_model, "ours": judged.model_for(OPENVINO), **made}
            entries += [Entry(name, path, OPENVINO) for name, path in models.items()]
    rows = compare(judged, entries, METRICS, TIMINGS)
    return claims(report, rows), rows + failures


def claims(report: Mapping[str, Any], rows: Sequence[Row]) -> list[Claim]:
    """Quality and size as report.json has them, speed as it was timed here."""
    ours = find_row(rows, "ours")
    return [
        at_least("evaluated_images", report["n_samples"], 5000),
        at_most("top1_drop", drop(report, "top1"), 0.002),
        at_least("agreement", metric(report, "candidate", "agreement"), 0.993),
        at_least("size_ratio", size_ratio(report), 3.2),
        at_least("latency_p50_ratio_batch1", ours.get("latency_p50_ratio_batch1"), 2.4),
        at_least("latency_p50_ratio_batch64", ours.get("latency_p50_ratio_batch64"), 2.5),
    ]


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
