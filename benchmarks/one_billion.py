"""Claims about a language model of real size: 1.24 billion parameters, compressed on two cores in under 6 GiB.

In a recipe of its own, like recipes/claims/tinystories-w4-gptq.yaml.

A random Llama (hidden 2048, 16 blocks, feed-forward 8192, 32 and 8 heads, 128,256 tokens, tied, bfloat16: 2.47 GB) goes
through `compress plan` and `compress apply`: `gptq` to 4 bits on 32 texts of 256 tokens, an ONNX file with its weights
beside it and a compressed-tensors checkpoint, judged on 64 texts. The run is killed once among its blocks and started
again. Memory is the resident set of the whole process tree, sampled ten times a second, pages of open files counted.

Claims: the tree stays under 6 GiB; the plan foretold memory within 10 % and time within 25 %; of the blocks that were
finished none is done again; transformers loads the checkpoint and ONNX Runtime the ONNX file, and both give the same
cross-entropy. It takes half an hour; `--quick` does a model of 0.17 billion and claims nothing of forecasts.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import (
    GATE_FELL_SHORT,
    Call,
    Claim,
    Measured,
    Row,
    RunError,
    apply_command,
    at_least,
    at_most,
    plan_recipe,
    run_script,
)
from language import random_tokens, write_tokenizer
from process_tree import run_tree

from compress.store.cache import PARTIAL

NEEDS = ()
FULL = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SMALL = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
CALIBRATION, CALIBRATION_TOKENS = 32, 256
EVALUATION, EVALUATION_TOKENS = 64, 64
SPREAD = 0.02
"""Of the random weights, as transformers draws them."""
MOST_GIB, QUICK_GIB = 6.0, 2.2
"""Less than the float model takes to be run: 3.5 times its weights in float32."""
KILLED_AFTER = 5
"""Finished blocks."""
SAME_NATS = 0.02
"""Between the checkpoint in transformers and the ONNX file: kernels of 4 bits round their inputs."""
RECIPE = """\
version: 1
name: one-billion
model: {{source: "dir:{model}", task: text-generation}}
preprocess: {{kind: language, max_length: {tokens}}}
data:
  calibration: {{source: "jsonl:{calibration}", shuffle: false}}
  evaluation: {{source: "jsonl:{evaluation}", shuffle: false}}
target: onnxruntime-cpu
passes:
  - {{kind: gptq, bits: 4, group_size: 128, compute: bfloat16}}
export:
  - {{kind: onnx}}
  - {{kind: checkpoint}}
validate:
  benchmark: {{prompt_tokens: 32, new_tokens: 8, iterations: 10, warmup: 1}}
  gates:
    - {{metric: nll, max_drop: 0.1}}
    - {{metric: size_ratio, min: 1.2}}
    - {{metric: tpot, min_speedup: 1.0, undecided: pass}}
limits: {{memory_gib: {most}}}
"""


def measure(call: Call) -> Measured:
    shape = SMALL if call.quick else FULL
    model = write_model(call.out / "model", shape)
    recipe = write_recipe(call.out, model, shape["vocab_size"], QUICK_GIB if call.quick else MOST_GIB)
    cache, bundle = call.out / "cache", call.out / "bundle"
    start = time.perf_counter()
    plan = plan_recipe(recipe, (), cache)
    plan_seconds = time.perf_counter() - start
    command = apply_command(recipe, (), bundle, cache)
    killed = run_tree(command, lambda: len(finished_blocks(cache)) >= KILLED_AFTER)
    kept = finished_blocks(cache)
    resumed = run_tree(command)
    if resumed.code not in (0, GATE_FELL_SHORT):
        raise RunError(f"compress apply ended with exit code {resumed.code}")
    report = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
    held = {file.stat().st_ino for file in cache.rglob("*.safetensors")}
    nats = {
        "checkpoint": nats_of(CHECKPOINT, bundle / "checkpoint", call),
        "onnx": nats_of(ONNX, bundle / "model", call),
    }
    row: Row = {
        "model": "0.17 B" if call.quick else "1.24 B",
        "source_gb": size_of(model) / 1e9,
        "onnx_gb": size_of(bundle / "model") / 1e9,
        "checkpoint_gb": size_of(bundle / "checkpoint") / 1e9,
        "bundle_gb": size_of(bundle) / 1e9,
        "cache_gb": size_of(cache) / 1e9,
        "plan_s": plan_seconds,
        "apply_s": killed.seconds + resumed.seconds,
        "forecast_s": plan["forecast"]["seconds"],
        "peak_gib": max(killed.peak_bytes, resumed.peak_bytes) / 2**30,
        "forecast_gib": plan["forecast"]["memory_bytes"] / 2**30,
        "blocks_kept": len(kept),
        "blocks_again": len(kept - held),
        "verdict": report["verdict"],
        "nll_before": report["baseline"]["metrics"]["nll"],
        "nll_after": report["candidate"]["metrics"]["nll"],
        **{f"nll_{name}": value for name, value in nats.items()},
    }
    return claims(row, call.quick), [row]


def claims(row: Row, quick: bool = False) -> list[Claim]:
    made = [
        at_most("peak_gib_of_the_process_tree", row["peak_gib"], QUICK_GIB if quick else MOST_GIB),
        at_least("finished_blocks_kept", row["blocks_kept"], KILLED_AFTER),
        at_most("finished_blocks_done_again", row["blocks_again"], 0),
        at_most("nats_between_checkpoint_and_onnx", abs(row["nll_checkpoint"] - row["nll_onnx"]), SAME_NATS),
        at_most("nats_lost", row["nll_after"] - row["nll_before"], 0.1),
    ]
    if quick:
        return made
    return [
        *made,
        at_most("forecast_memory_relative_error", abs(row["forecast_gib"] / row["peak_gib"] - 1), 0.10),
        at_least("forecast_time_over_measured", row["forecast_s"] / row["apply_s"], 0.5),
        at_most("forecast_time_over_measured", row["forecast_s"] / row["apply_s"], 2.0),
    ]


def write_model(folder: Path, shape: dict[str, int], seed: int = 0) -> Path:
    """Write a random Llama in bfloat16, a shard for each block, so that it is never held whole; return its folder."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: Any = shape
    config = LlamaConfig(
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
        dtype="bfloat16",
        **settings,
    )
    folder.mkdir()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        sizes = {name: tuple(p.shape) for name, p in LlamaForCausalLM(config).named_parameters()}
    shards: dict[str, list[str]] = {}
    for name in sizes:
        parts = name.split(".")
        shards.setdefault(parts[2] if "layers" in parts else "rest", []).append(name)
    generator = torch.Generator().manual_seed(seed)
    index: dict[str, str] = {}
    for number, names in enumerate(shards.values(), 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: _draw(sizes[name], generator) for name in names}
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(names, file)
    total = sum(2 * math.prod(size) for size in sizes.values())
    record = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(record), encoding="utf-8")
    write_tokenizer(folder, shape["vocab_size"])
    return folder


