"""Claims about GGUF files, made by recipes like recipes/int4-llm-llamacpp.yaml: llama.cpp computes what torch computes.

Structure: random models of some architectures (`gguf_census.py` has all), hybrids and mixtures among them, in float32,
each by a recipe whose plan finds its form: no logit of 48 tokens differs by more than
1e-4 of the logits' standard deviation from transformers' (3e-3 where GELU is computed, which llama.cpp looks up in a
table of half floats), and texts become the same tokens. Numbers: tinystories656k in
Q4_0, Q4_1 and Q8_0: nats per token in llama.cpp, which rounds inputs to eight bits, within 0.005 of the report's, and
the same 24 greedy tokens as torch gives wherever its first choice leads by 0.05. llama.cpp's own formats: the same
model made 256 wide by a random rotation (the same function; no row of 128 inputs fits one), its layers in Q4_K, IQ4_XS,
Q3_K and Q2_K: nats per token of `gptq` not above those of llama.cpp's own quantizer with the importance matrix that a
recipe wrote of the same tokens; the error of `rtn` that it weighs, which nats follow to a hundredth, not above its
either; and nats of a mixture chosen under the bytes of its Q4_K_M, Q3_K_M and Q2_K files not above theirs. All are
scored in llama.cpp on every second story.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Call, Claim, Measured, Peer, Row, apply_recipe, at_most, link_packages, run_job, run_script
from language import CALIBRATED, EVALUATED, encode_stories, load_causal, nats_per_token, read_stories
from subjects import weights_bytes
from torch import nn

MODEL = "models/tinystories656k-hf"
NEEDS = (f"{MODEL}/config.json", "data/tinystories/stories.jsonl")
RUN, QUANTIZE = (
    Peer("llama.cpp", "llamacpp_gguf.py", venv="llamacpp"),
    Peer("llama.cpp's quantizer", "llamacpp_quantize.py", venv="llamacpp"),
)
TEXT = "Hello there, it's 2026! I've 12345 apples;\n\n  we're   fine. Ünïcode \U0001f680 日本"
BYTE_LEVEL = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA = {"head_dim": 48, "query_pre_attn_scalar": 48, "sliding_window": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, scaled rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "mistral": ("mistral", {"head_dim": 48, "sliding_window": None}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 48}),
    "qwen3, experts": (
        "qwen3_moe",
        {
            "head_dim": 48,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "gemma": ("gemma", {"head_dim": 48}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", GEMMA | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "phi3": ("phi3", {"pad_token_id": 0}),
    "phi3, long rope": (
        "phi3",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0 + 0.1 * i for i in range(16)],
                "long_factor": [2.0 + 0.1 * i for i in range(16)],
            },
        },
    ),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.1,
        },
    ),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "jamba, a hybrid with experts": (
        "jamba",
        {
            "num_experts": 4,
            "mamba_dt_rank": 8,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "use_mamba_kernels": False,
        },
    ),
    "lfm2, a hybrid": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "deepseek v3, latent keys and experts": (
        "deepseek_v3",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 64,
            "kv_lora_rank": 32,
            "q_lora_rank": 48,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
    ),
    "glm4, experts": (
        "glm4_moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "head_dim": 32,
            "n_shared_experts": 1,
        },
    ),
}
"""Name -> transformers' model type, and what its configuration has beside SHAPE."""
TOKENS = 48
STRUCTURE, GELU, NATS = 1e-4, 3e-3, 0.005
SURE = 0.05
RECIPE = """\
version: 1
name: gguf
model: {{source: "dir:{model}", task: text-generation}}
preprocess: {{kind: language, max_length: 512, bos_token_id: 1}}
data:
  calibration: {{source: "jsonl:{data}", skip: {first}, samples: {n_calibration}, shuffle: false}}
  evaluation: {{source: "jsonl:{data}", skip: 200, samples: {n_evaluation}, shuffle: false}}
target: llama.cpp
passes: [{passes}]
export:
  - {{kind: gguf, dtype: {dtype}}}
"""
STORED = {
    "Q4_0": "{kind: gptq, scheme: W4A16, group_size: 32}",
    "Q4_1": "{kind: gptq, scheme: W4A16_ASYM, group_size: 32}",
    "Q8_0": "{kind: rtn, scheme: W8A16, group_size: 32}",
}
FORMATS = {"Q4_K": "Q4_K_S", "IQ4_XS": "IQ4_XS", "Q3_K": "Q3_K_S", "Q2_K": "Q2_K_S"}
"""Format -> llama.cpp's type of a file that is made of it."""
MIXTURES = {
    "Q4_K_M": "embeddings: Q4_K, lm_head: Q6_K",
    "Q3_K_M": "embeddings: Q3_K, lm_head: Q6_K",
    "Q2_K": "embeddings: Q2_K, lm_head: Q6_K",
}
"""llama.cpp's mixture -> what its embeddings and output are in."""
CHOICES = "Q2_K, Q3_K, IQ4_XS, Q4_K, Q5_K, Q6_K"
THEIRS = "llama.cpp, imatrix"


