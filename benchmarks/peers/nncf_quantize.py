"""NNCF's post-training quantization: MODEL BATCHES OUT [--transformer]. ONNX in, ONNX out.

Its defaults but for the preset: MIXED, the asymmetric activations that it recommends for a CPU. With --transformer the
model type that brings SmoothQuant. Bias correction is the fast one in both cases: the full one stops on transformers in
ONNX ("Duplicate definition-site for .../nncf_smooth_quant_output", NNCF 3.4.0).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nncf
import onnx
from batches import read_batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "batches", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--transformer", action="store_true")
    call = parser.parse_args()
    batches = read_batches(call.batches)
    quantized = nncf.quantize(
        onnx.load(call.model),
        nncf.Dataset(batches),
        subset_size=len(batches),
        preset=nncf.QuantizationPreset.MIXED,
        model_type=nncf.ModelType.TRANSFORMER if call.transformer else None,
    )
    onnx.save(quantized, call.out)


if __name__ == "__main__":
    main()
