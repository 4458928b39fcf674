"""`compress bench`: every format that this machine runs in one table, without a recipe; then the best one's recipe.

It is a study whose points are a backend and a format: `compress.search` tries them, and goes on with them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

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
    read_row,
    to_dict,
)
from compress.commands.bench_work import FINAL_S, WORK, time_finalists
from compress.commands.new import NewAnswers, make_draft
from compress.errors import OutputError, PlanError, RecipeError
from compress.facts import ModelFacts
from compress.formats.targets import TARGETS, Format, Target
from compress.planning.draft import Draft, list_exports
from compress.planning.sets import Batches, load_set, text_fill
from compress.planning.synthetic import add_synthetic_set
from compress.planning.usual import UsualPasses, choose_gates, choose_passes, drop_unused_sets, parse_pass
from compress.recipe.pinned import pin_recipe
from compress.recipe.points import Point, SearchSpace, as_node
from compress.recipe.schema import Recipe
from compress.recipe.search import Search, Space
from compress.recipe.templates import format_draft, write_new
from compress.search.study import BUNDLES, REPORTS, Study, name_trial, open_study
from compress.search.sweep import OutOfTime, Prior, Sweep, finish_study
from compress.search.trials import GoalValue, Run, Trial, same_point
from compress.search.workers import TrialAnswer, TrialOrder, start_workers
from compress.store.cache import default_root
from compress.tasks import TORCH_TASKS
from compress.version import __version__
from runtime.backends import BACKENDS
from runtime.backends.openvino import computes_bfloat16
from runtime.bundle.files import write_whole
from runtime.clock.machine import cpu_info, environment, say_busy
from runtime.errors import RuntimeFailure

BUDGET_S = 300.0
"""A person waits for it: five minutes, as the command's help says."""
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
LEAST_SHARE = 0.05
"""Of the weights or of the products, which a format must reach: with less, what it leaves is the float model."""
BUILDING = ("plan", "build")
"""The stages of a row before it is measured."""
FINAL = "final"
"""Among the values of a run: its p50 of the last rounds, in which the fastest of all backends took turns."""
FILE, STUDY = "bench.json", "study"
OURS = (FILE, "bench.log", "bench.html", STUDY, "recipe.yaml", "synthetic.npz", "synthetic.jsonl")
Log = Callable[[str], None]


@dataclass(frozen=True)
class Choice:
    """The passes of a point, or `why` it is not built; `state` then says which kind of reason that is."""

    chain: UsualPasses = field(default_factory=lambda: UsualPasses(()))
    notes: tuple[str, ...] = ()
    state: State = "not possible"
    why: str = ""


