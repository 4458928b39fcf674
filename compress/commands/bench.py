"""`compress bench`: every format that this machine runs in one table, without a recipe; then the best one's recipe."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from compress.commands.bench_measure import FINAL_S, Graphs, measure_graphs, time_finalists
from compress.commands.bench_rows import (
    ABSENT,
    FLOAT,
    HEADS,
    PLACED,
    BenchRow,
    BenchTable,
    State,
    list_cells,
    list_conclusions,
    list_others,
    to_dict,
)
from compress.commands.bench_work import WORK, RowOrder
from compress.commands.new import Answers, make_draft
from compress.errors import CompressError, OutputError, PlanError
from compress.export.onnx import float_graph, write_graph
from compress.formats.targets import TARGETS, Format
from compress.planning.draft import Draft, list_exports
from compress.planning.inputs import Batches, load_set, text_fill
from compress.planning.latency import make_call, make_twins
from compress.planning.synthetic import add_synthetic_set
from compress.planning.timing import make_timer
from compress.planning.usual import Chain, choose_gates, choose_passes, drop_unused_sets, parse_pass
from compress.quantize.state import GraphState
from compress.recipe.schema import Recipe
from compress.recipe.templates import format_draft, write_new
from compress.search.workers import LocalProcesses
from compress.store.cache import default_root
from compress.tasks import TORCH_TASKS
from compress.version import __version__
from compress.work.settle_changes import computes_bfloat16
from runtime.backends import BACKENDS
from runtime.bundle.files import write_whole
from runtime.bundle.records import from_json, to_json
from runtime.clock.machine import cpu_info, environment, say_busy
from runtime.errors import RuntimeFailure

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
LEAST_SHARE = 0.05
"""Of the weights or of the products, which a format must reach: with less, what it leaves is the float model."""
NEARLY_ALL = 0.95
"""Of the weights; a row that reaches less of them says how much."""
LENGTHS_COUNTED = 256
"""Texts of which the usual length is found."""
LATE = "no time was left"
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
    def seconds_left(self) -> float:
        """Return the seconds that are left."""
        return self.deadline - time.monotonic()

    @property
    def times_twins(self) -> bool:
        """Return whether graphs made like the results are timed, and none is built: then no pass needs samples."""
        return self.synthetic and not TORCH_TASKS[self.draft.task].task.generates

    @cached_property
    def gates(self) -> list[dict[str, Any]]:
        """Return what a row's quality is held to; [] without data."""
        return (
            []
            if self.synthetic
            else choose_gates(self.draft.task, self.draft.has_labels, n_samples=self.draft.n_samples.get("evaluation"))
        )

    @cached_property
    def speed(self) -> dict[str, Any]:
        """Return the recipe's `benchmark`."""
        if TORCH_TASKS[self.draft.task].task.generates:
            return SPEED | DECODING
        return SPEED | ({"sequence_length": self.length} if self.length else {})

    @cached_property
    def length(self) -> int | None:
        """Return the tokens of a usual text of the evaluation set; None of what is no text."""
        return None if self.synthetic else find_usual_length(self.draft)

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
    table = _begin_table(bench, said)
    with LocalProcesses(1, out / "bench.log", WORK) as workers:
        table = _fill_rows(bench, workers, table)
        table = _explain_slow(bench, workers, table)
        table = _search_placements(bench, workers, table)
    table = _time_finals(bench, table).with_winners()
    table = replace(table, notes=_list_notes(bench, table), recipe=_write_winner(bench, table))
    table = replace(table, seconds=round(time.monotonic() - start, 1))
    _keep(bench, table)
    _remove_bundles(bench, table)
    return table


def _fill_rows(bench: Bench, workers: LocalProcesses, table: BenchTable) -> BenchTable:
    """Do the rows that are not there yet, and keep the table after each."""
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
            row = _do_row(bench, workers, begun, _foresee_measuring(table, backend))
        except BaseException:
            _keep(bench, table)
            raise
        row = replace(row, tries=0 if row.state == "late" else tries, seconds=round(time.monotonic() - start, 1))
        _log_row(bench, row)
        table = _keep(bench, table.with_row(row))
    return table


