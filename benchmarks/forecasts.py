"""What a plan foretells against what is measured: time and memory of the work, and the speed of its result.

For every recipe of recipes/ that runs here, and for passes over a story teller and a random Llama of 0.17 billion
parameters. Each is planned and then applied, with few samples and seconds of training, which change no speed; then once
more with another seed, so that its passes work again and the plan knows how long they took. Claims: the first time the
work takes as long as the plan says, half and twice as long being its bounds; the second time within 25 % of it; within
10 % of the memory; float and compressed model take within 20 % of the milliseconds. Recipes whose model or data are not
here are rows with the reason, and claim nothing. `--quick` takes the quickstart alone, `--only NAME` one recipe
(quickstart.yaml, claims/minilm-int8.yaml).

`--shipped` leaves the decoders out and writes docs/reference/forecasts.md as it goes: a row for each recipe, anew for
those that were measured, the others as they stand there. A row that misses a bar says which stage is why.

Time is that of the log, which begins when the libraries are imported; memory the resident set of the process's tree,
sampled ten times a second, pages of open files counted. The tables in docs/howto/forecast.md are what this prints as
Markdown on stderr at the end; a table of stages beside it shows which of them is off. Other work on the machine spoils
the comparison: leave it alone meanwhile, or at least give plan and run one thread each (OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    at_least,
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
SHIPPED, PAGE = "--shipped", ROOT / "docs/reference/forecasts.md"
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
        recipe = load_recipe(subject.recipe, subject.sets)
        if recipe.goal or recipe.search:
            return [], {"recipe": subject.name, "skipped": "`compress sweep` finds its passes first"}
        plan = plan_recipe(subject.recipe, subject.sets, cache)
    except (CallError, CompressError, RuntimeFailure) as error:  # what is missing here is the row
        return [], {"recipe": subject.name, "skipped": str(error).partition("\n")[0]}
    run = run_tree(apply_command(subject.recipe, subject.sets, bundle, cache))
    if run.code not in (0, GATE_FELL_SHORT):
        return [], {"recipe": subject.name, "skipped": f"compress apply ended with exit code {run.code}"}
    stages = compare_stages(plan["forecast"]["stages"], bundle, run)
    took = read_log_seconds(bundle)
    again = [*subject.sets, f"seed={recipe.seed + 1}"]
    foretold = plan_recipe(subject.recipe, again, cache)["forecast"]["seconds"]
    repeated = run_tree(apply_command(subject.recipe, again, call.out / f"{stem}-again", cache))
    if repeated.code not in (0, GATE_FELL_SHORT):
        return [], {"recipe": subject.name, "skipped": f"compress apply ended with exit code {repeated.code}"}
    pair = (foretold, read_log_seconds(call.out / f"{stem}-again"))
    for stage in stages:
        say(stage.to_line())
    claims, row = hold_work(subject.name, plan["forecast"], took, run.peak_bytes, pair)
    row |= explain_misses(row, stages)
    report = json.loads((bundle / "report.json").read_text("utf-8"))
    more, speeds = hold_latency(subject.name, plan["latency"], report)
    return [*claims, *more], row | speeds


def read_log_seconds(bundle: Path) -> float:
    """Return the seconds at which the last line of a bundle's log was written."""
    log = (bundle / "compress.log").read_text(encoding="utf-8")
    return float(re.findall(r"^ *([\d.]+)s  ", log, re.MULTILINE)[-1])


