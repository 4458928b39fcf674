"""What a plan foretells against what is measured: time and memory of the work, and the speed of its result.

For every recipe of recipes/ that runs here, and for passes over a story teller and a random Llama of 0.17 billion
parameters. Each is planned and then applied, with few samples and seconds of training, which change no speed. Claims:
the work takes within 25 % of the time and 10 % of the memory that the plan said before it; float and compressed model
take within 20 % of the milliseconds. Recipes whose model or data are not here are rows with the reason, and claim
nothing. `--quick` takes the quickstart alone.

Time is that of the whole process, memory the resident set of its tree, sampled ten times a second, pages of open files
counted. The tables in docs/howto/forecast.md are what this prints as Markdown on stderr at the end; a table of stages
beside it shows which of them is off. Other work on the machine spoils the comparison: leave it alone meanwhile, or at
least give plan and run one thread each (OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    GATE_FELL_SHORT,
    ROOT,
    Call,
    CallError,
    Claim,
    Measured,
    Row,
    apply_command,
    at_most,
    plan_recipe,
    run_script,
    say,
)
from one_billion import CALIBRATION_TOKENS, SMALL, write_model, write_texts
from process_tree import Run, run_tree

from compress.errors import CompressError
from compress.recipe.load import load_recipe
from runtime.errors import RuntimeFailure

RECIPES = ROOT / "recipes"
FEW_SAMPLES, TRAINING_SECONDS = 64, 5
NEAR = 0.2
NEAR_SECONDS, NEAR_BYTES = 0.25, 0.10
STORIES = "models/tinystories656k-hf"
PASSES: Mapping[str, str] = {
    "hqq": "[{kind: hqq, bits: 4, group_size: 32}]",
    "awq, gptq": "[{kind: awq, round: false, scheme: W4A16, group_size: 32}, {kind: gptq, bits: 4, group_size: 32}]",
    "autoround": "[{kind: autoround, bits: 4, group_size: 32, steps: 20}]",
    "tune": "[{kind: tune, bits: 4, group_size: 32, steps: 20, batch_size: 2}]",
    "tune, block by block": "[{kind: tune, bits: 4, group_size: 32, steps: 4, block_steps: 10, blockwise: true}]",
}
"""Name -> passes over each of the two decoders, into a checkpoint."""
RECIPE = """\
version: 1
name: forecast
model: {{source: "{source}", task: text-generation}}
preprocess: {{kind: language, max_length: {tokens}}}
data:
  calibration: {{source: "{calibration}"}}
  evaluation: {{source: "{evaluation}"}}
target: transformers
passes: {passes}
export: [{{kind: checkpoint}}]
"""
EXPORTING = {"exporting to float ONNX": "export to float ONNX"}
"""The log's name of a stage -> the plan's, where they differ."""


@dataclass(frozen=True)
class Subject:
    """A recipe whose forecasts are held against its run."""

    name: str
    recipe: Path
    sets: Sequence[str] = ()


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


def list_decoders(call: Call) -> Iterator[Subject]:
    """Yield recipes of PASSES over the story teller, where it is here, and over a random Llama that is made."""
    llama = write_model(call.out / "llama", SMALL)
    calibration, evaluation = write_texts(call.out, SMALL["vocab_size"])
    texts = {"calibration": f"jsonl:{calibration}", "evaluation": f"jsonl:{evaluation}"}
    models = {"0.17 B": (llama, CALIBRATION_TOKENS, texts)}
    if (call.bench / STORIES).is_dir():
        stories = f"jsonl:{call.bench}/data/tinystories/stories.jsonl"
        sets = {"calibration": f'{stories}", skip: 400, samples: "64', "evaluation": f'{stories}", samples: "64'}
        models["story teller"] = (call.bench / STORIES, 512, sets)
    for model, (folder, tokens, sets) in models.items():
        for name, passes in PASSES.items():
            path = call.out / f"{model}-{name}.yaml".replace(" ", "-").replace(",", "")
            text = RECIPE.format(source=f"dir:{folder}", tokens=tokens, passes=passes, **sets)
            path.write_text(text.replace('samples: "64"', "samples: 64"), encoding="utf-8")
            yield Subject(f"{name} of {model}", path)


def measure_subject(subject: Subject, call: Call) -> tuple[list[Claim], Row]:
    """Plan and apply one recipe; return its claims and its row."""
    say(f"{subject.name}: planning")
    stem = subject.recipe.stem
    cache, bundle = call.out / f"{stem}-cache", call.out / stem
    try:
        plan = plan_recipe(subject.recipe, subject.sets, cache)
    except (CallError, CompressError, RuntimeFailure) as error:  # what is missing here is the row
        return [], {"recipe": subject.name, "skipped": str(error).partition("\n")[0]}
    run = run_tree(apply_command(subject.recipe, subject.sets, bundle, cache))
    if run.code not in (0, GATE_FELL_SHORT):
        return [], {"recipe": subject.name, "skipped": f"compress apply ended with exit code {run.code}"}
    for line in compare_stages(plan["forecast"]["stages"], bundle, run):
        say(line)
    claims, row = hold_work(subject.name, plan["forecast"], run)
    report = json.loads((bundle / "report.json").read_text("utf-8"))
    more, speeds = hold_latency(subject.name, plan["latency"], report)
    return [*claims, *more], row | speeds


def hold_work(name: str, forecast: Mapping[str, Any], run: Run) -> tuple[list[Claim], Row]:
    """Hold the time and the memory of a run against their forecast."""
    row: Row = {
        "recipe": name,
        "seconds forecast": forecast["seconds"],
        "seconds measured": run.seconds,
        "mib forecast": forecast["memory_bytes"] / 2**20,
        "mib measured": run.peak_bytes / 2**20,
    }
    off = {what: abs(row[f"{what} forecast"] / row[f"{what} measured"] - 1) for what in ("seconds", "mib")}
    return [
        at_most(f"{name}: time off by", off["seconds"], NEAR_SECONDS),
        at_most(f"{name}: memory off by", off["mib"], NEAR_BYTES),
    ], row


def hold_latency(name: str, latency: Mapping[str, Any] | None, report: Mapping[str, Any]) -> tuple[list[Claim], Row]:
    """Hold the speed of the float and the compressed model against its forecast; nothing where there is none."""
    if latency is None:
        return [], {}
    row: Row = {"backend": latency["backend"], "metric": latency["metric"]}
    claims = []
    for side, key in (("baseline", "float_ms"), ("candidate", "compressed_ms")):
        measured = read_latency(report[side], latency["metric"])
        row |= {f"{side} forecast": latency[key], f"{side} measured": measured}
        off = None if measured is None else abs(latency[key] / measured - 1)
        claims.append(at_most(f"{name}: {side} off by", off, NEAR))
    return claims, row


def read_latency(side: Mapping[str, Any], metric: str) -> float | None:
    """Return the milliseconds that a report's side has of what was forecast."""
    value: float | None = side["generation"].get("tpot") if metric == "tpot" else side["latency_ms"].get("p50")
    return value