def _log_row(bench: Bench, row: BenchRow) -> None:
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row.stages.items())
    bench.log(
        f"{row.name}: {row.state}{': ' + row.why if row.why else ''}, {row.seconds:.0f} s"
        + (f" ({stages})" if stages else "")
    )


def _foresee_measuring(table: BenchTable, backend: str) -> float:
    """Return the seconds that measuring a row takes: the most of those of the backend, else of any; 0: of none yet."""
    seconds = {
        row.name: sum(value for name, value in row.stages.items() if name not in ("plan", "build"))
        for row in table.rows
        if row.stages
    }
    near = [value for name, value in seconds.items() if name.startswith(f"{backend}-")]
    return max(near or seconds.values(), default=0.0)


def _explain_slow(bench: Bench, workers: LocalProcesses, table: BenchTable) -> BenchTable:
    """Profile what is slower than float32 and say why, as far as time allows."""
    for row in table.rows:
        bundle = _row_folder(bench, row) / "bundle"
        if not row.is_slower or row.why or not bundle.is_dir() or bench.seconds_left <= 0:
            continue
        order = RowOrder("judge", str(bundle), backend=row.backend)
        (answer,) = workers.build([order], bench.deadline)
        if answer is not None and answer.state == "done":
            table = _keep(bench, table.with_row(replace(row, why=_shorten_text(str(answer.report["why"])))))
    return table


def _search_placements(bench: Bench, workers: LocalProcesses, table: BenchTable) -> BenchTable:
    """Build int8 rows that gain little once more, computing in float what int8 slows down; keep what is faster.

    That times every shape of layer on its backend: so it comes last, and is left out where no time is left. Twins are
    timed in this process, which nothing would end in time.
    """
    if bench.times_twins:
        return table
    for row in sorted((row for row in table.rows if row.may_gain), key=lambda row: row.speedup or 0.0):
        start = time.monotonic()
        begun = BenchRow(row.backend, row.format, "begun", placement="searched")
        found = _do_row(bench, workers, begun, _foresee_measuring(table, row.backend))
        found = replace(found, seconds=round(row.seconds + time.monotonic() - start, 1))
        _log_row(bench, found)
        if found.state == "late":
            continue
        better = found.may_win and (not row.may_win or (found.latency_ms or 0.0) < (row.latency_ms or 0.0))
        table = _keep(bench, table.with_row(found if better else replace(row, placement="usual")))
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


