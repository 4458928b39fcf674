"""Claims about the memory of `gptq`, in a recipe of its own, like recipes/claims/tinystories-w4-gptq.yaml.

Peak resident memory of the whole process that compresses a random Llama (hidden 1024, feed-forward 2816, 16 heads,
32,000 tokens; 4 bits in groups of 128; 32 samples of 512 tokens) to a checkpoint: with 24 layers at most 1.1 times that
with 6, below half of llm-compressor's with 24, and within 10 % of what the plan forecast.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common import Call, Claim, Measured, Row, RunError, at_most, plan_recipe, run_script, say
from random_models import make_work, ours, theirs

NEEDS = ()
FEW, MANY = 6, 24
FLAT_BAR, PEER_BAR, FORECAST_BAR = 1.10, 0.5, 0.10


def measure(call: Call) -> Measured:
    rows: list[Row] = []
    for n_layers in (2, 4) if call.quick else (FEW, MANY):
        work = make_work(call.out / f"work-{n_layers}", n_layers, call)
        done = ours(work, f"ours-{n_layers}", call)
        foretold = forecast(work.recipe, call.out / f"plan-{n_layers}")
        rows.append(memory_row("ours", n_layers, done.peak_bytes) | {"forecast_mib": foretold / 2**20})
    if not call.ours:
        try:
            done = theirs(work, f"llm-compressor-{n_layers}", call, keep=False)
            rows.append(memory_row("llm-compressor", n_layers, done.peak_bytes))
        except RunError as error:
            say(f"llm-compressor: {error}")
            rows.append({"model": "llm-compressor", "layers": n_layers, "failed": str(error)})
    return claims(rows), rows


def memory_row(name: str, n_layers: int, peak_bytes: int) -> Row:
    return {"model": name, "layers": n_layers, "peak_mib": peak_bytes / 2**20}


def forecast(recipe: Path, cache: Path) -> int:
    """Return the plan's bytes of the process that compresses; while the bundle is written, there is another one."""
    from compress.planning.forecast import WRITING

    stages = plan_recipe(recipe, (), cache)["forecast"]["stages"]
    return max(int(stage["memory_bytes"]) for stage in stages if stage["name"] != WRITING)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """`rows`: ours with few layers, ours with many, and the peer's with many if it was asked."""
    few, many = (row for row in rows if row["model"] == "ours")
    off = max(abs(row["forecast_mib"] / row["peak_mib"] - 1) for row in (few, many))
    held = [
        at_most("peak_ratio_of_24_layers_to_6", many["peak_mib"] / few["peak_mib"], FLAT_BAR),
        at_most("forecast_relative_error", off, FORECAST_BAR),
    ]
    for row in rows:
        if row["model"] == "llm-compressor":
            ratio = None if "failed" in row else many["peak_mib"] / row["peak_mib"]
            held.append(at_most("peak_ratio_to_llm_compressor", ratio, PEER_BAR))
    return held


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
