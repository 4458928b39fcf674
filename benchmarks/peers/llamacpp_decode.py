"""llama.cpp on a model in floats: JOB. First Q4_0 is made of it, then it reads by turns.

Job: "source": a Llama's folder of transformers, or a GGUF file; "out": a folder for the GGUF files; "threads";
"context". When it is ready it says so in one line of JSON, {"bytes": size of the Q4_0 file}. Then each line of standard
input is {"past", "n"}: it brings its cache to `past` tokens, and answers with {"seconds"} for the `n` single tokens
that follow; or {"prompt"}: it answers with those of a prompt of so many tokens. The answers go to the stream that
standard output was; what the library prints goes to standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from gguf import GGUFWriter
from jobs import Job, read_job
from safetensors import safe_open

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
TOKEN = 7
"""Which tokens are read changes nothing about the time."""


def gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    module = name.removesuffix(".weight")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.weight"
    index, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{LAYER[part]}.weight"


def interleaved(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of llama.cpp's rotary embedding: pairs side by side."""
    rows, width = weight.shape
    return weight.reshape(n_heads, 2, rows // n_heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write_gguf(folder: Path, path: Path) -> None:
    """The folder's weights in float32, without a tokenizer."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(0)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                weight = tensors.get_tensor(name).astype(np.float32)
                if "q_proj" in name or "k_proj" in name:
                    weight = interleaved(weight, heads if "q_proj" in name else kv_heads)
                writer.add_tensor(gguf_name(name), np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, out: Path) -> None:
    """Q4_0 as llama-quantize makes it (the output head in Q6_K)."""
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(settings))
    if code:
        raise SystemExit(f"llama_model_quantize ended with {code}")


class Decoder:
    """A context whose cache is brought back to a number of tokens before each turn."""

    def __init__(self, path: Path, threads: int, context: int) -> None:
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context, 512, 512
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise SystemExit(f"{path}: llama.cpp cannot open it")
        self._length = 0

    def turn(self, past: int, n: int) -> float:
        """Seconds of `n` tokens after `past`; read once before, to warm up."""
        for _ in range(2):
            self._go_to(past)
            start = time.perf_counter()
            for _ in range(n):
                self._read(1)
            seconds = time.perf_counter() - start
        return seconds

    def read(self, n: int) -> float:
        """Seconds of a prompt of `n` tokens."""
        self._go_to(0)
        start = time.perf_counter()
        self._go_to(n)
        return time.perf_counter() - start

    def _go_to(self, past: int) -> None:
        if self._length > past:
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), 0, past, -1)
            self._length = past
        while self._length < past:
            self._read(min(512, past - self._length))

    def _read(self, n: int) -> None:
        tokens = (llama_cpp.llama_token * n)(*[TOKEN] * n)
        code = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(tokens, n))
        if code:
            raise SystemExit(f"llama_decode ended with {code}")
        llama_cpp.llama_synchronize(self._context)
        self._length += n


def prepare(job: Job) -> Path:
    source, out = Path(job["source"]), Path(job["out"])
    made, floats = out / "q4_0.gguf", out / "f32.gguf"
    if not made.exists():
        if source.is_dir():
            write_gguf(source, floats)
        quantize(floats if source.is_dir() else source, made)
        floats.unlink(missing_ok=True)
    return made


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = read_job()

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    path = prepare(job)
    decoder = Decoder(path, job["threads"], job["context"])
    answer(bytes=path.stat().st_size)
    for line in sys.stdin:
        asked = json.loads(line)
        answer(seconds=decoder.read(asked["prompt"]) if "prompt" in asked else decoder.turn(asked["past"], asked["n"]))


if __name__ == "__main__":
    main()
