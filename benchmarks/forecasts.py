"""The plan's forecast of latency against what is measured at the end, for every recipe of recipes/ that runs here.

Each recipe is planned and then applied, with few samples and seconds of training, which change no speed. Claims: float
and compressed model take within 20 % of what the plan said before any work. Recipes whose model or data are not here
are rows with the reason, and claim nothing. `--quick` takes the quickstart alone.

The table in docs/howto/forecast.md is what this prints as Markdown on stderr at the end. Other work on the machine
spoils the comparison: leave it alone meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, Call, CallError, Claim, Measured, Row, RunError, apply_recipe, at_most, run_script, say

from compress.errors import CompressError
from compress.recipe.load import load_recipe
from runtime.errors import RuntimeFailure

RECIPES = ROOT / "recipes"
FEW_SAMPLES, TRAINING_SECONDS = 64, 5
NEAR = 0.2


def list_recipes(quick: bool) -> list[Path]:
    """Return the recipes at the top and those of the claims."""
    if quick:
        return [RECIPES / "quickstart.yaml"]
    return [*sorted(RECIPES.glob("*.yaml")), *sorted((RECIPES / "claims").glob("*.yaml"))]


def choose_sets(path: Path, bench: Path) -> list[str]:
    """Return the `--set` values that make a recipe short without changing how fast its result is."""
    sets = [f"vars.bench={bench}"] if "bench:" in path.read_text("utf-8") and bench != Path() else []
    recipe = load_recipe(path, sets)
    sets += [f"data.{name}.samples={FEW_SAMPLES}" for name in recipe.data.declared if name != "train"]
    for number, pass_ in enumerate(recipe.passes):
        if "max_seconds" in type(pass_).model_fields:
            sets.append(f"passes.{number}.max_seconds={TRAINING_SECONDS}")
        if "restore" in type(pass_).model_fields:
            sets.append(f"passes.{number}.restore.max_layers=0")  # what few samples say of a gate decides nothing here
    return [*sets, "validate.steps=false"]


def plan_recipe(path: Path, sets: Sequence[str], cache: Path) -> dict[str, Any]:
    """Return the plan as JSON values. CallError with the last line where it cannot be made."""
    words = [part for one in sets for part in ("--set", one)]
    command = [sys.executable, "-m", "compress", "plan", str(path), "--cache", str(cache), "--json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise CallError(next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no plan"))
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure_recipe(path: Path, call: Call) -> tuple[list[Claim], Row]:
    """Plan and apply one recipe; return its claims and its row."""
    name = str(path.relative_to(RECIPES))
    say(f"{name}: planning")
    try:
        sets, cache = choose_sets(path, call.bench), call.out / f"{path.stem}-cache"
        plan = plan_recipe(path, sets, cache)
    except (CallError, CompressError, RuntimeFailure) as error:  # what is missing here is the row
        return [], {"recipe": name, "skipped": str(error).partition("\n")[0]}
    latency = plan["latency"]
    if latency is None:
        why = next((note["text"] for note in plan["notes"] if "not forecast" in note["text"]), "no forecast")
        return [], {"recipe": name, "skipped": why}
    bundle = call.out / path.stem
    try:
        apply_recipe(path, sets, bundle, cache)
    except (CallError, RunError) as error:
        return [], {"recipe": name, "skipped": str(error)}
    report = json.loads((bundle / "report.json").read_text("utf-8"))
    row: Row = {"recipe": name, "backend": latency["backend"], "metric": latency["metric"]}
    claims = []
    for side, key in (("baseline", "float_ms"), ("candidate", "compressed_ms")):
        measured = read_latency(report[side], latency["metric"])
        row |= {f"{side} forecast": latency[key], f"{side} measured": measured}
        off = None if measured is None else abs(latency[key] / measured - 1)
        claims.append(at_most(f"{name}: {side} off by", off, NEAR))
    return claims, row


def read_latency(side: dict[str, Any], metric: str) -> float | None:
    """Return the milliseconds that a report's side has of what was forecast."""
    value: float | None = side["generation"].get("tpot") if metric == "tpot" else side["latency_ms"].get("p50")
    return value


def to_markdown(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the page's table."""
    yield "| recipe | float: forecast, measured | compressed: forecast, measured | times as fast: forecast, measured |"
    yield "|---|---|---|---|"
    for row in rows:
        if "skipped" in row:
            continue
        pairs = [[row[f"{side} {what}"] for side in ("baseline", "candidate")] for what in ("forecast", "measured")]
        (f0, f1), (m0, m1) = pairs
        if m0 is None or m1 is None:
            continue
        cells = (f"{f0:.3g}, {m0:.3g} ms", f"{f1:.3g}, {m1:.3g} ms", f"{f0 / f1:.2f}, {m0 / m1:.2f}")
        yield f"| `{row['recipe']}` | {' | '.join(cells)} |"


def measure(call: Call) -> Measured:
    """Measure all recipes, one after the other."""
    claims: list[Claim] = []
    rows: list[Row] = []
    for path in list_recipes(call.quick):
        held, row = measure_recipe(path, call)
        claims += held
        rows.append(row)
    for line in to_markdown(rows):
        say(line)
    return claims, rows


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__ or "", (), measure))