@dataclass(frozen=True)
class Formats(SearchSpace):
    """The points of a bench, {"target": backend, "format": ...}; `placement`: "searched" of int8 placed by its times.

    `draft` has an evaluation set, synthetic or not. `model`: as it was given. `gates`: what quality is held to.
    `speed`: the `benchmark` of the recipes.
    """

    draft: Draft
    model: str
    synthetic: bool
    gates: list[dict[str, Any]]
    speed: dict[str, Any]
    chosen: dict[str, Choice] = field(default_factory=dict)

    @property
    def times_twins(self) -> bool:
        """Return whether graphs made like the results are timed, and none is built: then no pass needs samples."""
        return self.synthetic and TORCH_TASKS[self.draft.task].task.unit == "call"

    @cached_property
    def table(self) -> BenchTable:
        """Return the table without rows. Its question is a digest of all that must be as it was to go on with rows."""
        machine, threads = cpu_info()[0], self.recipe.validate_.benchmark.threads
        asked = [pin_recipe(self.recipe), __version__, machine, environment(threads)["versions"]]
        bounds = [(gate["metric"], *bound) for gate in self.gates for bound in gate.items() if bound[0] != "metric"]
        return BenchTable(
            model=self.model,
            task=self.draft.task,
            question=hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest(),
            synthetic=self.synthetic,
            bounds=tuple(f"{metric} {rule} {limit:g}" for metric, rule, limit in bounds),
            speed=self.search.split_goals()[0][1],
            machine=machine,
            threads=threads,
        )

    def recipe_at(self, point: Point) -> Recipe:
        """Return the explicit recipe of a point. RecipeError says why it is not built."""
        choice = self.choose(point)
        if choice.why:
            raise RecipeError(choice.why)
        validate = {"benchmark": self.speed, "steps": False, "gates": self.gates}
        draft = replace(self.draft, recipe=self.make_mapping(point, choice.chain))
        return draft.make_recipe(Path(), passes=list(choice.chain.passes), validate=validate)

    def make_mapping(self, point: Point, chain: UsualPasses) -> dict[str, Any]:
        """Return the recipe of a point, as a draft's mapping without passes."""
        recipe = {**drop_unused_sets(self.draft.recipe, chain.passes), "target": point["target"]}
        return {**recipe, **list_exports(point["target"]), "name": f"{self.draft.recipe['name']}-{point['format']}"}

    def choose(self, point: Point) -> Choice:
        """Return the passes of a point, or why there is nothing to be built, whatever the reason is."""
        key = same_point(point)
        if key not in self.chosen:
            try:
                self.chosen[key] = self._choose(point["target"], point["format"], "placement" in point)
            except PlanError as error:
                self.chosen[key] = Choice(why=_shorten(str(error)))
            except Exception as error:  # noqa: BLE001  (a format that fails is a row, whatever it failed of)
                self.chosen[key] = Choice(state="failed", why=f"{type(error).__name__}: {_shorten(str(error))}")
        return self.chosen[key]

    def _choose(self, backend: str, format_: str, searched: bool) -> Choice:
        if (reason := BACKENDS[backend].available()) is not None:
            return Choice(why=f"{ABSENT}: {reason}")
        if format_ == FLOAT:
            return Choice()
        fact, target = TARGETS[backend].formats[format_], TARGETS[backend]
        if fact.verdict == "refused":
            return Choice(why=_shorten(f"{backend} {fact.text}"))
        assert self.draft.inputs is not None
        facts, data = self.draft.inputs.facts, self.times_twins or "calibration" in self.draft.recipe["data"]
        chain = choose_passes(FORMATS[format_], backend, facts, data)  # type: ignore[index]
        if format_ == PLACED and not searched:
            # the usual placement, fastest, times every shape of layer: half a minute and more for each row
            chain = replace(chain, passes=tuple(map(_place_untimed, chain.passes)))
        reach = find_reach(facts, target, chain)
        if why := f"{backend} {fact.text}" if fact.verdict == "slow" else reach.explain_little():
            return Choice(chain, state="not built", why=why)
        # a row that reaches less of the weights says how much
        return Choice(chain, (*chain.notes, *((reach.text,) if reach.weights < 0.95 else ())))


def _place_untimed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, "placement": "auto"} if parse_pass(values).chooses_by_time else dict(values)


def list_points() -> list[Point]:
    """Return the points in their order: the formats that say most first, each on every backend."""
    backends = [name for name in BACKENDS if name in TARGETS and TARGETS[name].reads == "onnx"]
    works = [name for name in backends if BACKENDS[name].available() is None]
    rows = [(name, FLOAT) for name in works]
    for format_ in FORMATS:
        taken = [n for n in works if format_ in OF_ALL or TARGETS[n].fact(format_).verdict != "refused"]
        rows += [(name, format_) for name in taken]
    rows += [(name, FLOAT) for name in backends if name not in works]
    return [{"target": backend, "format": format_} for backend, format_ in rows]


def open_formats(said: NewAnswers, draft: Draft, synthetic: bool) -> Formats:
    """Return the points of a draft that has an evaluation set."""
    task, gates = TORCH_TASKS[draft.task].task, []
    if not synthetic:
        gates = choose_gates(draft.task, draft.has_labels, n_samples=draft.n_samples.get("evaluation"))
    length = None if synthetic or task.unit == "token" else find_usual_length(draft)
    speed = SPEED | (DECODING if task.unit == "token" else {"sequence_length": length} if length else {})
    goals = (f"minimize {task.latency}", "minimize size")
    search = Search(space={"format": Space(choice=(FLOAT, *FORMATS))}, goals=goals)
    recipe, model = draft.make_recipe(Path()), str(said.model)
    return Formats(recipe, search, (), as_node({}), draft, model, synthetic, gates, speed)


