"""Claims about checkpoints of recipes/claims/tinystories-w4-gptq.yaml in every format: vLLM loads them, on the CPU.

vLLM takes no heads below 32 channels, so the model is written with heads twice as wide first (zeros: the same
function). Of each format: vLLM's nats per token on 20 stories are those that the bundle's report has of the checkpoint,
within 0.002, and within 0.01 where inputs are rounded too (bfloat16 puts some on another number); and no token of its
greedy answers is less likely, by the checkpoint's own logits in float32, than the likeliest by more than 0.5: what
bfloat16 makes of logits. A format that only a GPU takes has a row with vLLM's own words, and decides nothing. Likewise
two mixtures and two hybrids of random weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import ROOT, Call, Claim, Measured, Peer, Row, RunError, apply_recipe, at_most, run_job, run_script, say
from language import EVALUATED, encode_stories, load_causal, nats_per_token, read_stories, write_wider_heads
from subjects import ONLY_WHAT_IS_SCORED
from torch import nn

RECIPE = ROOT / "recipes/claims" / "tinystories-w4-gptq.yaml"
MODEL = "models/tinystories656k-hf"
NEEDS = (f"{MODEL}/config.json", "data/tinystories/stories.jsonl")
VLLM = Peer("vLLM", "vllm_score.py", venv="vllm")
DTYPE = "bfloat16"
"""What its kernels for CPUs compute in; those of 4 bits take nothing else."""
STORIES, PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 20, 8, 16, 32
CALIBRATED = 64
CONTEXT = 512
WEIGHTS, INPUTS, LIKELY = 0.002, 0.01, 0.5
"""Bars: nats where weights alone are rounded, nats where inputs are too, logits."""


@dataclass(frozen=True)
class Format:
    """One row: what makes the checkpoint, and what is asked of vLLM. To try another format, add a line to FORMATS."""

    name: str
    passes: str
    bar: float | None = WEIGHTS
    """On the difference in nats; None: what vLLM does or says is shown, and decides nothing."""
    stored: str = ""
    """More of the export: "format: gptq"."""
    family: str = ""
    """Of a model of random weights (FAMILIES); empty: the story teller."""


def rtn(scheme: str, *more: str) -> str:
    return "{" + ", ".join(["kind: rtn", f"scheme: {scheme}", *more]) + "}"


SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
RECURRENT = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""Its kernels for CPUs have sizes of their own: 128 channels, and outputs that 32 divides (two numbers a head)."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "mixtral": EXPERTS,
    "qwen3_next": EXPERTS | RECURRENT | {"shared_expert_intermediate_size": 64},
    "lfm2": {
        "conv_dim": 128,
        "block_dim": 128,
        "block_ff_dim": 256,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
}
"""transformers' model type -> what its configuration has beside SHAPE."""
G32 = "group_size: 32"
SPARSE = '{kind: sparsify, pattern: "2:4"}'
KEPT = "ignore: [lm_head, model.layers.0.mlp.down_proj, model.layers.1.self_attn.o_proj]"
FORMATS = (
    Format("float", ""),
    Format("W4A16, groups of 32", rtn("W4A16", G32)),
    Format("W4A16, groups of 128", rtn("W4A16", "group_size: 128")),
    Format("W4A16, channels", rtn("W4A16", "group_size: -1")),
    Format("W4A16_ASYM, groups of 32", rtn("W4A16_ASYM", G32)),
    Format("W4A16_ASYM, groups of 128", rtn("W4A16_ASYM", "group_size: 128")),
    Format("W4A16, gptq", "{kind: gptq, scheme: W4A16, group_size: 32}"),
    Format("W4A16, rotated", "{kind: rotate}, " + rtn("W4A16", G32)),
    Format("W4A16, some layers float", rtn("W4A16", G32, KEPT)),
    Format("W4A16, format: gptq", rtn("W4A16", G32), stored="format: gptq"),
    Format("2:4", SPARSE),
    Format("2:4, W4A16", f"{SPARSE}, {rtn('W4A16', G32)}"),
    # 5.45 nats, 2 more than whole: bfloat16 costs more where the model is that far off
    Format("one block of two, W4A16", "{kind: prune_layers, keep: 1}, " + rtn("W4A16", G32), 2 * WEIGHTS),
    Format("W4A8", rtn("W4A8", G32), INPUTS),
    Format("W8A8", rtn("W8A8"), INPUTS),
    Format("W8A8_STATIC", rtn("W8A8_STATIC"), INPUTS),
    Format("FP8_DYNAMIC", rtn("FP8_DYNAMIC"), INPUTS),
    Format("FP8", rtn("FP8"), None),
    Format("W8A16", rtn("W8A16", G32), None),
    Format("W8A16, format: gptq", rtn("W8A16", G32), None, "format: gptq"),
    *(
        Format(scheme, rtn(scheme), None)
        for scheme in ("FP8_BLOCK", "W4AFP8", "NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4", "MXFP8A16", "MXFP8")
    ),
    Format("W4A16, a head of its own", rtn("W4A16", G32, "ignore: []"), None),
    Format("fp8 cache", "{kind: kv_cache, scheme: fp8}", None),
    *(
        Format(f"{family}, {name}", passes, None, family=family)
        for family in FAMILIES
        for name, passes in (("float", ""), ("W4A16", rtn("W4A16", G32)))
    ),
)


