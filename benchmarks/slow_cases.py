"""Five files that are no faster than the float models they came from, each named by its cause from the profile.

MiniLM at 128 tokens: quantized by ONNX Runtime's own tool with signed activations; its weights in 4 bits, computed in
float32 (accuracy_level 0); the same at level 4 in calls of 16 texts. A face detector whose batch norms were not folded,
with Q and DQ around its convolutions by the same tool. ResNet-20, its channels pruned to whatever widths remain. The
claim is that the cause comes first of those that the profile gives, and that none is given for the two that are fast:
MiniLM and the detector in int8 by recipes/claims/minilm-int8.yaml and ultraface-int8.yaml. Speed stands beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from common import ROOT, Call, Claim, Measured, Row, at_least, run_recipe, run_script
from measuring import ONNXRUNTIME, THREADS, Entry, feeds_for, open_judged, speedups

from compress.graph.cleanup import CleanUp, raise_opset
from runtime.clock.peaks import measure_peaks, time_products
from runtime.judge.twins import ProfiledPair
from runtime.judge.why import Explanation, explain
from runtime.measure.profile_models import ProfileOrder, profile_models

NEEDS = (
    *("data/stsb/sts-train.csv", "data/stsb/sts-dev.csv", "data/cifar10/test.npz", "data/bccd/JPEGImages"),
    *("models/ultraface-slim/version-slim-320.onnx", "models/cifar10-resnet20/model.safetensors"),
)
CLAIMS = ROOT / "recipes/claims"
ROUNDS, QUICK_ROUNDS = 40, 5
LENGTH, MANY = 128, 16
BLOCK = 32
FAST = "none"
ODD_WIDTHS = {
    "version": 1,
    "name": "resnet20-odd",
    "vars": {"bench": "${env:COMPRESS_BENCH:-bench}"},
    "model": {
        "source": "python:compress.zoo.cifar_resnet:resnet20",
        "weights": "${bench}/models/cifar10-resnet20/model.safetensors",
        "task": "image-classification",
    },
    "preprocess": {"kind": "image", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
    "data": {
        "calibration": {"source": "npz:${bench}/data/cifar10/train.npz", "samples": 256},
        "evaluation": {"source": "npz:${bench}/data/cifar10/test.npz", "samples": 512},
    },
    "target": ONNXRUNTIME,
    "passes": [{"kind": "prune_channels", "ratio": 0.3, "round_to": 1}],
    "validate": {"benchmark": {"iterations": 30}},
}
Batch = Mapping[str, np.ndarray]


def measure(call: Call) -> Measured:
    claims: list[Claim] = []
    rows: list[Row] = []
    cases = list_cases(call)
    for name in call.choose(cases, quick=2):
        before, after, feeds, cause = cases[name]()
        rounds = QUICK_ROUNDS if call.quick else ROUNDS
        _, speedup = speedups([Entry("float", before), Entry(name, after)], [dict(feeds)], rounds)
        found = explain_files(before, after, feeds)
        kinds = [told.kind for told in found.causes] or [FAST]
        claims.append(at_least(f"{name}: {cause} comes first", float(kinds[0] == cause), 1))
        row: Row = {"model": name, "backend": ONNXRUNTIME, "speedup": speedup, "causes": ", ".join(kinds)}
        rows.append(row | ({"first": found.causes[0].sentence} if found.causes else {}))
    return claims, rows


Case = Callable[[], tuple[Path, Path, Batch, str]]
"""Makes (float model, candidate, a batch, the cause that is expected)."""


def list_cases(call: Call) -> dict[str, Case]:
    """Return each case by its name; nothing is made before it is asked for."""
    made: dict[str, Path] = {}

    def bundle(recipe: Path, sets: Sequence[str] = ()) -> Any:
        if recipe.stem not in made:
            made[recipe.stem], _ = run_recipe(recipe, call, recipe.stem, sets)
        return open_judged(made[recipe.stem])

    def minilm(make: Callable[[Path, Path, Batch], None] | None, cause: str, size: int = 1) -> Any:
        judged = bundle(CLAIMS / "minilm-int8.yaml")
        feeds = feeds_for(judged, size, LENGTH)[0]
        if make is None:
            return judged.float_model, judged.model_for(ONNXRUNTIME), feeds, cause
        out = call.out / f"{cause}.onnx"
        make(judged.float_model, out, feeds)
        return judged.float_model, out, feeds, cause

    def detector(quantize: bool) -> Any:
        judged = bundle(CLAIMS / "ultraface-int8.yaml")
        feeds = feeds_for(judged, 1)[0]
        if not quantize:
            return judged.float_model, judged.model_for(ONNXRUNTIME), feeds, FAST
        source, out = call.bench / NEEDS[4], call.out / "unfused.onnx"
        raised = call.out / "raised.onnx"
        graph = ir.load(source)
        raise_opset(graph, CleanUp())  # batch norms stay; the tool's scales by channel need more than opset 9
        ir.save(graph, raised)
        write_static(raised, out, feeds, signed=False, operators=["Conv"])
        return source, out, feeds, "unfused_qdq"

    def odd_widths() -> Any:
        recipe = call.out / "resnet20-odd.yaml"
        recipe.write_text(json.dumps(ODD_WIDTHS), encoding="utf-8")
        judged = bundle(recipe)
        return judged.float_model, judged.model_for(ONNXRUNTIME), feeds_for(judged, 1)[0], "odd_widths"

    return {
        "MiniLM, signed activations": partial(minilm, write_static, "signed_activations"),
        "MiniLM, 4 bits at level 0": partial(minilm, partial(write_few_bits, level=0), "computed_in_float"),
        "MiniLM, 4 bits, 16 texts": partial(minilm, partial(write_few_bits, level=4), "compute_bound", MANY),
        "detector, Q and DQ around batch norm": partial(detector, True),
        "ResNet-20, odd widths": odd_widths,
        "MiniLM, int8": partial(minilm, None, FAST),
        "detector, int8": partial(detector, False),
    }


def write_static(model: Path, out: Path, feeds: Batch, signed: bool = True, operators: Sequence[str] = ()) -> None:
    """Quantize by ONNX Runtime's tool, all operators or some, calibrated on one batch."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class OneBatch(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter([dict(feeds)])

        def get_next(self) -> Batch | None:
            return next(self.left, None)

    quantize_static(
        str(model),
        str(out),
        OneBatch(),
        op_types_to_quantize=list(operators) or None,
        activation_type=QuantType.QInt8 if signed else QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
        extra_options={"ActivationSymmetric": signed},
    )


def write_few_bits(model: Path, out: Path, feeds: Batch, level: int) -> None:
    """Round the weights to 4 bits by ONNX Runtime's tool, to be computed at an accuracy_level."""
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(model), block_size=BLOCK, is_symmetric=True, accuracy_level=level)
    quantizer.process()
    quantizer.model.save_model_to_file(str(out))


def explain_files(before: Path, after: Path, feeds: Batch) -> Explanation:
    """Explain a file against the float one."""
    orders = [ProfileOrder(path, dict(feeds)) for path in (before, after)]
    first, second = profile_models(ONNXRUNTIME, THREADS, orders)
    peaks, earlier_peaks = (measure_peaks(ONNXRUNTIME, THREADS, profile.n_bytes) for profile in (second, first))
    return explain(ProfiledPair(second, first, peaks, earlier_peaks, partial(time_products, ONNXRUNTIME, THREADS)))


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
