"""llama.cpp's logits of GGUF files, in a process of its own: it ends its process where a file breaks its rules.

A line of the standard input is a job as JSON: `file`, `tokens`, and `logits`, the .npy to write. A line of the standard
output answers: "" or why there are none.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Sequence

import numpy as np

ERROR, F32 = 4, 0
"""ggml's number of a message that tells an error, and of a type."""


def main() -> None:
    """Answer jobs until there are no more."""
    # llama.cpp writes some of its own on the standard output
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import llama_cpp

    said: list[str] = []

    def hear(level: int, text: bytes, _: ctypes.c_void_p) -> None:
        if level == ERROR:
            said.append(text.decode("utf-8", "replace").strip())

    callback = llama_cpp.llama_log_callback(hear)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    for line in sys.stdin:
        job = json.loads(line)
        said.clear()
        answer = _score(job["file"], job["tokens"], job["logits"])
        told = next((text for text in said if "error" in text), said[0] if said else "")
        print(json.dumps(f"{answer}: {told}" if answer and told else answer), file=answers, flush=True)


def _score(file: str, tokens: Sequence[int], logits: str) -> str:
    import llama_cpp

    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    if not model:
        return "it is not loaded"
    settings, n = llama_cpp.llama_context_default_params(), len(tokens)
    settings.n_ctx = settings.n_batch = settings.n_ubatch = n
    settings.n_threads = settings.n_threads_batch = 1
    settings.type_k = settings.type_v = F32
    settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it computes in half floats
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        llama_cpp.llama_model_free(model)
        return "it does not run"
    batch = llama_cpp.llama_batch_init(n, 0, 1)
    batch.n_tokens = n
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    failed = llama_cpp.llama_decode(context, batch)
    if not failed:
        width = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        values = llama_cpp.llama_get_logits(context)
        np.save(logits, np.ctypeslib.as_array(values, (n, width)).copy())
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return f"it ends with {failed}" if failed else ""