def measure(call: Call) -> Measured:
    structure, rows = measure_structure(call)
    if call.only:
        return structure, rows
    numbers, more = measure_numbers(call)
    formats, most = measure_formats(call)
    return [*structure, *numbers, *formats], [*rows, *more, *most]


def measure_structure(call: Call) -> Measured:
    """Random models of every architecture."""
    files, wanted, texts = {}, {}, {}
    generator = np.random.default_rng(0)
    tokens = generator.integers(5, 500, TOKENS)
    for name in call.choose(FAMILIES, 4):
        folder = write_random(call, name)
        bundle = write_bundle(call, f"family-{name}", folder, "", "float32", (4, 4))
        files[name] = bundle / "model/model.gguf"
        with torch.no_grad():
            wanted[name] = load_causal(folder)(input_ids=torch.from_numpy(tokens)[None]).logits[0].numpy()
        texts[name] = encode(folder, TEXT)
    answers, logits = ask(call, "structure", files, [tokens], [TEXT])
    rows, claims = [], []
    for name, answer in answers.items():
        row: Row = {"model": name, "backend": "llama.cpp F32", "failed": answer.get("failed")}
        if not row["failed"]:
            row["difference"] = float(np.abs(logits[name] - wanted[name]).max() / wanted[name].std())
            row["tokenized alike"] = answer["tokenized"][0] == texts[name]
        rows.append(row)
        bar = GELU if FAMILIES[name][0].startswith(("gemma", "starcoder")) else STRUCTURE
        claims.append(at_most(f"logits of {name}", row.get("difference"), bar))
        claims.append(at_most(f"tokens of {name}, otherwise", float(not row.get("tokenized alike")), 0))
    return claims, rows


def measure_numbers(call: Call) -> Measured:
    """Our integers of a real model."""
    folder = call.bench / MODEL
    stories = encode_stories(folder, read_stories(call.bench, EVALUATED))[: 10 if call.quick else None]
    counts = (16, 10) if call.quick else (CALIBRATED[1] - CALIBRATED[0], EVALUATED[1] - EVALUATED[0])
    bundles = {name: write_bundle(call, name, folder, passes, "float16", counts) for name, passes in STORED.items()}
    files = {name: bundle / "model/model.gguf" for name, bundle in bundles.items()}
    answers, _ = ask(call, "numbers", files, [np.array(story) for story in stories], [], 24)
    rows, claims = [], []
    for name, answer in answers.items():
        report = json.loads((bundles[name] / "report.json").read_text(encoding="utf-8"))
        stated = report["candidate"]["metrics"]["nll"]
        greedy = surely_wrong(read_file(files[name]), stories[0], answer["greedy"])
        row: Row = {"model": "tinystories656k", "backend": f"llama.cpp {name}", "nats": answer["nats"]}
        row |= {"reported": stated, "bytes": answer["bytes"], "greedy tokens surely wrong": greedy}
        rows.append(row)
        claims.append(at_most(f"{name}: nats beside the report's", abs(answer["nats"] - stated), NATS))
        claims.append(at_most(f"{name}: greedy tokens surely wrong", float(greedy), 0))
    return claims, rows