def hold_work(
    name: str, forecast: Mapping[str, Any], seconds: float, peak_bytes: int, again: tuple[float, float]
) -> tuple[list[Claim], Row]:
    """Hold the time and memory of a run against their forecast. `again`: the second's time, foretold and measured."""
    row: Row = {
        "recipe": name,
        "seconds forecast": forecast["seconds"],
        "seconds measured": seconds,
        "again forecast": again[0],
        "again measured": again[1],
        "mib forecast": forecast["memory_bytes"] / 2**20,
        "mib measured": peak_bytes / 2**20,
    }
    low, high = forecast["between"]
    off = {what: abs(row[f"{what} forecast"] / row[f"{what} measured"] - 1) for what in ("again", "mib")}
    return [
        at_least(f"{name}: seconds, the first time", seconds, low),
        at_most(f"{name}: seconds, the first time", seconds, high),
        at_most(f"{name}: time off by, the second time", off["again"], NEAR_SECONDS),
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


@dataclass(frozen=True)
class Stage:
    """What was foreseen and measured of one stage: (forecast, measured) seconds and MiB."""

    name: str
    seconds: tuple[float, float]
    mib: tuple[float, float]

    def to_line(self) -> str:
        (s0, s1), (m0, m1) = self.seconds, self.mib
        return f"  {self.name:28} {s0:7.1f} {s1:7.1f} s   {m0:6.0f} {m1:6.0f} MiB"


def compare_stages(stages: Sequence[Mapping[str, Any]], bundle: Path, run: Run) -> list[Stage]:
    """Return each stage with its forecast and its measurement. What the log has not is the start's."""
    log = (bundle / "compress.log").read_text(encoding="utf-8")
    ends = re.findall(r"^ *([\d.]+)s  (.+): ([\d.]+) s$", log, re.MULTILINE)
    late = run.seconds - float(re.findall(r"^ *([\d.]+)s  ", log, re.MULTILINE)[-1])  # the log begins after imports
    spans: dict[str, list[tuple[float, float]]] = {}
    for end, name, seconds in ends:
        spans.setdefault(name, []).append((float(end) + late - float(seconds), float(end) + late))
    known = {stage["name"]: stage for stage in stages}
    took = {name: sum(end - start for start, end in found) for name, found in spans.items()}
    compared = []
    for name in [*known, *(name for name in spans if name not in known)]:
        inside = [n for t, n in run.samples if any(start <= t <= end for start, end in spans.get(name, []))]
        seconds = run.seconds - sum(took[n] for n in took if n in known) if name == "start" else took.get(name, 0.0)
        stage = known.get(name, {"seconds": 0.0, "memory_bytes": 0})
        memory = stage["memory_bytes"] / 2**20, max(inside, default=0) / 2**20
        compared.append(Stage(name, (stage["seconds"], seconds), memory))
    return compared


def explain_misses(row: Row, stages: Sequence[Stage]) -> Row:
    """Return {"time off", "memory off"}: the stage that most of a missed bar comes from, in words; {} where none is."""
    why: Row = {}
    if not 0.5 <= row["seconds forecast"] / row["seconds measured"] <= 2:
        direction = 1 if row["seconds measured"] > row["seconds forecast"] else -1
        stage = max(stages, key=lambda stage: (stage.seconds[1] - stage.seconds[0]) * direction)
        why["time off"] = f"time: {stage.name} took {stage.seconds[1]:.0f} s, foreseen {stage.seconds[0]:.0f} s"
    if is_off(row["mib forecast"], row["mib measured"], NEAR_BYTES):
        highest = max(stages, key=lambda stage: stage.mib[1])
        why["memory off"] = f"memory: {highest.name} took {highest.mib[1]:.0f} MiB, foreseen {highest.mib[0]:.0f} MiB"
    return why


def is_off(forecast: float, measured: float, bar: float) -> bool:
    return abs(forecast / measured - 1) > bar


def work_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the page's table of time and memory."""
    yield "| recipe | time, at first: forecast over measurement | the second time | memory |"
    yield "|---|---|---|---|"
    for row in rows:
        if "skipped" not in row:
            yield f"| `{row['recipe']}` | {' | '.join(work_cells(row))} |"


def work_cells(row: Row) -> list[str]:
    """Return forecast over measurement of the time, of that of the second run, and of the memory."""
    units = {"seconds": "s", "again": "s", "mib": "MiB"}
    return [
        f"{row[f'{what} forecast'] / row[f'{what} measured']:.2f} of {row[f'{what} measured']:.0f} {unit}"
        for what, unit in units.items()
    ]


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


CELLS = ("recipe", "time", "again", "memory", "float call", "compressed call", "beyond the bars, and why")


def shipped_row(row: Row, load: float) -> str:
    """Return a recipe's row of the page: forecast over measurement, and what misses its bar."""
    if "skipped" in row:
        return f"| `{row['recipe']}` | | | | | | not run: {clean_cell(row['skipped'])} |"
    misses = [row[key] for key in ("time off", "memory off") if key in row]
    cells = []
    for side in ("baseline", "candidate"):
        foreseen, measured = row.get(f"{side} forecast"), row.get(f"{side} measured")
        if foreseen is None or measured is None:
            cells.append("not foreseen")
            continue
        cells.append(f"{foreseen / measured:.2f} of {measured:.3g} ms")
        if is_off(foreseen, measured, NEAR):
            misses.append(f"{'float' if side == 'baseline' else 'compressed'} call: {foreseen:.3g} ms foreseen")
    if misses and load > 0.5:
        misses.append(f"other work beside (load {load:.1f})")
    return f"| `{row['recipe']}` | {' | '.join([*work_cells(row), *cells])} | {clean_cell('; '.join(misses))} |"


def clean_cell(text: str) -> str:
    """Return a text that does not end a cell, and names no folder of this machine."""
    return re.sub(r"(?<![\w.])/\S+/", "", text).replace("|", "/")


def write_row(page: Path, line: str) -> None:
    """Put a row into the page's table, in the place of the recipe's old one, in order of the names."""
    text = page.read_text(encoding="utf-8")
    old = re.findall(r"^\| `.*$", text, re.MULTILINE)
    rows = {row.split("`")[1]: row for row in [*old, line]}
    head = f"| {' | '.join(CELLS)} |\n|{'---|' * len(CELLS)}\n"
    table = head + "".join(f"{rows[name]}\n" for name in sorted(rows, key=lambda name: ("/" in name, name)))
    start = text.index(head)
    rest = text[start + len(head) :].removeprefix("".join(f"{row}\n" for row in old))
    page.write_text(text[:start] + table + rest, encoding="utf-8")


def list_subjects(call: Call, shipped: bool = False) -> Iterator[Subject]:
    """Yield what is measured, one after the other; those that cannot be read are said. CallError: no such recipe."""
    paths = {str(path.relative_to(RECIPES)): path for path in list_recipes(call.quick)}
    for name in call.choose(paths, len(paths)):
        try:
            yield Subject(name, paths[name], choose_sets(paths[name], call.bench))
        except (CompressError, RuntimeFailure) as error:
            say(f"{name}: {str(error).partition(chr(10))[0]}")
    if not (call.quick or shipped or call.only):
        yield from list_decoders(call)


def measure_load(seconds: float = 2.0) -> float:
    """Return how many cores other programs keep busy now; a load average would count the row before, too."""

    def read_busy() -> int:
        user, nice, system, *_ = Path("/proc/stat").read_text(encoding="ascii").split()[1:]
        return int(user) + int(nice) + int(system)

    before = read_busy()
    time.sleep(seconds)
    return (read_busy() - before) / os.sysconf("SC_CLK_TCK") / seconds


def measure(call: Call, shipped: bool = False) -> Measured:
    """Measure all recipes, one after the other. `shipped`: those of recipes/ alone, each written to the page."""
    claims: list[Claim] = []
    rows: list[Row] = []
    for subject in list_subjects(call, shipped):
        load = measure_load()
        held, row = measure_subject(subject, call)
        claims += held
        rows.append(row)
        if shipped:
            write_row(PAGE, shipped_row(row, load))
    for line in (*work_table(rows), "", *to_markdown(rows)):
        say(line)
    return claims, rows


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != SHIPPED]
    raise SystemExit(run_script(__doc__ or "", (), partial(measure, shipped=SHIPPED in sys.argv), words))
