"""Claims about a folder of a model that no class is known for, rounded by the names of its tensors.

Random weights of a decoder in bfloat16, 2.5 GB in five shards, go through `compress apply` with `source: shards:` and
`rtn` to 4 bits, in a recipe of its own, like recipes/int4-llm-shards.yaml. Memory is the resident set of the whole
process tree, sampled ten times a second, pages of open files counted. Claims: above what the same command takes of a
folder without weights worth the name it takes less than one shard; and the plan foretold the whole within 10 %.
`--quick` does a tenth of the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Call, Claim, Measured, Row, RunError, apply_command, at_most, plan_recipe, run_script
from process_tree import Run, run_tree
from torch import Tensor

from compress.export.shards import Entry, ShardUnit, write_shards

NEEDS = ()
WIDTH, INNER, VOCABULARY, N_SHARDS = 2048, 8192, 32000, 5
FULL, QUICK, EMPTY = 17, 2, 1
"""Blocks; of the folder without weights worth the name, whose widths are a sixteenth."""
FORECAST_BAR = 0.10
RECIPE = """\
version: 1
name: by-names
model: {{source: "shards:{model}", task: text-generation}}
target: vllm
passes:
  - {{kind: rtn, scheme: W4A16}}
export:
  - {{kind: checkpoint, target: vllm}}
"""


def measure(call: Call) -> Measured:
    n_blocks = QUICK if call.quick else FULL
    folders = {
        "empty": write_model(call.out / "empty", EMPTY, WIDTH // 16, INNER // 16),
        "whole": write_model(call.out / "whole", n_blocks, WIDTH, INNER),
    }
    peaks: dict[str, Run] = {}
    for name, folder in folders.items():
        recipe = call.out / f"{name}.yaml"
        recipe.write_text(RECIPE.format(model=folder))
        peaks[name] = run_tree(apply_command(recipe, (), call.out / f"out-{name}", call.out / f"cache-{name}"))
        if peaks[name].code != 0:
            raise RunError(f"{recipe}: ended with code {peaks[name].code}")
    foretold = plan_recipe(call.out / "whole.yaml", (), call.out / "plan")["forecast"]["memory_bytes"]
    shards = sorted(folders["whole"].glob("*.safetensors"))
    above = peaks["whole"].peak_bytes - peaks["empty"].peak_bytes
    row: Row = {
        "folder_gb": sum(path.stat().st_size for path in shards) / 1e9,
        "shard_mib": max(path.stat().st_size for path in shards) / 2**20,
        "peak_mib": peaks["whole"].peak_bytes / 2**20,
        "above_an_empty_folder_mib": above / 2**20,
        "forecast_mib": foretold / 2**20,
        "seconds": peaks["whole"].seconds,
    }
    claims: list[Claim] = [
        at_most("above_an_empty_folder_to_a_shard", row["above_an_empty_folder_mib"] / row["shard_mib"], 1.0)
    ]
    if not call.quick:
        claims.append(at_most("forecast_relative_error", abs(row["forecast_mib"] / row["peak_mib"] - 1), FORECAST_BAR))
    return claims, [row]


def write_model(folder: Path, n_blocks: int, width: int, inner: int) -> Path:
    """Write random weights, in shards, under a type of model that nothing here has a class for."""
    folder.mkdir(parents=True)
    shapes = dict(list_shapes(n_blocks, width, inner))
    config: dict[str, Any] = {
        "architectures": ["UnheardOfForCausalLM"],
        "model_type": "unheard_of",
        "dtype": "bfloat16",
    }
    config |= {
        "num_hidden_layers": n_blocks,
        "hidden_size": width,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    entries = [Entry(name, torch.bfloat16, shape) for name, shape in shapes.items()]
    units = [ShardUnit((entry,), partial(draw, entry)) for entry in entries]
    write_shards(folder, units, -(-sum(unit.n_bytes for unit in units) // N_SHARDS))
    return folder


def list_shapes(n_blocks: int, width: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, width)
    for block in range(n_blocks):
        at = f"model.layers.{block}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{at}.self_attn.{name}.weight", (width, width)
        yield f"{at}.mlp.gate_proj.weight", (inner, width)
        yield f"{at}.mlp.up_proj.weight", (inner, width)
        yield f"{at}.mlp.down_proj.weight", (width, inner)
        yield f"{at}.input_layernorm.weight", (width,)
    yield "lm_head.weight", (VOCABULARY, width)


def draw(entry: Entry) -> Mapping[str, Tensor]:
    return {entry.name: torch.randn(entry.shape).mul_(0.02).to(entry.dtype)}


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