def measure_formats(call: Call) -> Measured:
    """llama.cpp's own formats and mixtures by us and by its quantizer, of one model and one importance matrix."""
    source = call.bench / MODEL
    folder = write_wide(source, call.out / "wide")
    stories = encode_stories(source, read_stories(call.bench, EVALUATED))[: 20 if call.quick else None : 2]
    n_calibration = 16 if call.quick else CALIBRATED[1] - CALIBRATED[0]
    same = abs(nats_per_token(load_causal(folder), stories[:4]) - nats_per_token(load_causal(source), stories[:4]))
    files = make_formats(call, folder, (n_calibration, 4), call.quick)
    answers, _ = ask(call, "formats", files, [np.array(story) for story in stories], [])
    rows: list[Row] = [
        {"model": "tinystories656k, 256 wide", "backend": f"llama.cpp {name}", "nats": a["nats"], "bytes": a["bytes"]}
        for name, a in answers.items()
    ]
    claims: list[Claim] = [at_most("the wide model is the same function, nats", same, 1e-4)]
    errors = {
        name: weigh_errors(file, files["float16"]) for name, file in files.items() if " rtn" in name or THEIRS in name
    }
    for row, name in zip(rows, answers, strict=True):
        row["weighted error"] = errors.get(name)
    for name, answer in answers.items():
        kind, _, how = name.partition(" ")
        if how in ("rtn", "gptq", "mixture"):
            theirs = f"{kind} {THEIRS}"
            claims.append(at_most(f"{name}: bytes beside llama.cpp's", answer["bytes"] - answers[theirs]["bytes"], 0))
            if how == "rtn":
                claims.append(at_most(f"{name}: weighted error beside llama.cpp's", errors[name] / errors[theirs], 1))
            else:
                claims.append(at_most(f"{name}: nats beside llama.cpp's", answer["nats"] - answers[theirs]["nats"], 0))
    return claims, rows


def weigh_errors(file: Path, floats: Path) -> float:
    """The squared error of a file's matrices, weighted with the importance matrix beside the float file, over their
    energy."""
    import gguf

    exact, made, squares = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        for path in (floats, file, floats.with_name("imatrix.gguf"))
    )
    lost = energy = 0.0
    for name, tensor in exact.items():
        if name.startswith("blk.") and f"{name}.in_sum2" in squares:
            weighting = squares[f"{name}.in_sum2"].data.reshape(-1)
            weights, rounded = (gguf.dequantize(each.data, each.tensor_type) for each in (tensor, made[name]))
            lost += float((np.square(rounded - weights.astype(np.float64)) * weighting).sum())
            energy += float((np.square(weights.astype(np.float64)) * weighting).sum())
    return lost / energy


def make_formats(call: Call, folder: Path, counts: tuple[int, int], quick: bool = False) -> dict[str, Path]:
    """Files of one model: in float, in each format and mixture by llama.cpp's quantizer and by us."""
    bundle = write_bundle(call, "wide-float", folder, "", "float16, imatrix: true", counts)
    files = {"float16": bundle / "model/model.gguf"}
    imatrix = bundle / "model/imatrix.gguf"

    def round_by(how: str, kind: str, passes: str) -> None:
        made = write_bundle(call, f"wide-{kind}-{how}", folder, passes, "float16", counts)
        files[f"{kind} {how}"] = made / "model/model.gguf"

    for kind in list(FORMATS)[: 1 if quick else None]:
        files[f"{kind} {THEIRS}"] = quantize(call, bundle, kind, FORMATS[kind], pure=True)
        round_by("rtn", kind, f'{{kind: rtn, importance: "{imatrix}", scheme: {kind}, indivisible: fit}}')
        round_by("gptq", kind, f"{{kind: gptq, scheme: {kind}, indivisible: fit}}")
    for file_type in list(MIXTURES)[: 1 if quick else None]:
        kind = f"{file_type}-file"
        files[f"{kind} {THEIRS}"] = theirs = quantize(call, bundle, kind, file_type)
        round_by("mixture", kind, mix_types(weights_bytes(folder) / theirs.stat().st_size, MIXTURES[file_type]))
    return files


