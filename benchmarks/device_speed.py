"""Claims about the time of `gptq` on a GPU, beside this machine's processor, and its seconds per billion weights.

The recipe is its own, like recipes/claims/tinystories-w4-gptq.yaml.

A random Llama of the widths of one of 8 billion parameters (hidden 4,096, feed-forward 14,336, 32 heads over 8), two
blocks, 4 bits in groups of 128, products in bfloat16, 64 samples of 512 tokens: the pass of `compress apply` on the GPU
takes at most half of its time on all cores. Rows have the seconds per billion weights that are rounded, and the most of
the GPU's memory that was taken. It ends with exit code 2 where torch has no GPU; `make gpu-check` runs it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from common import Call, CallError, Claim, Measured, Row, apply_recipe, at_most, pass_seconds, run_script, say
from language import QUICK, VOCABULARY, random_tokens, write_random_llama
from random_models import GROUP, write_recipe

from compress.blocks.device import explain_no_device

NEEDS = ()
DEVICES = ("cuda", "cpu")
WIDE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LAYERS, SAMPLES, TOKENS = 2, 64, 512
TIME_BAR = 0.5


def measure(call: Call) -> Measured:
    if why := explain_no_device("cuda"):
        raise CallError(why)
    folder = call.out / "work"
    folder.mkdir()
    vocabulary = 512 if call.quick else VOCABULARY
    shape = (QUICK if call.quick else WIDE) | {"num_hidden_layers": LAYERS, "vocab_size": vocabulary}
    model = write_random_llama(folder / "float", shape)
    tokens = random_tokens(SAMPLES + 1, 32 if call.quick else TOKENS, vocabulary)
    recipe = write_recipe(folder, model, tokens[:SAMPLES], tokens[SAMPLES:], GROUP)
    rows = [run_on(device, recipe, n_rounded(shape), call) for device in DEVICES]
    return claims(rows), rows


def run_on(device: str, recipe: Path, n_weights: int, call: Call) -> Row:
    """One build from nothing: the seconds of its pass, and the device's memory as its log has it."""
    bundle = call.out / device
    apply_recipe(recipe, (f"device={device}",), bundle, call.out / f"{device}-cache")
    seconds = pass_seconds(bundle, ("gptq",))
    say(f"{device}: {seconds} s")
    each = None if seconds is None else seconds / n_weights * 1e9
    return {"model": device, "seconds": seconds, "seconds_per_billion": each, "device_mib": device_mib(bundle)}


def device_mib(bundle: Path) -> int | None:
    """The most of the device's memory that a pass took, as compress.log has it; None on a processor."""
    found = re.findall(
        r"at most (\d+) MiB of cuda:\d+ were taken", (bundle / "compress.log").read_text(encoding="utf-8")
    )
    return max(map(int, found), default=None)


def n_rounded(shape: dict[str, Any]) -> int:
    """Weights of the linear layers of all blocks."""
    width, shared = shape["hidden_size"], shape["num_key_value_heads"] / shape["num_attention_heads"]
    attention = width * width * (2 + 2 * shared)
    return int(shape["num_hidden_layers"] * (attention + 3 * width * shape["intermediate_size"]))


def claims(rows: list[Row]) -> list[Claim]:
    """None that holds where one of the times is missing."""
    cuda, cpu = (row["seconds"] for row in rows)
    return [at_most("gptq_cuda_over_cpu_time", None if cuda is None or cpu is None else cuda / cpu, TIME_BAR)]


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