def find_usual_length(draft: Draft) -> int | None:
    """Return the median tokens of the texts that are evaluated; None where samples are no texts.

    Calls of one length are timed: OpenVINO prepares its kernels anew for each length that it meets, which would be most
    of what a few rounds measure.
    """
    assert draft.inputs is not None
    if draft.inputs.preprocess.kind != "text":
        return None
    inputs = replace(draft.inputs, recipe=draft.make_recipe(Path()))
    batches = Batches(load_set(inputs, "evaluation", None), inputs, inputs.facts.inputs, size=1)
    some = batches[:: max(len(batches) // LENGTHS_COUNTED, 1)]
    lengths = sorted(int(feeds["input_ids"].shape[1]) for feeds in some)
    return lengths[len(lengths) // 2]


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


def _do_row(bench: Bench, workers: LocalProcesses, begun: BenchRow, measuring_s: float) -> BenchRow:
    """Return the row, whatever becomes of it. `measuring_s`: that measuring it is foreseen to take."""
    row = replace(begun, state="not possible")
    try:
        if (reason := BACKENDS[row.backend].available()) is not None:
            return replace(row, why=f"{ABSENT}: {reason}")
        chain = _choose_chain(bench, row)
        reach = find_reach(bench, row, chain)
        row = replace(row, passes=tuple(str(values["kind"]) for values in chain.passes))
        row = replace(row, notes=(*chain.notes, *((reach.text,) if reach.weights < NEARLY_ALL else ())))
        if (known := explain_not_built(row, reach)) is not None:
            return replace(row, state="not built", why=known, notes=())
        if bench.seconds_left <= measuring_s:
            return replace(row, state="late", why=f"{LATE}; the same command goes on, or give more --budget")
        if bench.times_twins:
            return replace(row, state="measured", **_measure_twin(bench, row, chain))
        return _build(bench, workers, row, chain, measuring_s)
    except PlanError as error:
        return replace(row, why=_shorten(error))
    except (CompressError, RuntimeFailure, MemoryError) as error:
        return replace(row, state="failed", why=_shorten(error))
    except Exception as error:  # noqa: BLE001  (a format that fails is a row, whatever it failed of)
        return replace(row, state="failed", why=f"{type(error).__name__}: {_shorten(error)}")


@dataclass(frozen=True)
class Reach:
    """How much of a model a format changes: layers, and shares of their weights and products.

    `why_kept`: why most of the others stay as they are.
    """

    n_layers: int
    of_layers: int
    weights: float
    products: float
    why_kept: str = ""

    @property
    def text(self) -> str:
        """Return it for people."""
        return f"{self.n_layers} of {self.of_layers} layers, {self.weights:.1%} of their weights"


def find_reach(bench: Bench, row: BenchRow, chain: Chain) -> Reach:
    """Return how much of the model a row's passes change, as the plan knows it."""
    assert bench.draft.inputs is not None
    before = after = bench.draft.inputs.facts
    reasons: Counter[str] = Counter()
    for values in chain.passes:
        plan = parse_pass(values).check(after, TARGETS[row.backend])
        after = plan.facts
        reasons.update(decision.reason for decision in plan.decisions if decision.action == "kept")
    if not chain.passes or not before.layers:
        return Reach(len(before.layers), len(before.layers), 1.0, 1.0)
    bits = {layer.name: layer.bits for layer in after.layers}
    changed = [layer for layer in before.layers if bits.get(layer.name) != layer.bits]
    weights = sum(layer.n_weights for layer in changed) / sum(layer.n_weights for layer in before.layers)
    products = sum(layer.macs for layer in changed) / max(before.macs, 1)
    commonest = reasons.most_common(1)
    return Reach(len(changed), len(before.layers), weights, products, commonest[0][0] if commonest else "")


def explain_not_built(row: BenchRow, reach: Reach) -> str | None:
    """Return why a format gains nothing here, as far as that is known before it is built; None: it may gain."""
    if row.format == FLOAT:
        return None
    fact = TARGETS[row.backend].formats[row.format]
    if fact.verdict == "slow":
        return f"{row.backend} {fact.text}"
    if reach.weights < LEAST_SHARE and reach.products < LEAST_SHARE:
        kept = f" (the others: {reach.why_kept})" if reach.why_kept else ""
        return f"nearly the float32 model: it reaches {reach.text}{kept}"
    return None


def _shorten(error: BaseException) -> str:
    return _shorten_text(str(error))


def _shorten_text(text: str) -> str:
    text = " ".join(text.partition("\n")[0].split())
    return text if len(text) <= 160 else text[:160].rsplit(" ", 1)[0] + " ..."


def _choose_chain(bench: Bench, row: BenchRow) -> Chain:
    """Return the passes of a row. PlanError: its backend refuses the format, or nothing makes it of this model."""
    if row.format == FLOAT:
        return Chain(())
    fact = TARGETS[row.backend].formats[row.format]
    if fact.verdict == "refused":
        raise PlanError(f"{row.backend} {fact.text}")
    assert bench.draft.inputs is not None
    data = bench.times_twins or "calibration" in bench.draft.recipe["data"]
    chain = choose_passes(FORMATS[row.format], row.backend, bench.draft.inputs.facts, data)  # type: ignore[index]
    if row.format != PLACED or row.placement == "searched":
        return chain
    # the usual placement, fastest, times every shape of layer: half a minute and more for each row
    return replace(chain, passes=tuple(_place_untimed(values) for values in chain.passes))


def _place_untimed(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "placement": "auto"} if parse_pass(values).chooses_by_time else values


def _row_folder(bench: Bench, row: BenchRow) -> Path:
    return bench.out / "rows" / (f"{row.name}-searched" if row.placement == "searched" else row.name)


def _build(bench: Bench, workers: LocalProcesses, row: BenchRow, chain: Chain, measuring_s: float) -> BenchRow:
    """Build and measure the row in a process of its own, which ends with the budget."""
    folder = _row_folder(bench, row)
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "recipe.yaml"
    values = {
        **bench.make_mapping(row.backend, row.format, chain),
        "passes": list(chain.passes),
        "validate": {"benchmark": bench.speed, "steps": False},
    }
    write_new(recipe, json.dumps(values, indent=1), replace=True)
    order = RowOrder(
        "build",
        str(folder / "bundle"),
        str(recipe),
        str(bench.cache),
        seconds=None if row.format == FLOAT else bench.seconds_left,  # all others are held against it
        backend=row.backend,
        gates=tuple(bench.gates),
        measuring_s=measuring_s,
    )
    (answer,) = workers.build([order], bench.deadline)
    if answer is None:
        return replace(row, state="late", why="out of time as it was built and measured; the same command goes on")
    if answer.state == "late":
        return replace(row, state="late", why=f"{answer.reason}; the same command goes on, or give more --budget")
    if answer.state != "done":
        state: State = "not possible" if answer.state == "refused" else "failed"
        return replace(row, state=state, why=_shorten_text(answer.reason))
    row = from_json(BenchRow, {**to_json(row), **answer.report, "state": "measured"}, "row")
    return replace(row, quality={}, keeps=None) if bench.synthetic else row


def _measure_twin(bench: Bench, row: BenchRow, chain: Chain) -> dict[str, Any]:
    """Measure a graph made like the result, of which only speed and size count: nothing is calibrated."""
    assert bench.draft.inputs is not None
    recipe = bench.make_recipe(row.backend, row.format, chain)
    inputs = replace(bench.draft.inputs, recipe=recipe)
    feeds = make_call(inputs)
    timer = make_timer(recipe, bench.cache, [feeds])
    before, after, missing = make_twins(inputs, timer, bench.log, bench.twins.get("float"))
    bench.twins["float"] = before
    folder = _row_folder(bench, row)
    paths = []
    for name, graph in (("before", float_graph(before.model)), ("after", timer.write(after))):
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
    if bench.seconds_left + LEFT_FOR_MEASURING * bench.budget_s < 2 * FINAL_S:
        bench.log("the fastest were not timed together: no time was left; the same command does it")
        return table
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
    if not bench.times_twins:
        notes += [
            f"{row.format} on {row.backend}: no time was left to find the layers that gain; the same command does it"
            for row in table.rows
            if row.may_gain
        ]
    if computes_bfloat16("cpu") and any(row.backend == "openvino" and row.state == "measured" for row in table.rows):
        notes.append("openvino: what is not in integers computes in bfloat16 on this processor, as float32, too")
    return tuple(filter(None, [*notes, say_busy(environment(table.threads))]))


def _write_winner(bench: Bench, table: BenchTable) -> str:
    """Write the recipe of the fastest row to recipe.yaml, without sets that were drawn at random; return its path."""
    row = table.find(table.fastest)
    if row is None:
        return ""
    chain = _choose_chain(bench, row)
    file = bench.out / "recipe.yaml"
    shown = bench
    if bench.synthetic:
        recipe = {key: value for key, value in bench.draft.recipe.items() if key != "data"}
        reasons = {"model.source": "add data.calibration and data.evaluation: what was timed was drawn at random"}
        shown = replace(bench, draft=replace(bench.draft, recipe=recipe, reasons={**bench.draft.reasons, **reasons}))
    write_new(file, shown.format_recipe(row.backend, row.format, chain), replace=True)
    return str(file)


def _remove_bundles(bench: Bench, table: BenchTable) -> None:
    """Remove the bundles of rows that did not win; while one may change all stay, to be timed together at the end."""
    if any(row.state == "late" or row.may_gain for row in table.rows):
        return
    kept = {_row_folder(bench, row) for row in table.rows if row.name in (table.fastest, table.smallest)}
    for folder in (bench.out / "rows").glob("*"):
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def write_page(table: BenchTable, out: Path) -> Path:
    """Write the table as a page, `out`/bench.html, and return its path. OutputError."""
    from compress.pages.page import render_page

    rows = [list_cells(row) for row in table.rows if row.state == "measured"]
    lines = [line.removeprefix("- ") for line in list_conclusions(table)]
    page = render_page("bench.html", table=table, heads=HEADS, rows=rows, others=list_others(table), conclusions=lines)
    write_new(out / "bench.html", page, replace=True)
    return out / "bench.html"