def quantize(call: Call, bundle: Path, kind: str, file_type: str, pure: bool = False) -> Path:
    """Return a file that llama.cpp's quantizer makes of a bundle's float file, by the importance matrix beside it."""
    label = f"llamacpp-{kind}"
    made, out = bundle / "model", call.out / f"{label}.gguf"
    job = {"source": str(made / "model.gguf"), "imatrix": str(made / "imatrix.gguf"), "out": str(out)}
    run_job(QUANTIZE, job | {"type": file_type, "pure": pure}, call.out, label)
    return out


def mix_types(size_ratio: float, tables: str) -> str:
    """Return a pass that chooses the format of each matrix. `tables`: what embeddings and output layer get."""
    bits = f"{{size_ratio: {size_ratio:.6f}, choices: [{CHOICES}]}}"
    return f"{{kind: gptq, bits: {bits}, indivisible: fit, {tables}}}"


def write_bundle(call: Call, name: str, folder: Path, passes: str, dtype: str, counts: tuple[int, int]) -> Path:
    slug = name.replace(", ", "-").replace(" ", "-").replace("'", "")
    recipe = call.out / f"{slug}.yaml"
    data = call.bench / "data/tinystories/stories.jsonl"
    text = RECIPE.format(
        model=folder,
        data=data,
        first=CALIBRATED[0],
        n_calibration=counts[0],
        n_evaluation=counts[1],
        passes=passes,
        dtype=dtype,
    )
    recipe.write_text(text, encoding="utf-8")
    apply_recipe(recipe, (), call.out / slug, call.out / "cache", with_llamacpp(call))
    return call.out / slug