@dataclass
class BenchStudy(Study):
    """The trials of a bench as a table, which lies beside its folder.

    `late`: number -> why a trial was not tried to its end, and the seconds it took. `ending`: what the table says at
    the end beside its rows.
    """

    space: Formats
    late: dict[int, tuple[str, float]] = field(default_factory=dict)
    ending: dict[str, Any] = field(default_factory=dict)

    @property
    def table(self) -> BenchTable:
        """Return the table of all trials that were tried, or were not for lack of time."""
        rows = [self.read_trial(trial) for trial in self.trials if trial.last or trial.number in self.late]
        usual = {row.name: row for row in rows if row.placement != "searched"}
        for row in rows:
            if row.placement == "searched" and row.state != "late":
                other = usual[row.name]
                better = row.may_win and (not other.may_win or (row.latency_ms or 0.0) < (other.latency_ms or 0.0))
                summed = replace(row, seconds=round(row.seconds + other.seconds, 1))
                usual[row.name] = summed if better else replace(other, placement="usual")
        # last, for a search by times is decided by times that were taken alike
        finals = {t.number: run.goals[FINAL].value for t in self.trials if (run := t.last) and FINAL in run.goals}
        for name, row in usual.items():
            if row.trial in finals:
                usual[name] = replace(row, latency_ms=finals[row.trial], final=True)
        return replace(self.space.table, rows=tuple(usual.values()), **self.ending).with_winners()

    def read_trial(self, trial: Trial) -> BenchRow:
        """Return a trial as a row."""
        choice, run, point = self.space.choose(trial.point), trial.last, trial.point
        row = BenchRow(point["target"], point["format"], "late", trial=trial.number)
        row = replace(row, placement=point.get("placement", ""))
        if run is None:
            why, seconds = self.late[trial.number]
            return replace(row, why=why, seconds=seconds)
        kinds = tuple(str(values["kind"]) for values in choice.chain.passes)
        row = replace(row, why=choice.why or _shorten(run.reason), passes=kinds, notes=choice.notes)
        row = replace(row, seconds=round(run.seconds, 1), stages=run.stages)
        if run.state != "judged":
            return replace(row, state="failed" if run.state == "failed" else choice.state)
        report = json.loads((self.folder / REPORTS / f"{name_trial(trial)}.json").read_bytes())
        row = read_row(row, run, report, self.space.table.speed)
        return replace(row, quality={}, keeps=None) if self.space.synthetic else row

    def bundle_of(self, row: BenchRow) -> Path:
        """Return where the row's bundle is, if it has one."""
        return self.folder / BUNDLES / name_trial(self.find(row.trial))

    def write(self) -> None:
        """Write the table whole, and no study's summary: which row wins is another rule than that of a front.

        All bundles stay while a row may change, to be timed together at the end; then those of the winners.
        """
        table = self.table
        text = json.dumps(to_dict(table), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        file = self.folder.parent / FILE
        try:
            write_whole(file, text.encode())
        except OSError as error:
            raise OutputError(f"{file}: cannot be written: {error.strerror}") from error
        may_change = not self.ending or any(row.state == "late" or row.may_gain for row in table.rows)
        winners = [row.trial for row in table.rows if row.name in (table.fastest, table.smallest)]
        self.keep_bundles(t for t in self.trials if t.last and (may_change or t.number in winners))


@dataclass
class Bench(Sweep):
    """A bench at work: all its points, why some are slow, and int8 that gains little once more."""

    study: BenchStudy
    deadline: float

    def run(self) -> str:
        """Try each point that was not; no row ends the others."""
        for trial in [self.study.open_trial(point) for point in list_points()]:
            if trial.last is None:
                self.try_row(trial)
        self.explain_slow()
        if not self.study.space.times_twins:
            self.search_placements()
        return ""

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def try_row(self, trial: Trial) -> None:
        begun = time.monotonic()
        self.study.late.pop(trial.number, None)
        try:
            self.try_all([trial], 0)
        except OutOfTime as error:
            self.study.late[trial.number] = str(error), round(time.monotonic() - begun, 1)
            self.log_row(trial)
            self.study.write()

    def try_wave(self, trials: Sequence[Trial], rung: int) -> None:
        if self.seconds_left <= self.foresee_measuring(trials[0]):
            raise OutOfTime("no time was left; the same command goes on, or give more --budget")
        super().try_wave(trials, rung)

    def order(self, trial: Trial, rung: int) -> TrialOrder:
        """Return what a process is told; nothing makes float32 late, for all others are held against it."""
        order = replace(super().order(trial, rung), timed=False, judging_s=self.foresee_measuring(trial))
        order = replace(order, do="twin") if self.study.space.times_twins else order
        return replace(order, seconds=None) if trial.point["format"] == FLOAT else order

    def foresee_measuring(self, trial: Trial) -> float:
        """Return the seconds that measuring takes: the most of those of the backend, else of any; 0: of none yet."""
        known = [other for other in self.study.trials if other.last is not None and other.last.stages]
        near = [other for other in known if other.point["target"] == trial.point["target"]] or known
        stages = [run.stages for other in near for run in other.runs]
        return max((sum(s for part, s in each.items() if part not in BUILDING) for each in stages), default=0.0)

    def finish(self, trial: Trial, rung: int, built: TrialAnswer | None) -> str:
        if built is not None and built.report:  # a twin
            self.record_judged(trial, rung, built, TrialAnswer("done", report=built.report))
            return ""
        if built is not None and built.state == "late":
            return f"it takes {built.reason}; the same command goes on, or give more --budget"
        late = super().finish(trial, rung, built)
        return late and "out of time as it was built and measured; the same command goes on"

    def stop_where_hopeless(self, answer: TrialAnswer) -> None:
        """Go on: another format may need less room."""

    def record(self, trial: Trial, run: Run) -> None:
        self.study.record(trial.add(run))
        self.log_row(trial.add(run))

    def log_row(self, trial: Trial) -> None:
        row = self.study.read_trial(trial)
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row.stages.items())
        why = f": {row.why}" if row.why else ""
        self.log(f"{row.name}: {row.state}{why}, {row.seconds:.0f} s" + (f" ({stages})" if stages else ""))

    def explain_slow(self) -> None:
        """Profile what is slower than float32 and say why, as far as time allows."""
        for row in self.study.table.rows:
            bundle = self.study.bundle_of(row)
            if not row.is_slower or row.why or not bundle.is_dir() or self.seconds_left <= 0:
                continue
            answer = self.workers.judge(TrialOrder("explain", str(bundle)), self.deadline)
            if answer is not None and answer.state == "done":
                self.amend(row, reason=answer.reason)

    def search_placements(self) -> None:
        """Build int8 rows that gain little once more, computing in float what int8 slows down; the faster is the row.

        That times every shape of layer on its backend: so it comes last, and is left out where no time is left.
        """
        for row in sorted((row for row in self.study.table.rows if row.may_gain), key=lambda row: row.speedup or 0.0):
            point = {"target": row.backend, "format": row.format, "placement": "searched"}
            self.try_row(self.study.open_trial(point))

    def time_finals(self, left_s: float) -> None:
        """Time the fastest rows in the same rounds, across backends."""
        table = self.study.table
        timed = sorted(
            (row for row in table.rows if row.may_win and row.latency_ms), key=lambda row: row.latency_ms or 0
        )
        # rows that are timed once more, in the same rounds
        rows = [row for row in timed if self.study.bundle_of(row).is_dir()][:4]
        if len({row.backend for row in rows}) < 2 or TORCH_TASKS[table.task].task.unit == "token":
            return  # those of one backend have their ratios to one float32
        if left_s < 2 * FINAL_S:
            self.log("the fastest were not timed together: no time was left; the same command does it")
            return
        try:
            times = time_finalists([(self.study.bundle_of(row), row.backend) for row in rows])
        except RuntimeFailure as error:
            self.log(f"the fastest were not timed together: {_shorten(str(error))}")
            return
        for row, latency in zip(rows, times, strict=True):
            self.amend(row, goals=self.study.find(row.trial).runs[0].goals | {FINAL: GoalValue(latency)})

    def amend(self, row: BenchRow, **changes: Any) -> None:
        """Record what was found out of a row after it was measured."""
        trial = self.study.find(row.trial)
        self.study.record(replace(trial, runs=(replace(trial.runs[0], **changes),)))


