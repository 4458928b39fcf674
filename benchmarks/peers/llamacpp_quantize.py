"""llama.cpp's own quantizer: JOB. A file of one type, or of its mixture, chosen with an importance matrix.

Job: "source": a GGUF file in float; "out"; "type": llama.cpp's name of the file's type, without MOSTLY_; "imatrix": a
file, read as llama-quantize reads it; "pure": every matrix in that type, embeddings and output in float16; else the
mixture that llama-quantize makes.
"""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np
from gguf import GGUFReader
from jobs import Job, read_job, write_result

F16 = 1


def main(job: Job) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{job['type']}"), 1
    if job["pure"]:
        params.pure, params.quantize_output_tensor = True, False
        params.token_embedding_type = params.output_tensor_type = F16
    kept = read_imatrix(job["imatrix"])
    entries = [
        llama_cpp.llama_model_imatrix_data(
            name.encode(), means.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), means.size
        )
        for name, means in kept.items()
    ]
    table = (llama_cpp.llama_model_imatrix_data * (len(entries) + 1))(*entries)
    params.imatrix = table
    code = llama_cpp.llama_model_quantize(job["source"].encode(), job["out"].encode(), ctypes.byref(params))
    if code:
        raise SystemExit(f"llama_model_quantize gave {code}")
    write_result(job, out=job["out"])


def read_imatrix(path: str) -> dict[str, np.ndarray]:
    """Tensor -> mean squares, [matrices * inputs]; ones for experts that no token reached."""
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    means = {}
    for name in (name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2")):
        counts = tensors[f"{name}.counts"].reshape(-1, 1)
        sums = tensors[f"{name}.in_sum2"].reshape(len(counts), -1)
        means[name] = np.where(counts > 0, sums / np.maximum(counts, 1), 1).astype(np.float32).reshape(-1)
    return means


if __name__ == "__main__":
    main(read_job())
