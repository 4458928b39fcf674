"""Claims of recipes/claims/minilm-int8.yaml: all-MiniLM-L6-v2 in int8 on the STS-B dev set and one CPU thread.

Against ONNX Runtime on the float model: Spearman drops by at most 0.002, the mean cosine of an embedding to the float
one is at least 0.996, the file takes at most 23.5 MB, and the median call on one text of 128 tokens is at least 2.2
times faster in ONNX Runtime and 3.3 times in OpenVINO. Beside it, not as claims: ONNX Runtime's own quantizers (static
on all operators as by default, static on MatMul only, dynamic) and NNCF, from the same float file and the same
calibration texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common import (
    ROOT,
    Call,
    CallError,
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
)
from measuring import (
    ONNXRUNTIME,
    OPENVINO,
    OPENVINO_FIXED,
    Entry,
    Timing,
    compare,
    find_row,
    make_peer_models,
    open_judged,
)

from runtime.backends import find_backend

RECIPE = ROOT / "recipes/claims" / "minilm-int8.yaml"
NEEDS = ("data/stsb/sts-train.csv", "data/stsb/sts-dev.csv")
METRICS = ("spearman", "cosine")
SPEED = "latency_p50_ratio"
TIMINGS = {SPEED: Timing(1, 100, 128)}


PEERS = (
    Peer("onnxruntime static", "onnxruntime_static.py"),
    Peer("onnxruntime static MatMul", "onnxruntime_static.py", ("MatMul",)),
    Peer("onnxruntime dynamic", "onnxruntime_dynamic.py", calibrated=False),
    Peer("nncf", "nncf_quantize.py", ("--transformer",), "nncf"),
)


def measure(call: Call) -> Measured:
    missing = find_backend(OPENVINO).available()
    if missing:
        raise CallError(missing)
    bundle, report = make_bundle(RECIPE, call)
    judged = open_judged(bundle)
    entries = [Entry("float", judged.float_model)]
    entries += [Entry("ours", judged.model_for(backend), backend) for backend in (ONNXRUNTIME, OPENVINO)]
    entries.append(Entry("ours", judged.model_for(OPENVINO), OPENVINO_FIXED))
    failures: list[Row] = []
    if not call.ours:
        made, failures = make_peer_models(PEERS, judged, RECIPE, call)
        entries += [Entry(name, path) for name, path in made.items()]
        entries.append(Entry("float", judged.float_model, OPENVINO))
        if "nncf" in made:
            entries += [Entry("nncf", made["nncf"], backend) for backend in (OPENVINO, OPENVINO_FIXED)]
    rows = compare(judged, entries, METRICS, TIMINGS)
    return claims(report, rows), rows + failures


def claims(report: Mapping[str, Any], rows: Sequence[Row]) -> list[Claim]:
    """Quality and size as report.json has them, speed as it was timed here."""
    return [
        at_least("evaluated_pairs", report["n_samples"], 1500),
        at_most("spearman_drop", drop(report, "spearman"), 0.002),
        at_least("cosine", metric(report, "candidate", "cosine"), 0.996),
        at_most("size_mb", report["candidate"]["size_bytes"] / 1e6, 23.5),
        at_least("latency_p50_ratio_onnxruntime", find_row(rows, "ours").get(SPEED), 2.2),
        at_least("latency_p50_ratio_openvino_fixed_shape", find_row(rows, "ours", OPENVINO_FIXED).get(SPEED), 3.3),
    ]


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