def bench_model(said: NewAnswers, out: Path, budget_s: float | None, cache: Path | None, log: Log) -> BenchTable:
    """Build and measure every format on every backend that works here, one after another; return the table.

    `out`/bench.json has every finished row at every moment, and a later call for the same question goes on from its
    study; `out`/recipe.yaml is the recipe of the fastest row. A format that fails or is out of time is a row that says
    so. Without data nothing is calibrated: graphs made like the results are timed on inputs drawn at random, and
    quality is not known. Raises what `draft_recipe` does, OutputError where `out` cannot be written.
    """
    begun, budget_s = time.monotonic(), budget_s or BUDGET_S
    _make_folder(out)
    draft = make_draft(said, Path())
    synthetic = draft.inputs is None
    draft = add_synthetic_set(draft, out / "synthetic", Path()) if synthetic else _take_fewer(draft)
    space = open_formats(said, draft, synthetic)
    if _read_question(out) != space.table.question:
        shutil.rmtree(out / STUDY, ignore_errors=True)
    end, held = begun + budget_s, draft.make_recipe(Path()).held
    with open_study(BenchStudy, out / STUDY, space) as study:
        with start_workers(held, 1, None, out / "bench.log", WORK) as workers:
            # no build goes on into the last tenth of the budget: the last rounds are measured in time
            bench = Bench(study, workers, cache or default_root(), end - 0.1 * budget_s, 0, Prior(), log)
            finish_study(study, bench.run)
        bench.time_finals(end - time.monotonic())
        study.ending = {"notes": _list_notes(space, study.table), "recipe": _write_winner(study, out)}
        study.ending["seconds"] = round(time.monotonic() - begun, 1)
        study.write()
        return study.table


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written: {error.strerror}") from error
    foreign = [path.name for path in out.iterdir() if path.name not in OURS]
    if foreign and not (out / FILE).is_file():
        raise OutputError(f"{out}: holds {foreign[0]}, which is not of a bench; give another --out")