def with_llamacpp(call: Call) -> dict[str, str]:
    """Return an environment in which a child imports llama.cpp's binding: a plan for GGUF asks it."""
    found = link_packages("llamacpp", call.out / "llamacpp", "llama_cpp", "diskcache")
    places = filter(None, (os.environ.get("PYTHONPATH"), str(found)))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def ask(
    call: Call,
    name: str,
    files: Mapping[str, Path],
    rows: Sequence[np.ndarray],
    texts: Sequence[str] = (),
    greedy: int = 0,
    reference: str = "",
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What llama.cpp answers of each file, and its logits of the first row. `reference`: what outputs diverge from."""
    tokens, logits = call.out / f"{name}-tokens.npz", call.out / f"{name}-logits.npz"
    numbered: Any = {f"row-{i:05}": row for i, row in enumerate(rows)}
    np.savez(tokens, **numbered)
    job = {"models": {key: str(path) for key, path in files.items()}, "tokens": str(tokens), "logits": str(logits)}
    more = {"texts": list(texts), "greedy": greedy, "reference": reference}
    answers = run_job(RUN, job | more, call.out, name)["models"]
    with np.load(logits) as arrays:
        return answers, dict(arrays)


def write_random(call: Call, name: str) -> Path:
    """A random model whose weights, norms and biases included, all matter, with a byte-level tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, more = FAMILIES[name]
    folder = call.out / f"random-{name.replace(', ', '-').replace(' ', '-')}"
    vocabulary = write_byte_tokenizer(folder, call, 1 if kind.startswith("qwen") else 3)
    torch.manual_seed(0)
    settings = {
        **SHAPE,
        "vocab_size": vocabulary,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.08,
        **more,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def write_byte_tokenizer(folder: Path, call: Call, digits: int) -> int:
    """A BPE of the stories' bytes, split as Llama 3 (3 digits) or Qwen 2 (1) split; the rows of its embeddings."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(ignore_merges=digits == 3))
    split = pre_tokenizers.Split(Regex(BYTE_LEVEL % ("{1,3}" if digits == 3 else "")), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(read_stories(call.bench, (0, 100)), trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    whole.save_pretrained(folder)
    return 512


def encode(folder: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return ids


@torch.no_grad()
def read_file(file: Path) -> nn.Module:
    """A GGUF file as transformers reads it."""
    from transformers import AutoModelForCausalLM

    read: nn.Module = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return read.eval()


@torch.no_grad()
def surely_wrong(model: nn.Module, story: Sequence[int], made: Sequence[int]) -> int:
    """How many greedy tokens are not the model's first choice although that leads by more than SURE, each judged on
    the tokens before it."""
    prompt = list(story[: max(2, len(story) // 4)])
    logits = model(input_ids=torch.tensor([prompt + list(made)])).logits[0, len(prompt) - 1 : -1]
    chosen = logits[torch.arange(len(made)), torch.tensor(made)]
    return int((logits.amax(1) - chosen > SURE).sum())


@torch.no_grad()
def write_wide(source: Path, out: Path) -> Path:
    """The same Llama with twice the width: its residual stream rotated into 256 dimensions, its heads into 32, a third
    of its neurons in two halves. No weight is zero but rows of q and k."""
    import shutil

    from transformers import LlamaConfig, LlamaForCausalLM

    small: Any = load_causal(source)
    config = small.config
    torch.manual_seed(0)
    width, wide, heads, kv = (
        config.hidden_size,
        2 * config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    size = width // heads
    rotation = torch.linalg.qr(torch.randn(wide, width, dtype=torch.float64))[0].float()  # [wide, width]
    settings = {
        **config.to_dict(),
        "hidden_size": wide,
        "intermediate_size": 512,
        "head_dim": 2 * size,
        "rms_norm_eps": config.rms_norm_eps / 2,
        "tie_word_embeddings": False,
    }
    made: Any = LlamaForCausalLM(LlamaConfig(**settings)).float()
    root = 2**0.5  # the mean square over twice as many dimensions is half as large
    made.model.embed_tokens.weight.copy_(small.model.embed_tokens.weight @ rotation.T)
    made.model.norm.weight.fill_(1 / root)
    made.lm_head.weight.copy_((small.lm_head.weight * small.model.norm.weight) @ rotation.T)
    for old, new in zip(small.model.layers, made.model.layers, strict=True):
        new.input_layernorm.weight.fill_(1 / root)
        new.post_attention_layernorm.weight.fill_(1 / root)
        turn = old.input_layernorm.weight
        # a pair of rows turns at the frequency of its number: pair i of 8 is pair 2 i of 16
        places = torch.cat([torch.arange(0, size, 2), size + torch.arange(0, size, 2)])
        for name, count, factor in (("q_proj", heads, root), ("k_proj", kv, 1.0)):
            weight = (getattr(old.self_attn, name).weight * turn) @ rotation.T * factor
            target = torch.zeros(count, 2 * size, wide)
            target[:, places] = weight.reshape(count, size, wide)
            getattr(new.self_attn, name).weight.copy_(target.reshape(-1, wide))
        spread = torch.linalg.qr(torch.randn(kv, 2 * size, size))[0]  # [kv, 2 size, size]
        values = ((old.self_attn.v_proj.weight * turn) @ rotation.T).reshape(kv, size, wide)
        new.self_attn.v_proj.weight.copy_((spread @ values).reshape(-1, wide))
        output = (rotation @ old.self_attn.o_proj.weight).reshape(wide, heads, size)
        each = spread.repeat_interleave(heads // kv, 0)  # [heads, 2 size, size]
        new.self_attn.o_proj.weight.copy_(torch.einsum("whs,hts->wht", output, each).reshape(wide, -1))
        turn = old.post_attention_layernorm.weight
        neurons = torch.cat([torch.arange(384), torch.arange(128)])
        part = torch.rand(128)
        shares = torch.cat([part, torch.ones(256), 1 - part])
        for name in ("gate_proj", "up_proj"):
            weight = (getattr(old.mlp, name).weight * turn) @ rotation.T
            getattr(new.mlp, name).weight.copy_(weight[neurons])
        new.mlp.down_proj.weight.copy_((rotation @ old.mlp.down_proj.weight)[:, neurons] * shares)
    made.save_pretrained(out)
    for path in source.glob("tokenizer*"):
        shutil.copyfile(path, out / path.name)
    return out


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
