"""ONNX Runtime's own quantizer, dynamic: MODEL OUT. Int8 weights per channel, activations quantized as they come."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic


def without_initializer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without the value_info entries that are named after initializers, changed in place.

    torch's exporter writes them; `quantize_dynamic` stores some of these initializers transposed, then infers shapes
    and stops at the contradiction ("Inferred shape and existing shape differ").
    """
    names = {initializer.name for initializer in model.graph.initializer}
    kept = [info for info in model.graph.value_info if info.name not in names]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    return model


def main(model: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.onnx"
        onnx.save(without_initializer_shapes(onnx.load(model)), prepared)
        quantize_dynamic(str(prepared), str(out), weight_type=QuantType.QInt8, per_channel=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
