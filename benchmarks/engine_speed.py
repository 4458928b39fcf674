"""Claims of recipes/claims/cifar10-resnet56-tensorrt-rtx.yaml on this machine's GPU: int8 beside the float engine.

For each of TensorRT and TensorRT for RTX that works here: the int8 engine gives what its graph gives in ONNX Runtime
(`compress parity`), loses at most 0.005 top-1, and by the GPU's own clock is not slower than the float32 engine. Rows
are all ways to run the bundle on this machine, ONNX Runtime on CUDA and on the CPU among them. It needs a GPU.
"""

from __future__ import annotations

import json
from typing import Any

from common import ROOT, Call, CallError, Claim, Measured, Row, apply_recipe, at_least, at_most, drop, run_script

from compress.commands.parity import bundle_parity
from runtime.backends import BACKENDS
from runtime.bundle.engine import ENGINES
from runtime.nvidia.gpu import gpu_here

RECIPE = ROOT / "recipes/claims" / "cifar10-resnet56-tensorrt-rtx.yaml"
NEEDS = ("models/cifar10-resnet56/model.safetensors", "data/cifar10/train.npz", "data/cifar10/test.npz")


def measure(call: Call) -> Measured:
    gpu = gpu_here()
    if gpu is None:
        raise CallError("there is no GPU that the driver sees; run it where there is one")
    working = [name for name in ENGINES if BACKENDS[name].available() is None]
    if not working:
        raise CallError("; ".join(f"{name}: {BACKENDS[name].available()}" for name in ENGINES))
    claims: list[Claim] = []
    rows: list[Row] = []
    for runtime in working:
        export = f"{{kind: {runtime}{f', compute_capabilities: [{gpu.capability!r}]' if 'rtx' in runtime else ''}}}"
        bundle = call.out / runtime
        sets = (f"vars.bench={call.bench}", f"target={runtime}", f"export=[{export}]")
        apply_recipe(RECIPE, sets, bundle, call.out / f"{runtime}-cache")
        report = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
        found, clock = bundle_parity(bundle, runtime), report["benchmark"].get("device_p50_ms")
        claims += [
            at_most(f"{runtime}: error beyond ONNX Runtime's", max(found.errors.values()), found.allowed),
            at_most(f"{runtime}: top1 drop", drop(report, "top1"), 0.005),
            at_least(f"{runtime}: int8 over float32 on the GPU", clock and clock["baseline"] / clock["candidate"], 1.0),
        ]
        rows += [{"model": f"{gpu.name}, {runtime} bundle", **way(one)} for one in report["backends"]]
    return claims, rows


def way(found: dict[str, Any]) -> Row:
    """One way to run the bundle, as its report has it."""
    kept = ("precision", "artifact", "speedup", "error")
    return {"backend": found["name"], **{key: found[key] for key in kept if key in found}}


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