def _read_question(out: Path) -> str:
    with suppress(OSError, ValueError, KeyError):
        return str(json.loads((out / FILE).read_text(encoding="utf-8"))["question"])
    return ""


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
    some = batches[:: max(len(batches) // 256, 1)]  # so many texts tell
    lengths = sorted(int(feeds["input_ids"].shape[1]) for feeds in some)
    return lengths[len(lengths) // 2]


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

    def explain_little(self) -> str:
        """Return why what the format leaves is nearly the float model; "" where it is not."""
        if self.weights >= LEAST_SHARE or self.products >= LEAST_SHARE:
            return ""
        kept = f" (the others: {self.why_kept})" if self.why_kept else ""
        return f"nearly the float32 model: it reaches {self.text}{kept}"


def find_reach(facts: ModelFacts, target: Target, chain: UsualPasses) -> Reach:
    """Return how much of the model a row's passes change, as the plan knows it."""
    before = after = facts
    reasons: Counter[str] = Counter()
    for values in chain.passes:
        plan = parse_pass(values).check(after, target)
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


def _shorten(text: str) -> str:
    text = " ".join(text.partition("\n")[0].split())
    return text if len(text) <= 160 else text[:160].rsplit(" ", 1)[0] + " ..."


def _list_notes(space: Formats, table: BenchTable) -> tuple[str, ...]:
    notes = []
    if space.synthetic:
        notes.append("synthetic inputs: give --data for int8 as it would be calibrated, and for quality of every row")
    elif not space.draft.has_labels:
        notes.append("no labels: quality is nearness to float32, not accuracy")
    if any(row.state == "late" for row in table.rows):
        notes.append("out of time: the same command goes on with the rows that are late")
    if not space.times_twins:
        notes += [
            f"{row.format} on {row.backend}: no time was left to find the layers that gain; the same command does it"
            for row in table.rows
            if row.may_gain
        ]
    if any(row.backend == "openvino" and row.state == "measured" for row in table.rows) and computes_bfloat16():
        notes.append("openvino: what is not in integers computes in bfloat16 on this processor, as float32, too")
    return tuple(filter(None, [*notes, say_busy(environment(table.threads))]))


def _write_winner(study: BenchStudy, out: Path) -> str:
    """Write the recipe of the fastest row to recipe.yaml, without sets that were drawn at random; return its path."""
    row, space = study.table.find(study.table.fastest), study.space
    if row is None:
        return ""
    point = study.find(row.trial).point
    chain, reasons = space.choose(point).chain, space.draft.reasons
    recipe = space.make_mapping(point, chain)
    if space.synthetic:
        recipe.pop("data", None)
        reasons = {
            **reasons,
            "model.source": "add data.calibration and data.evaluation: what was timed was drawn at random",
        }
    write_new(out / "recipe.yaml", format_draft(recipe, reasons, chain.passes, (), space.speed), replace=True)
    return str(out / "recipe.yaml")


def write_page(table: BenchTable, out: Path) -> Path:
    """Write the table as a page, `out`/bench.html, and return its path. OutputError."""
    from compress.pages.page import render_page

    rows = [list_cells(row) for row in table.rows if row.state == "measured"]
    lines = [line.removeprefix("- ") for line in list_conclusions(table)]
    page = render_page("bench.html", table=table, heads=HEADS, rows=rows, others=list_others(table), conclusions=lines)
    write_new(out / "bench.html", page, replace=True)
    return out / "bench.html"
