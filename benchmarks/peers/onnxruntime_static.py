"""ONNX Runtime's own quantizer, static: MODEL BATCHES OUT [OPERATOR...].

Prepared and called as its documentation says for a CPU: `quant_pre_process`, then Q/DQ, uint8 activations, int8 weights
per channel, MinMax; all operators that it knows, or those that are named. Symbolic shape inference is left out of the
preparation: it stops on transformer graphs of torch's exporter ("Incomplete symbolic shape inference").
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from batches import Batch, read_batches
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process


class Batches(CalibrationDataReader):
    """Hands out one batch after the other."""

    def __init__(self, batches: list[Batch]) -> None:
        self._left = iter(batches)

    def get_next(self) -> Batch | None:
        return next(self._left, None)


def main(model: str, batches: str, out: str, *operators: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(model, str(prepared), skip_symbolic_shape=True)
        quantize_static(
            str(prepared),
            out,
            Batches(read_batches(Path(batches))),
            op_types_to_quantize=list(operators) or None,
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            calibrate_method=CalibrationMethod.MinMax,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
