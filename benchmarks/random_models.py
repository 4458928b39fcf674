"""Random Llamas, compressed for time and memory: the same folder and the same tokens for ours and for a peer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Call, apply_recipe, pass_seconds, run_job
from language import load_causal, random_llama, random_tokens, with_weights
from peers.batches import write_batches
from subjects import LLMCOMPRESSOR, THREADS, checkpoint_of
from torch import nn

BITS, GROUP = 4, 128
SAMPLES, TOKENS = 32, 512
HELD_OUT = 4
"""Further samples on which the error of layers is measured."""
RECIPE = """\
version: 1
name: random-llama
model: {{source: "dir:{folder}", task: text-generation}}
preprocess: {{kind: language, max_length: {tokens}}}
data:
  calibration: {{source: "jsonl:{calibration}", shuffle: false}}
  evaluation: {{source: "jsonl:{evaluation}", samples: 1, shuffle: false}}
target: transformers
passes:
  - {{kind: gptq, bits: {bits}, group_size: {group}, compute: bfloat16}}
export:
  - {{kind: checkpoint}}
"""


@dataclass(frozen=True)
class Work:
    """A folder to compress, and the files that say how."""

    model: Path
    recipe: Path
    batches: Path
    """For the peer: the same tokens as the recipe's calibration set."""
    held_out: np.ndarray
    """int64 [HELD_OUT, TOKENS]."""


@dataclass(frozen=True)
class Done:
    """One compression. `weights` gives the model with the compressed weights."""

    seconds: float | None
    peak_bytes: int
    result: Path


def make_work(folder: Path, n_layers: int, call: Call) -> Work:
    """A random Llama with its tokens and its recipe in a new folder."""
    folder.mkdir()
    model = random_llama(folder / "float", n_layers, call.quick)
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    samples, length = (4, 32) if call.quick else (SAMPLES, TOKENS)
    tokens = random_tokens(samples + HELD_OUT, length, vocabulary)
    batches = folder / "batches.npz"
    write_batches(batches, [{"input_ids": row[None]} for row in tokens[:samples]])
    recipe = write_recipe(folder, model, tokens[:samples], tokens[samples:], GROUP)
    return Work(model, recipe, batches, tokens[samples:])


def write_recipe(folder: Path, model: Path, calibration: np.ndarray, evaluation: np.ndarray, group: int) -> Path:
    """RECIPE in `folder`, with the tokens [N, T] as texts that the model's tokenizer turns into just these."""
    files = {"calibration": folder / "calibration.jsonl", "evaluation": folder / "evaluation.jsonl"}
    for path, tokens in zip(files.values(), (calibration, evaluation), strict=True):
        texts = [" ".join(f"w{token}" for token in row) for row in tokens]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    recipe = folder / "recipe.yaml"
    text = RECIPE.format(folder=model, tokens=calibration.shape[1], bits=BITS, group=group, **files)
    recipe.write_text(text, encoding="utf-8")
    return recipe


def ours(work: Work, name: str, call: Call) -> Done:
    """`compress apply`: the seconds of its pass, the peak of the whole process."""
    bundle = call.out / name
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    peak = apply_recipe(work.recipe, (), bundle, call.out / f"{name}-cache", environment)
    return Done(pass_seconds(bundle, ("gptq",)), peak, checkpoint_of(bundle))


def theirs(work: Work, name: str, call: Call, keep: bool = True) -> Done:
    """llm-compressor's oneshot: its seconds, and the peak of its process by then."""
    weights = call.out / f"{name}.safetensors"
    job: Mapping[str, Any] = {
        "folder": work.model,
        "task": "text-generation",
        "batches": work.batches,
        "method": "gptq",
        "bits": BITS,
        "group_size": GROUP,
        "samples": 4 if call.quick else SAMPLES,
        "threads": THREADS,
        "out": weights if keep else None,
    }
    answer = run_job(LLMCOMPRESSOR, job, call.out, name)
    return Done(answer["seconds"], answer["peak_bytes"], weights)


def compressed(work: Work, done: Done) -> nn.Module:
    """The model with the compressed weights: a checkpoint of ours, or a peer's file on the float model."""
    if done.result.is_dir():
        return load_causal(done.result, dequantize=True)
    return with_weights(load_causal(work.model), done.result)


@torch.no_grad()
def layer_error(work: Work, done: Done) -> float:
    """Mean over the linear layers of |compressed(x) - float(x)| / |float(x)|, Frobenius norms.

    x is what the layer reads in the float model on the held-out tokens; the output head is left out.
    """
    model, other = load_causal(work.model), compressed(work, done)
    sums: dict[str, list[float]] = {}

    def watch(name: str, twin: nn.Module) -> Any:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            found = sums.setdefault(name, [0.0, 0.0])
            found[0] += float((twin(inputs[0]) - output).double().square().sum())
            found[1] += float(output.double().square().sum())

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_hook(watch(name, other.get_submodule(name)))
    for row in work.held_out:
        model(input_ids=torch.from_numpy(row)[None], use_cache=False)
    return float(np.mean([(error / whole) ** 0.5 for error, whole in sums.values()]))
