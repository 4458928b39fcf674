"""llama.cpp's own quantizer: JOB. Every matrix in one K format, chosen with an importance matrix.

Job: "source": a GGUF file in float; "out"; "type": GGML's number of the format; "importance": .npz, tensor -> mean
square of each of its inputs, as llama-imatrix gathers them. Embeddings and output stay float16.
"""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np
from jobs import Job, read_job, write_result

F16 = 1
FILE_TYPES = {10: 21, 11: 11, 12: 14, 13: 16, 14: 18}
"""GGML's type -> the type of a file that is made of it."""


def main(job: Job) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[job["type"]]
    params.pure, params.quantize_output_tensor, params.nthread = True, False, 1
    params.token_embedding_type = params.output_tensor_type = F16
    kept, entries = [], []
    if job.get("importance"):
        with np.load(job["importance"]) as arrays:
            for name in arrays.files:
                values = np.ascontiguousarray(arrays[name], np.float32)
                kept.append(values)
                pointer = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
                entries.append(llama_cpp.llama_model_imatrix_data(name.encode(), pointer, values.size))
        table = (llama_cpp.llama_model_imatrix_data * (len(entries) + 1))(*entries)
        params.imatrix = table
    code = llama_cpp.llama_model_quantize(job["source"].encode(), job["out"].encode(), ctypes.byref(params))
    if code:
        raise SystemExit(f"llama_model_quantize gave {code}")
    write_result(job, out=job["out"])


if __name__ == "__main__":
    main(read_job())