def compare_stages(stages: Sequence[Mapping[str, Any]], bundle: Path, run: Run) -> Iterator[str]:
    """Yield a line for each stage: seconds and MiB, forecast and measured. What the log has not is the start's."""
    log = (bundle / "compress.log").read_text(encoding="utf-8")
    ends = re.findall(r"^ *([\d.]+)s  (.+): ([\d.]+) s$", log, re.MULTILINE)
    late = run.seconds - float(re.findall(r"^ *([\d.]+)s  ", log, re.MULTILINE)[-1])  # the log begins after imports
    spans: dict[str, list[tuple[float, float]]] = {}
    for end, name, seconds in ends:
        spans.setdefault(EXPORTING.get(name, name), []).append((float(end) + late - float(seconds), float(end) + late))
    known = {stage["name"]: stage for stage in stages}
    took = {name: sum(end - start for start, end in found) for name, found in spans.items()}
    for name in [*known, *(name for name in spans if name not in known)]:
        inside = [n for t, n in run.samples if any(start <= t <= end for start, end in spans.get(name, []))]
        seconds = run.seconds - sum(took[n] for n in took if n in known) if name == "start" else took.get(name, 0.0)
        stage = known.get(name, {"seconds": 0.0, "memory_bytes": 0})
        yield (
            f"  {name:28} {stage['seconds']:7.1f} {seconds:7.1f} s   "
            f"{stage['memory_bytes'] / 2**20:6.0f} {max(inside, default=0) / 2**20:6.0f} MiB"
        )


def work_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the page's table of time and memory."""
    yield "| recipe | time: forecast over measurement | memory: forecast over measurement |"
    yield "|---|---|---|"
    for row in rows:
        if "skipped" not in row:
            ratios = [row[f"{what} forecast"] / row[f"{what} measured"] for what in ("seconds", "mib")]
            yield f"| `{row['recipe']}` | {ratios[0]:.2f} of {row['seconds measured']:.0f} s | " + (
                f"{ratios[1]:.2f} of {row['mib measured']:.0f} MiB |"
            )


def to_markdown(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the page's table of speeds."""
    yield "| recipe | float: forecast, measured | compressed: forecast, measured | times as fast: forecast, measured |"
    yield "|---|---|---|---|"
    for row in rows:
        pairs = [[row.get(f"{side} {what}") for side in ("baseline", "candidate")] for what in ("forecast", "measured")]
        (f0, f1), (m0, m1) = pairs
        if f0 is None or f1 is None or m0 is None or m1 is None:
            continue
        cells = (f"{f0:.3g}, {m0:.3g} ms", f"{f1:.3g}, {m1:.3g} ms", f"{f0 / f1:.2f}, {m0 / m1:.2f}")
        yield f"| `{row['recipe']}` | {' | '.join(cells)} |"


def list_subjects(call: Call) -> Iterator[Subject]:
    """Yield what is measured, one after the other; those that cannot be read are said."""
    for path in list_recipes(call.quick):
        name = str(path.relative_to(RECIPES))
        try:
            yield Subject(name, path, choose_sets(path, call.bench))
        except (CompressError, RuntimeFailure) as error:
            say(f"{name}: {str(error).partition(chr(10))[0]}")
    if not call.quick:
        yield from list_decoders(call)


def measure(call: Call) -> Measured:
    """Measure all recipes, one after the other."""
    claims: list[Claim] = []
    rows: list[Row] = []
    for subject in list_subjects(call):
        held, row = measure_subject(subject, call)
        claims += held
        rows.append(row)
    for line in (*work_table(rows), "", *to_markdown(rows)):
        say(line)
    return claims, rows


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__ or "", (), measure))