@dataclass(frozen=True)
class Written:
    """One format's checkpoint. `own`: the same weights as transformers loads them; `nats`: as the report has it."""

    format: Format
    folder: Path
    own: Path
    nats: float


def measure(call: Call) -> Measured:
    wide = write_wider_heads(call.bench / MODEL, call.out / "wide")
    chosen = [form for form in FORMATS if form.name in call.choose((form.name for form in FORMATS), quick=2)]
    models = {family: write_random(family, wide, call.out) for family in {form.family for form in chosen} - {""}}
    stories = encode_stories(wide, read_stories(call.bench, (EVALUATED[0], EVALUATED[0] + STORIES)))
    written = [write_format(form, models.get(form.family, wide), call) for form in chosen]
    prompts = [story[:PROMPT_TOKENS] for story in stories[:PROMPTS]]
    answers = {} if call.ours else ask(written, stories, prompts, call.out)
    rows, claims = [], []
    for checkpoint in written:
        row, bars = judge(checkpoint, answers.get(checkpoint.format.name), stories, prompts)
        rows.append(row)
        claims += bars
    return claims, rows


def write_random(family: str, tokenized: Path, out: Path) -> Path:
    """A model of random weights as a folder, with the tokenizer of another; returns it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = out / family
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **FAMILIES[family])).save_pretrained(folder)
    for path in tokenized.glob("*token*"):
        shutil.copyfile(path, folder / path.name)
    return folder


def write_format(form: Format, model: Path, call: Call) -> Written:
    """Make one checkpoint. The float model is the folder itself, whose nats are computed here."""
    if not form.passes:
        stories = encode_stories(model, read_stories(call.bench, (EVALUATED[0], EVALUATED[0] + STORIES)))
        return Written(form, model, model, nats_per_token(load_causal(model), stories))
    bundle = call.out / form.name.replace(", ", "-").replace(" ", "-").replace(":", "")
    more = f", {{kind: checkpoint, target: vllm, {form.stored}}}" if form.stored else ""
    sets = (
        *(f"vars.bench={call.bench}", f"model.source=dir:{model}", *ONLY_WHAT_IS_SCORED["text-generation"]),
        *(f"export=[{{kind: checkpoint}}{more}]", f"passes=[{form.passes}]"),
        *(f"data.evaluation.samples={STORIES}", f"data.calibration.samples={CALIBRATED}"),
    )
    apply_recipe(RECIPE, sets, bundle, call.out / "cache")
    report = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
    own, folder = bundle / "model", bundle / ("checkpoint" if form.stored else "model")
    return Written(form, folder, own, report["candidate"]["metrics"]["nll"])


def ask(
    written: Sequence[Written], stories: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], out: Path
) -> dict[str, Any]:
    """vLLM's answer to each checkpoint; where its process ends at one, it begins anew behind it."""
    left = {checkpoint.format.name: str(checkpoint.folder) for checkpoint in written}
    found: dict[str, Any] = {}
    while left:
        name = f"vllm-{len(left)}"
        job = {"folders": left, "dtype": DTYPE, "context": CONTEXT, "texts": [s[: CONTEXT - 1] for s in stories]}
        try:
            answers = run_job(VLLM, job | {"prompts": prompts, "new_tokens": NEW_TOKENS}, out, name)
        except RunError as error:
            say(str(error))
            result = out / f"{name}.result.json"
            if not result.is_file():
                raise
            answers = json.loads(result.read_text(encoding="utf-8"))
        found |= answers
        left = {form: folder for form, folder in left.items() if form not in found}
    return found


def judge(
    checkpoint: Written,
    answer: Mapping[str, Any] | None,
    stories: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
) -> tuple[Row, list[Claim]]:
    form = checkpoint.format
    row: Row = {"model": form.name, "backend": "vLLM on the CPU", "reported": checkpoint.nats}
    if answer is None:
        return row, []
    if "refused" in answer:
        name = f"{form.name}: nats"
        return row | {"refused": answer["refused"]}, [at_most(name, None, form.bar)] if form.bar is not None else []
    difference = abs(answer["nats"] - checkpoint.nats)
    equal, behind = compare_answers(load_own(checkpoint), prompts, answer["answers"])
    row |= {"nats": answer["nats"], "difference": difference, "equal_tokens": equal, "behind": behind}
    if form.bar is None:
        return row, []
    bars = [at_most(f"{form.name}: nats", difference, form.bar)]
    return row, [*bars, at_most(f"{form.name}: logits behind the likeliest", behind, LIKELY)]


def load_own(checkpoint: Written) -> nn.Module:
    """The checkpoint in transformers, in float32: weights alone unpacked at once, inputs rounded as it runs."""
    config = json.loads((checkpoint.own / "config.json").read_text(encoding="utf-8"))
    weights_alone = checkpoint.format.bar is not None and checkpoint.format.bar < INPUTS
    return load_causal(checkpoint.own, "quantization_config" in config and weights_alone)


@torch.no_grad()
def compare_answers(
    model: nn.Module, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> tuple[float, float]:
    """(share of the answers' tokens that are the model's likeliest, most logits that one is behind the likeliest)."""
    equal, behind = [], 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()  # [new, vocabulary]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]  # [new]
        gaps = logits.max(dim=1).values - chosen
        equal += (gaps == 0).tolist()
        behind = max(behind, float(gaps.max()))
    return sum(equal) / len(equal), behind


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
