"""`compress bench`: every format that this machine runs in one table, without a recipe; then the best one's recipe."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from compress.commands.bench_measure import Graphs, measure_bundle, measure_graphs, time_finalists
from compress.commands.bench_rows import (
    ABSENT,
    FLOAT,
    HEADS,
    BenchRow,
    BenchTable,
    list_cells,
    list_conclusions,
    list_others,
    to_dict,
)
from compress.commands.new import Answers, make_draft
from compress.errors import CompressError, OutputError, PlanError
from compress.export.onnx import float_graph, write_graph
from compress.formats.targets import TARGETS, Format
from compress.planning.draft import Draft, list_exports
from compress.planning.inputs import text_fill
from compress.planning.latency import make_call, make_twins
from compress.planning.synthetic import add_synthetic_set
from compress.planning.timing import make_stopwatch
from compress.planning.usual import Chain, choose_gates, choose_passes, drop_unused_sets
from compress.quantize.state import GraphState
from compress.recipe.schema import Recipe
from compress.recipe.templates import format_draft, write_new
from compress.search.orders import Order
from compress.search.workers import LocalProcesses
from compress.store.cache import default_root
from compress.tasks import TORCH_TASKS
from compress.version import __version__
from runtime.backends import BACKENDS
from runtime.bundle.files import write_whole
from runtime.bundle.records import from_json
from runtime.errors import RuntimeFailure
from runtime.measure.environment import cpu_info, environment

BUDGET_S = 300.0
FEWEST, MOST_CALIBRATED, MOST_EVALUATED, MACS = 64, 128, 512, 5e10
"""Samples of a table in minutes, no verdict: as many as so many multiplications allow, between these bounds."""
FORMATS: dict[Format, str] = {
    "int8-static": "INT8",
    "w4": "W4A16",
    "w8": "W8A16",
    "int8-dynamic": "INT8_DYNAMIC",
    "float16": "FP16",
    "bfloat16": "BF16",
    "fp8-static": "FP8",
    "nvfp4": "NVFP4",
    "nvfp4a16": "NVFP4A16",
    "mxfp8": "MXFP8",
}
"""Format -> the scheme that makes it; in the order in which they are tried, for time may end before all are."""
OF_ALL = ("int8-static", "w4", "w8", "int8-dynamic", "float16", "bfloat16")
"""Formats that every backend has a row of, also to say that it refuses them; of others only those that it takes."""
SPEED: dict[str, Any] = {"warmup": 2, "iterations": 12, "throughput_batch_size": 8}
DECODING = {"prompt_tokens": 32, "new_tokens": 16}
FINALISTS = 4
MOST_TRIES, ENDED = 2, "it ended the process that measured it, twice"
LEFT_FOR_MEASURING = 0.1
"""Of the budget: no build goes on into it, so that the last row and the last rounds are measured in time."""
LEFT_FOR_CAUSES = 0.25
"""Of the budget: with less left, what is slower is not profiled for its reason."""
FILE = "bench.json"
Log = Callable[[str], None]


@dataclass
class Bench:
    """One call: what is asked, where it goes, when it ends. `draft` has an evaluation set, synthetic or not."""

    draft: Draft
    out: Path
    cache: Path
    deadline: float
    budget_s: float
    synthetic: bool
    log: Log
    twins: dict[str, GraphState] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.deadline - time.monotonic()

    @property
    def times_twins(self) -> bool:
        """Return whether graphs made like the results are timed, and none is built: then no pass needs samples."""
        return self.synthetic and not TORCH_TASKS[self.draft.task].task.generates

    @cached_property
    def gates(self) -> list[dict[str, Any]]:
        """Return what a row's quality is held to; [] without data."""
        return [] if self.synthetic else choose_gates(self.draft.task, self.draft.has_labels)

    @cached_property
    def speed(self) -> dict[str, Any]:
        """Return the recipe's `benchmark`."""
        return SPEED | (DECODING if TORCH_TASKS[self.draft.task].task.generates else {})

    def make_mapping(self, backend: str, name: str, chain: Chain) -> dict[str, Any]:
        """Return the recipe of a row, as a draft's mapping without passes."""
        recipe = {**drop_unused_sets(self.draft.recipe, chain.passes), "target": backend, **list_exports(backend)}
        return {**recipe, "name": f"{self.draft.recipe['name']}-{name}"}

    def make_recipe(self, backend: str, name: str, chain: Chain) -> Recipe:
        """Return the typed recipe of a row."""
        mapping = self.make_mapping(backend, name, chain)
        parts = {"passes": list(chain.passes), "validate": {"benchmark": self.speed}}
        return replace(self.draft, recipe=mapping).make_recipe(Path(), **parts)

    def format_recipe(self, backend: str, name: str, chain: Chain, gates: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the recipe of a row as YAML."""
        mapping = self.make_mapping(backend, name, chain)
        return format_draft(mapping, self.draft.reasons, chain.passes, gates, self.speed)


def bench_model(said: Answers, out: Path, budget_s: float | None, cache: Path | None, log: Log) -> BenchTable:
    """Build and measure every format on every backend that works here, one after another; return the table.

    `out`/bench.json has every finished row at every moment, and a later call for the same question goes on from it;
    `out`/recipe.yaml is the recipe of the fastest row. A format that fails or is out of time is a row that says so.
    Without data nothing is calibrated: graphs made like the results are timed on inputs drawn at random, and quality is
    not known. Raises what `draft_recipe` does, OutputError where `out` cannot be written.
    """
    start, budget_s = time.monotonic(), budget_s or BUDGET_S
    _make_folder(out)
    draft = make_draft(said, Path())
    synthetic = draft.inputs is None
    draft = add_synthetic_set(draft, out / "synthetic", Path()) if synthetic else _take_fewer(draft)
    deadline = start + budget_s * (1 - LEFT_FOR_MEASURING)
    bench = Bench(draft, out, cache or default_root(), deadline, budget_s, synthetic, log)
    table = _fill_rows(bench, _begin_table(bench, said))
    table = _time_finals(bench, table).with_winners()
    table = replace(table, notes=_list_notes(bench, table), recipe=_write_winner(bench, table))
    table = replace(table, seconds=round(time.monotonic() - start, 1))
    _keep(bench, table)
    _remove_bundles(bench, table)
    return table


def _fill_rows(bench: Bench, table: BenchTable) -> BenchTable:
    """Do the rows that are not there yet, and keep the table after each."""
    with LocalProcesses(1, bench.out / "bench.log") as workers:
        for backend, format_ in _list_wanted():
            known = table.find(f"{backend}-{format_}")
            if known is not None and known.is_finished:
                continue
            tries = 1 if known is None else known.tries + 1
            begun = BenchRow(backend, format_, "begun", tries=tries)
            if tries > MOST_TRIES:
                table = _keep(bench, table.with_row(replace(begun, state="failed", why=ENDED)))
                continue
            _keep(bench, table.with_row(begun))  # so that a row that ends this process is not tried for ever
            start = time.monotonic()
            try:
                row = _do_row(bench, workers, begun)
            except BaseException:
                _keep(bench, table)
                raise
            row = replace(row, tries=0 if row.state == "late" else tries, seconds=round(time.monotonic() - start, 1))
            bench.log(f"{row.name}: {row.state}{': ' + row.why if row.why else ''}, {row.seconds:.0f} s")
            table = _keep(bench, table.with_row(row))
    return table


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written: {error.strerror}") from error
    foreign = [path.name for path in out.iterdir() if path.name not in OURS]
    if foreign and not (out / FILE).is_file():
        raise OutputError(f"{out}: holds {foreign[0]}, which is not of a bench; give another --out")


OURS = (FILE, "bench.log", "bench.html", "rows", "recipe.yaml", "synthetic.npz", "synthetic.jsonl")


def _take_fewer(draft: Draft) -> Draft:
    """Return the draft with as many samples as a table in minutes allows."""
    assert draft.inputs is not None
    data = dict(draft.recipe["data"])
    work = draft.inputs.facts.macs * text_fill(draft.inputs, "evaluation")
    affordable = max(FEWEST, int(MACS / max(work, 1)))
    for name, most in (("calibration", MOST_CALIBRATED), ("evaluation", MOST_EVALUATED)):
        if name in data and draft.n_samples[name] > min(most, affordable):
            data[name] = {**data[name], "samples": min(most, affordable)}
    data.pop("train", None)
    return replace(draft, recipe={**draft.recipe, "data": data})


def _begin_table(bench: Bench, said: Answers) -> BenchTable:
    """Return the table as an earlier call left it, if that asked the same; else an empty one."""
    machine, threads = cpu_info()[0], bench.make_recipe(*_row_of(FLOAT), Chain(())).validate_.benchmark.threads
    versions = environment(threads)["versions"]
    asked = {"recipe": bench.draft.recipe, "version": __version__, "machine": machine, "versions": versions}
    empty = BenchTable(
        model=str(said.model),
        task=bench.draft.task,
        question=hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest(),
        synthetic=bench.synthetic,
        bounds=tuple(
            f"{gate['metric']} {rule} {limit:g}"
            for gate in bench.gates
            for rule, limit in gate.items()
            if rule != "metric"
        ),
        speed=TORCH_TASKS[bench.draft.task].starter.speed,
        machine=machine,
        threads=threads,
    )
    try:
        kept = from_json(BenchTable, json.loads((bench.out / FILE).read_text(encoding="utf-8")), FILE)
    except (OSError, ValueError, RuntimeFailure):
        return empty
    return replace(empty, rows=kept.rows) if kept.question == empty.question else empty


def _row_of(format_: str) -> tuple[str, str]:
    return next(iter(BACKENDS)), format_


def _list_wanted() -> list[tuple[str, str]]:
    """Return backend and format of each row: the formats that say most first, each on every backend."""
    backends = [name for name in BACKENDS if name in TARGETS and TARGETS[name].reads == "onnx"]
    works = [name for name in backends if BACKENDS[name].available() is None]
    others = [(name, FLOAT) for name in backends if name not in works]
    rows = [(name, FLOAT) for name in works]
    for format_ in FORMATS:
        taken = [n for n in works if format_ in OF_ALL or TARGETS[n].fact(format_).verdict != "refused"]
        rows += [(name, format_) for name in taken]
    return [*rows, *others]


def _do_row(bench: Bench, workers: LocalProcesses, begun: BenchRow) -> BenchRow:
    """Return the row, whatever becomes of it."""
    row = replace(begun, state="not possible")
    try:
        if (reason := BACKENDS[row.backend].available()) is not None:
            return replace(row, why=f"{ABSENT}: {reason}")
        chain = _choose_chain(bench, row.backend, row.format)
        row = replace(row, passes=tuple(str(values["kind"]) for values in chain.passes), notes=chain.notes)
        if bench.left_s <= 0:
            return replace(row, state="late", why="no time was left; the same command goes on, or give more --budget")
        if bench.times_twins:
            return replace(row, state="measured", **_measure_twin(bench, row, chain))
        folder = _row_folder(bench, row)
        if (trouble := _build(bench, workers, row, chain, folder)) is not None:
            return trouble
        explain = bench.left_s > LEFT_FOR_CAUSES * bench.budget_s
        fields = measure_bundle(folder / "bundle", row.backend, bench.gates, explain)
        if bench.synthetic:
            fields |= {"quality": {}, "keeps": None}
        return replace(row, state="measured", **fields)
    except PlanError as error:
        return replace(row, why=_shorten(error))
    except (CompressError, RuntimeFailure, MemoryError) as error:
        return replace(row, state="failed", why=_shorten(error))
    except Exception as error:  # noqa: BLE001  (a format that fails is a row, whatever it failed of)
        return replace(row, state="failed", why=f"{type(error).__name__}: {_shorten(error)}")


def _shorten(error: BaseException) -> str:
    text = " ".join(str(error).partition("\n")[0].split())
    return text if len(text) <= 160 else text[:160].rsplit(" ", 1)[0] + " ..."


def _choose_chain(bench: Bench, backend: str, format_: str) -> Chain:
    """Return the passes of a format. PlanError: the backend refuses it, or nothing makes it of this model."""
    if format_ == FLOAT:
        return Chain(())
    fact = TARGETS[backend].formats[format_]
    if fact.verdict == "refused":
        raise PlanError(f"{backend} {fact.text}")
    assert bench.draft.inputs is not None
    data = bench.times_twins or "calibration" in bench.draft.recipe["data"]
    return choose_passes(FORMATS[format_], backend, bench.draft.inputs.facts, data)  # type: ignore[index]


def _row_folder(bench: Bench, row: BenchRow) -> Path:
    return bench.out / "rows" / row.name


def _build(bench: Bench, workers: LocalProcesses, row: BenchRow, chain: Chain, folder: Path) -> BenchRow | None:
    """Build the row's bundle in a process of its own, which ends with the budget; return the row if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "recipe.yaml"
    write_new(recipe, bench.format_recipe(row.backend, row.format, chain), replace=True)
    order = Order("build", str(folder / "bundle"), str(recipe), str(bench.cache))
    (answer,) = workers.build([order], bench.deadline)
    if answer is None:
        return replace(row, state="late", why="out of time while it was built; the same command goes on")
    if answer.state == "done":
        return None
    first = answer.reason.partition("\n")[0]
    return replace(row, state="not possible" if answer.state == "refused" else "failed", why=first)


def _measure_twin(bench: Bench, row: BenchRow, chain: Chain) -> dict[str, Any]:
    """Measure a graph made like the result, of which only speed and size count: nothing is calibrated."""
    assert bench.draft.inputs is not None
    recipe = bench.make_recipe(row.backend, row.format, chain)
    inputs = replace(bench.draft.inputs, recipe=recipe)
    stopwatch, feeds = make_stopwatch(recipe), make_call(inputs)
    made = bench.twins.get("float")
    before, after, missing, _ = make_twins(inputs, bench.cache, cpu_info()[0], stopwatch, [feeds], bench.log, made)
    bench.twins["float"] = before
    folder = _row_folder(bench, row)
    paths = []
    for name, graph in (("before", float_graph(before.model)), ("after", stopwatch.write(after))):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
        write_graph(graph, folder / name / "model.onnx")
        paths.append(folder / name / "model.onnx")
    try:
        fields = measure_graphs(Graphs(paths[0], paths[1], feeds, recipe.validate_.benchmark.threads), row.backend)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    notes = (f"not in its time: what {', '.join(missing)} changes",) if missing else ()
    return {**fields, "notes": (*row.notes, *notes)}


def _keep(bench: Bench, table: BenchTable) -> BenchTable:
    """Write the table whole, and return it."""
    text = json.dumps(to_dict(table), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        write_whole(bench.out / FILE, text.encode())
    except OSError as error:
        raise OutputError(f"{bench.out / FILE}: cannot be written: {error.strerror}") from error
    return table


def _time_finals(bench: Bench, table: BenchTable) -> BenchTable:
    """Return the table with the times of the fastest rows taken in the same rounds, across backends."""
    able = sorted((row for row in table.rows if row.may_win and row.latency_ms), key=lambda row: row.latency_ms or 0.0)
    rows = [row for row in able if (_row_folder(bench, row) / "bundle").is_dir()][:FINALISTS]
    if len({row.backend for row in rows}) < 2 or TORCH_TASKS[table.task].task.generates:
        return table  # those of one backend have their ratios to one float32
    try:
        times = time_finalists([(_row_folder(bench, row) / "bundle", row.backend) for row in rows])
    except RuntimeFailure as error:
        bench.log(f"the fastest were not timed together: {_shorten(error)}")
        return table
    for row, latency in zip(rows, times, strict=True):
        table = table.with_row(replace(row, latency_ms=latency, final=True))
    return table


def _list_notes(bench: Bench, table: BenchTable) -> tuple[str, ...]:
    notes = []
    if bench.synthetic:
        notes.append("synthetic inputs: give --data for int8 as it would be calibrated, and for quality of every row")
    elif not bench.draft.has_labels:
        notes.append("no labels: quality is nearness to float32, not accuracy")
    if any(row.state == "late" for row in table.rows):
        notes.append("out of time: the same command goes on with the rows that are late")
    load, cores = environment(table.threads)["load_average"], environment(table.threads)["cores"]
    if load is not None and cores is not None and load > cores:
        notes.append(f"the machine was busy: load average {load:g} on {cores} cores; measure again when it is idle")
    return tuple(notes)


def _write_winner(bench: Bench, table: BenchTable) -> str:
    """Write the recipe of the fastest row to recipe.yaml, without sets that were drawn at random; return its path."""
    row = table.find(table.fastest)
    if row is None:
        return ""
    chain = _choose_chain(bench, row.backend, row.format)
    file = bench.out / "recipe.yaml"
    shown = bench
    if bench.synthetic:
        recipe = {key: value for key, value in bench.draft.recipe.items() if key != "data"}
        reasons = {"model.source": "add data.calibration and data.evaluation: what was timed was drawn at random"}
        shown = replace(bench, draft=replace(bench.draft, recipe=recipe, reasons={**bench.draft.reasons, **reasons}))
    write_new(file, shown.format_recipe(row.backend, row.format, chain), replace=True)
    return str(file)


def _remove_bundles(bench: Bench, table: BenchTable) -> None:
    """Remove the bundles of rows that did not win; while rows are late all stay, to be timed together at the end."""
    if any(row.state == "late" for row in table.rows):
        return
    for row in table.rows:
        if row.name not in (table.fastest, table.smallest):
            shutil.rmtree(_row_folder(bench, row), ignore_errors=True)


def write_page(table: BenchTable, out: Path) -> Path:
    """Write the table as a page, `out`/bench.html, and return its path. OutputError."""
    from compress.pages.page import render_page

    rows = [list_cells(row) for row in table.rows if row.state == "measured"]
    lines = [line.removeprefix("- ") for line in list_conclusions(table)]
    page = render_page("bench.html", table=table, heads=HEADS, rows=rows, others=list_others(table), conclusions=lines)
    write_new(out / "bench.html", page, replace=True)
    return out / "bench.html"
