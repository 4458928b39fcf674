"""NNCF's post-training quantization: MODEL BATCHES OUT [--transformer]. ONNX in, ONNX out.

The preset is the one that its documentation gives for the kind of model: MIXED (asymmetric activations) with fast bias
correction for a CNN; model type TRANSFORMER, SmoothQuant and the full bias correction for an encoder.
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
        fast_bias_correction=True,
    )
    onnx.save(quantized, call.out)


if __name__ == "__main__":
    main()
