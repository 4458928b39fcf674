"""NNCF's weight compression for OpenVINO: MODEL OUT GROUP. ONNX in, OpenVINO .xml out.

INT4_SYM with these groups; as by its defaults the embedding and the output head are kept in 8 bits.
"""

from __future__ import annotations

import sys

import nncf
import openvino


def main(model: str, out: str, group: str) -> None:
    read = openvino.Core().read_model(model)
    mode = nncf.CompressWeightsMode.INT4_SYM
    compressed = nncf.compress_weights(read, mode=mode, group_size=int(group), ratio=1.0)
    openvino.save_model(compressed, out, compress_to_fp16=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
