"""Claims about a hybrid after 4,096 tokens, beside a twin of the same sizes whose layers all keep keys and values.

Random models of 12 layers (hidden 1024, feed-forward 2816, 32,000 tokens): one with a gated delta rule in three of four
layers, one with attention in all, in 4 bits by `rtn`, on two threads, in our runtime. Each is measured in a process of
its own that reads a prompt of 4,096 tokens and then 32 single ones; the processes take turns. Claims: a token of the
hybrid takes no longer than the twin's, and its process less memory. Beside them, not as a claim: the prompt's time. A
recipe for a real model: recipes/llm/llama-w4a16-gptq.yaml.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import Call, Claim, Measured, Row, RunError, apply_recipe, at_most, run_child, run_script, say

NEEDS = ()
CHILD = "--measure"
KIND = "qwen3_5_text"
LAYERS, EVERY = 12, 4
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QUICK = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
KEYS = ("prompt_s", "token_ms", "peak_mib")
VOCABULARY, PAST, TOKENS, ROUNDS = 32_000, 4096, 32, 3
RECIPE = """\
version: 1
name: {name}
model: {{source: "dir:{model}", task: text-generation}}
preprocess: {{kind: language, max_length: 8192}}
data:
  evaluation: {{source: "jsonl:{texts}", samples: 1, shuffle: false}}
passes:
  - {{kind: rtn, scheme: W4A16, group_size: 32, indivisible: fit}}
validate: {{benchmark: {{processes: 1, iterations: 1}}}}
"""


def measure(call: Call) -> Measured:
    past, rounds = (256, 1) if call.quick else (PAST, ROUNDS)
    texts = call.out / "text.jsonl"
    texts.write_text('{"text": "' + " ".join(f"w{i}" for i in range(3, 67)) + '"}\n', encoding="utf-8")
    bundles = {}
    for name, every in (("hybrid", EVERY), ("twin", 1)):
        folder, recipe = call.out / f"model-{name}", call.out / f"{name}.yaml"
        write_model(folder, every, call.quick)
        recipe.write_text(RECIPE.format(name=name, model=folder, texts=texts), encoding="utf-8")
        bundles[name] = call.out / name
        apply_recipe(recipe, (), bundles[name], call.out / "cache")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in bundles}
    for _ in range(rounds):
        for name, bundle in bundles.items():
            say(f"{name}: a prompt of {past} tokens, and {TOKENS} more")
            found[name].append(run_alone(bundle, past, call.out / "answer.json"))
    rows: list[Row] = [{"model": name} | {key: median(runs, key) for key in KEYS} for name, runs in found.items()]
    claims: list[Claim] = []
    for key, what in (("token_ms", "a token"), ("peak_mib", "memory")):
        ratio = [own[key] / other[key] for own, other in zip(found["hybrid"], found["twin"], strict=True)]
        claims.append(at_most(f"{what} of the hybrid beside the twin's", float(np.median(ratio)), 1.0))
    return claims, rows


def median(rows: list[dict[str, float]], key: str) -> float:
    return float(np.median([row[key] for row in rows]))


def write_model(folder: Path, every: int, quick: bool) -> None:
    """A random model with attention in one of `every` layers, as a folder with a tokenizer."""
    import torch
    from language import write_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    n_layers, vocabulary = (4, 512) if quick else (LAYERS, VOCABULARY)
    kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(n_layers)]
    sizes = SHAPE | (QUICK if quick else {}) | {"num_hidden_layers": n_layers, "vocab_size": vocabulary}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(KIND, **sizes, layer_types=kinds)).save_pretrained(folder)
    write_tokenizer(folder, vocabulary)


def run_alone(bundle: Path, past: int, answer: Path) -> dict[str, float]:
    code, _ = run_child([sys.executable, __file__, CHILD, str(bundle), str(past), str(answer)])
    if code:
        raise RunError(f"{bundle.name}: its process ended with exit code {code}")
    row: dict[str, float] = json.loads(answer.read_text(encoding="utf-8"))
    return row


def measure_bundle(bundle: Path, past: int) -> dict[str, float]:
    """Seconds of a prompt, milliseconds of a token behind it, and the process's peak of memory."""
    from runtime.backends import find_backend
    from runtime.decode.kv_cache import Decoder
    from runtime.tasks.manifest import read_manifest

    artifact = read_manifest(bundle).candidate_for("onnxruntime-cpu")
    session = find_backend("onnxruntime-cpu").open(bundle / artifact.path, 2, {})
    decoder = Decoder(session, artifact.cache)
    begun = time.perf_counter()
    decoder.start([np.arange(past) % 500 + 3], past + TOKENS + 1)
    read, token = time.perf_counter() - begun, np.array([7], np.int64)
    decoder.step(token)  # the first of a shape finds its kernels
    begun = time.perf_counter()
    for _ in range(TOKENS):
        decoder.step(token)
    token_ms = 1000 * (time.perf_counter() - begun) / TOKENS
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"prompt_s": read, "token_ms": token_ms, "peak_mib": peak}


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        Path(sys.argv[4]).write_text(json.dumps(measure_bundle(Path(sys.argv[2]), int(sys.argv[3]))), encoding="utf-8")
    else:
        raise SystemExit(run_script(__doc__, NEEDS, measure))