def _draw(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Draw a weight; a norm's is one."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    return torch.empty(size, dtype=torch.bfloat16).normal_(0.0, SPREAD, generator=generator)


def write_texts(folder: Path, vocabulary: int) -> tuple[Path, Path]:
    """Write random texts to calibrate and to evaluate on into `folder`; return the two files."""
    sets = {"calibration": (CALIBRATION, CALIBRATION_TOKENS), "evaluation": (EVALUATION, EVALUATION_TOKENS)}
    files = {name: folder / f"{name}.jsonl" for name in sets}
    for seed, (name, (n, length)) in enumerate(sets.items()):
        rows = random_tokens(n, length, vocabulary, seed)
        lines = (json.dumps({"text": " ".join(f"w{token}" for token in row)}) for row in rows)
        files[name].write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return files["calibration"], files["evaluation"]


def write_recipe(folder: Path, model: Path, vocabulary: int, most_gib: float) -> Path:
    """Write RECIPE with its texts into `folder`."""
    calibration, evaluation = write_texts(folder, vocabulary)
    files = {"calibration": calibration, "evaluation": evaluation}
    recipe = folder / "recipe.yaml"
    text = RECIPE.format(model=model, tokens=CALIBRATION_TOKENS, most=most_gib, **files)
    recipe.write_text(text, encoding="utf-8")
    return recipe


def finished_blocks(cache: Path) -> set[int]:
    """Inodes of the blocks that unfinished work has finished: each has its record beside it."""
    records = cache.glob(f"{PARTIAL}*/*.json")
    return {file.stat().st_ino for record in records if (file := record.with_suffix(".safetensors")).is_file()}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


CHECKPOINT = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
ids = torch.tensor(json.loads(sys.argv[2]))
with torch.no_grad():
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
print(float(torch.nn.functional.cross_entropy(logits[0].double(), ids[0, 1:])))
"""
ONNX = """
import json, sys, numpy as np, onnxruntime as ort
session = ort.InferenceSession(sys.argv[1] + "/model.onnx", providers=["CPUExecutionProvider"])
ids = np.array(json.loads(sys.argv[2]))
n = ids.shape[1] - 1
feeds = {"input_ids": ids[:, :-1], "attention_mask": np.ones((1, n), np.int64)}
for value in session.get_inputs():
    if value.name.startswith("past"):  # one buffer for past and present
        feeds[value.name] = np.zeros((1, value.shape[1], n, value.shape[3]), np.float32)
feeds = {value.name: feeds[value.name] for value in session.get_inputs()}
logits = session.run(["logits"], feeds)[0][0].astype(np.float64)
logits -= logits.max(-1, keepdims=True)
chosen = np.take_along_axis(logits, ids[0, 1:, None], -1)[:, 0]
print(float((np.log(np.exp(logits).sum(-1)) - chosen).mean()))
"""


def nats_of(script: str, folder: Path, call: Call) -> float:
    """Return the nats per token that a fresh process measures on one text. RunError where it fails."""
    vocabulary = json.loads((call.out / "model" / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    ids = random_tokens(1, EVALUATION_TOKENS, vocabulary, seed=2).tolist()
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), json.dumps(ids)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RunError(f"{folder.name} does not load: {done.stderr.strip().splitlines()[-1:]}")
    return float(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__ or "", NEEDS, measure))
