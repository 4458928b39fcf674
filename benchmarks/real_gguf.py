"""Claims about a real language model as a GGUF file: at the bytes of llama.cpp's own files, ours lose less.

Qwen2.5-Coder-Instruct 0.5B, a Hugging Face folder of that name in the folder that the variable REAL_MODELS names. Such
a folder may come from a file of few bits, which rounding to that file's own types gives back (0.005 nats of divergence
in Q4_K_M), so that its channels are first scaled at random, which changes no output. llama.cpp's quantizer makes files
of its types, with an importance matrix that a recipe wrote of 16 articles of WikiText-2's validation text. For each,
`gptq` chooses the types of the matrices under the same bytes, embeddings and output as that file has them, on the same
articles. All are scored in llama.cpp, on 20 articles of the test text and 10 files of Python's library: ours has no
more nats than theirs, and its outputs diverge no more from the float file's. A row that was measured is kept in
benchmarks/.trained/ and not measured again.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import interop_gguf
import numpy as np
import real_quality
import torch
from common import Call, Claim, Measured, Row, apply_recipe, at_most, run_script
from interop_gguf import MIXTURES, ask, mix_types, quantize, with_llamacpp
from language import load_causal, nats_per_token
from real_language_models import find_real
from real_quality import MODEL, NEEDS, read_texts, write_recipe
from safetensors.torch import load_file, save_file
from subjects import weights_bytes
from training import find_row

TYPES = MIXTURES | {"IQ4_XS": "embeddings: IQ4_XS, lm_head: Q6_K"}
"""As `MIXTURES`: of a model whose output layer is a table of its own."""

SPREAD, SAME = 0.1, 2e-3
"""Of the logarithms of the scales; nats that scaling may change, whose results are stored in bfloat16 as before."""


def measure(call: Call) -> Measured:
    source = find_real(MODEL)
    texts = read_texts(call, source)
    folder = write_scaled(source, call.out / "scaled")
    before, after = (nats_per_token(load_causal(place), texts.calibration[:2]) for place in (source, folder))
    recipe = call.out / "recipe.json"
    write_recipe(recipe, folder, texts.calibration)
    rows = [np.array(ids) for ids in (*texts.judged["wikitext"], *texts.judged["code"])]

    def make(name: str, passes: str, export: str = "") -> Path:
        sets = ["target=llama.cpp", f"passes=[{passes}]", f"export=[{{kind: gguf, dtype: float16{export}}}]"]
        apply_recipe(recipe, sets, call.out / name, call.out / "cache", with_llamacpp(call))
        return call.out / name

    @cache
    def make_float() -> Path:
        return make("float", "", ", imatrix: true")

    def make_row(file_type: str) -> Row:
        theirs = quantize(call, make_float(), file_type, file_type)
        begun = time.monotonic()
        bundle = make(f"ours-{file_type}", mix_types(weights_bytes(folder) / theirs.stat().st_size, TYPES[file_type]))
        seconds = time.monotonic() - begun
        files = {"float": make_float() / "model/model.gguf", "theirs": theirs, "ours": bundle / "model/model.gguf"}
        answers, _ = ask(call, file_type, files, rows, reference="float")
        row: Row = {"type": file_type, "seconds": seconds}
        for name, answer in answers.items():
            each, n_articles = answer["each"], len(texts.judged["wikitext"])
            row[name] = {key: answer[key] for key in ("bytes", "nats", "kl")}
            row[name] |= {"wikitext": float(np.mean(each[:n_articles])), "code": float(np.mean(each[n_articles:]))}
        return row

    code = [str(module.__file__) for module in (interop_gguf, real_quality)] + [__file__]
    found: list[Row] = []
    claims: list[Claim] = [at_most("the scaled model is the same function, nats", abs(after - before), SAME)]
    for name in call.choose(TYPES, quick=1):
        row = find_row(f"gguf-{name}", call.quick, code, partial(make_row, name))
        found.append(row)
        ours, theirs = row["ours"], row["theirs"]
        for key in ("bytes", "nats", "kl"):
            claims.append(at_most(f"{name}: {key} beside llama.cpp's", ours[key] - theirs[key], 0))
    return claims, found


def write_scaled(source: Path, out: Path) -> Path:
    """Write a model of Llama's form whose channels are scaled where nothing but a product lies between two weights.

    That is from a norm to what reads it, from values to the attention's output, from `up_proj` to `down_proj`.
    """
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    weights = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    generator = torch.Generator().manual_seed(0)

    def scale(writers: Sequence[str], readers: Sequence[str], repeats: int = 1) -> None:
        """Multiply the outputs of `writers` and divide the inputs of `readers`, heads of which read the same."""
        width = len(weights[writers[0]])
        scales = torch.exp(SPREAD * torch.randn(width, generator=generator))
        for name in filter(weights.__contains__, writers):
            tensor = weights[name].float()
            weights[name] = (tensor * (scales if tensor.dim() == 1 else scales[:, None])).to(weights[name].dtype)
        read = scales.reshape(-1, head if repeats > 1 else width).repeat_interleave(repeats, 0).reshape(-1)
        for name in readers:
            weights[name] = (weights[name].float() / read).to(weights[name].dtype)

    first = "input_layernorm.weight"
    for block in [name.removesuffix(first) for name in weights if name.endswith(first)]:
        attention, mlp = f"{block}self_attn.", f"{block}mlp."
        scale([f"{block}{first}"], [f"{attention}{part}_proj.weight" for part in "qkv"])
        values, output = f"{attention}v_proj", f"{attention}o_proj.weight"
        repeats = weights[output].shape[1] // len(weights[f"{values}.weight"])
        scale([f"{values}.weight", f"{values}.bias"], [output], repeats)
        scale([f"{block}post_attention_layernorm.weight"], [f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"])
        scale([f"{mlp}up_proj.weight"], [f"{mlp}down_proj.weight"])
    if "lm_head.weight" in weights:
        scale(["model.norm.weight"], ["lm_head.weight"])
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
