"""From a recipe to a judged bundle, left to right."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from compress.blocks import heap
from compress.blocks.device import choose_device
from compress.blocks.engine_arithmetic import rounding_notes
from compress.blocks.materialise import plain
from compress.blocks.sharing import main_process, wait
from compress.blocks.stream import rss_mib
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.data.samples import Samples, overlap
from compress.errors import PlaceError, PlanError
from compress.execution.beside import recall_logits, score_beside
from compress.execution.blocks import open_streamed, score_in_torch
from compress.execution.cached import FloatModel, keep_both, run_baseline
from compress.execution.lock import describe_host, make_lock
from compress.execution.measurements import PassMeasurements, list_costs
from compress.execution.own_metrics import LoadedMetric, check_sliced, load_own_metrics
from compress.execution.passes import (
    Passed,
    RunContext,
    block_passes_alone,
    build_kept,
    export,
    load,
    not_kept,
    run_passes,
)
from compress.execution.quality import run_graph
from compress.export.bundle import Contents, FrozenOutputs, Graphs, assemble, note_rows, write_models
from compress.export.checkpoint_config import make_config
from compress.export.checkpoint_rules import scoring_gaps
from compress.export.loading_back import LoadBack, choose_samples
from compress.facts import Note
from compress.formats.targets import TARGETS
from compress.models.checkpoint_names import find_taken_apart
from compress.models.facts import describe_unread
from compress.models.load import TorchModel
from compress.models.weights import safetensors_shapes
from compress.planning.forecast import BASELINE, EXPORT, JUDGING, READING, RUNNING, SCORING, START, WRITING
from compress.planning.in_files import allowed_bytes, note_missing_float, note_narrow_source, runs_float, stays_in_files
from compress.planning.judging import explain_not_run
from compress.planning.make_plan import TO_BE_FOUND, find_durations, make_plan, settle_keys
from compress.planning.measurements import measures_passes, pass_names
from compress.planning.own_metrics import OwnMetric, find_own_metrics, shorten_names
from compress.planning.plan import Plan
from compress.planning.sets import TEXTS, Batches, load_set
from compress.planning.students import locate_result
from compress.planning.tokens import describe_counted, generation_of, leave_out_unlearnable
from compress.recipe.load import recipe_to_yaml
from compress.recipe.portable import make_portable
from compress.recipe.schema import Recipe
from compress.store.cache import ResultCache, default_root
from compress.store.durable import blame, temporary_folder
from compress.store.output import keep_log, publish, reserve_output, resolve_output
from compress.store.run_log import RunLog
from compress.tasks import find_torch_task
from runtime.bundle.format import BuildScore, Judgement
from runtime.bundle.manifest import Manifest
from runtime.bundle.samples import digest_columns
from runtime.errors import UsageError
from runtime.judge.bundle import run_beside
from runtime.judge.passes import PassModel
from runtime.judge.slices import find_groups
from runtime.measure.benchmark import graph_backend
from runtime.metrics import Outputs
from runtime.report.report import Report
from runtime.report.stored import StoredReport
from runtime.report.validate import check_earlier, validate
from runtime.words import size_text

LOG = "compress.log"


def apply_recipe(
    recipe: Recipe,
    out: Path,
    cache: Path | None = None,
    quiet: bool = False,
    verify: bool = False,
    earlier: StoredReport | None = None,
) -> Report | None:
    """Do what the recipe says, judge the bundle, write it to `out`. What is in `cache` is not done again.

    `verify`: the digests of the weight files are read again, and not taken from what the cache remembers of them.
    `earlier`: a report that the verdict is held against.

    The bundle appears under its name only when it is whole and judged, whatever the verdict; until then the one that
    was there stays. The log is `<out>/compress.log`; that of a run that failed at its work is kept as
    `<out>.compress.log`, or `<out>.2.compress.log` where that name is taken. Raises CompressError and runtime failures.
    """
    out, root = resolve_output(Path(out)), cache or default_root()
    if earlier is not None:
        _check_earlier(earlier, recipe, out)
    if not main_process():
        _run_as_worker(recipe, ResultCache(root), verify)
        return None
    with _stage_bundle(recipe, out, root, quiet) as (staging, run_log), temporary_folder() as between:
        run = _prepare(recipe, ResultCache(root, run_log.log), run_log, verify)
        _check_room(run.plan, out, root)
        if earlier is not None:
            _check_earlier(earlier, recipe, out, run.sets["evaluation"])
        built = _build(run, staging, between)
        with blame(out):
            report = _judge(run, staging, built, earlier)
        _keep_durations(run)
    return report


def build_recipe(
    recipe: Recipe, out: Path, cache: Path | None = None, quiet: bool = False, timed: bool = True
) -> tuple[str, ...]:
    """Write the bundle of a recipe to `out` as `apply_recipe` does, not judged yet; return this machine's notes.

    They are for the report: `runtime.report.validate.validate(out, notes=...)` writes it. For whoever builds in many
    processes and measures in one after another. `timed`: whether its plan forecasts speed, which times an ONNX file.
    """
    out, root = resolve_output(Path(out)), cache or default_root()
    with _stage_bundle(recipe, out, root, quiet) as (staging, run_log), temporary_folder() as between:
        run = _prepare(recipe, ResultCache(root, run_log.log), run_log, timed=timed)
        _check_room(run.plan, out, root)
        built = _build(run, staging, between)
        _keep_durations(run)
    return tuple(note.text for note in built.notes)


@contextmanager
def _stage_bundle(recipe: Recipe, out: Path, root: Path, quiet: bool) -> Iterator[tuple[Path, RunLog]]:
    """Yield the folder in which a new bundle grows, and the run's log in it; give it its name at the end."""
    if recipe.seeks_passes:
        raise PlanError(TO_BE_FOUND)
    with reserve_output(out) as staging:
        ResultCache(root).check_place()
        with blame(out):
            run_log = RunLog(staging / LOG, quiet)
        with _keep_log_on_failure(run_log, out), run_log.failures():
            yield staging, run_log
            publish(staging, out)


@contextmanager
def _keep_log_on_failure(run_log: RunLog, out: Path) -> Iterator[None]:
    """Put the log beside `out` if the work fails while the context is open. Refusals before any work need none."""
    try:
        yield
    except BaseException as error:
        if getattr(error, "exit_code", 1) != 2:
            with suppress(OSError):  # a full disk may be why
                run_log.show(f"the log of this run: {keep_log(run_log.file, out)}")
        raise


def _check_room(plan: Plan, out: Path, cache: Path) -> None:
    """Raise PlaceError if the disk of `out` has no room for the bundle: the plan has looked at the cache's alone."""
    expected = plan.forecast
    shared = out.parent.stat().st_dev == cache.stat().st_dev
    needed = expected.disk_bytes if shared else expected.bundle_bytes
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        what = "bundle and cache" if shared else "the bundle"
        raise PlaceError(
            f"{out.parent}: about {size_text(needed)} are needed for {what} and {size_text(free)} are free; make room, "
            "or choose another --out"
        )


def _run_as_worker(recipe: Recipe, cache: ResultCache, verify: bool) -> None:
    """Do the share of a further process of a `torchrun` launch in the calibration; the first process writes all."""
    with temporary_folder() as folder:
        run_log = RunLog(folder / LOG, quiet=True)
        with run_log.failures():
            block_passes_alone(_prepare(recipe, cache, run_log, verify))


def _prepare(
    recipe: Recipe, cache: ResultCache, run_log: RunLog, verify: bool = False, timed: bool = True
) -> RunContext:
    """Make the plan, settle the keys of its results and load the data."""
    plan = make_plan(recipe, cache.root, twins=False, log=run_log.log, timed=timed)
    with run_log.time_stage("digests of the weights"):
        if main_process():
            plan = settle_keys(plan, cache, verify)
        wait()  # the other processes find what the first one has read
        plan = settle_keys(plan, cache)
    run_log.expected_s = {stage.name: stage.duration.seconds for stage in plan.stages if not stage.duration.guessed_s}
    for note in plan.notes:
        run_log.log(note.text)
    with run_log.time_stage("loading data"):
        sets, notes = _load_sets(plan, run_log)
    run_log.took_s[START] = time.monotonic() - run_log.start
    resumed = {
        name
        for name, work in zip(plan.work_names, plan.steps, strict=True)
        if work.cached or cache.has_partial(work.key)
    }
    return RunContext(plan, cache, run_log, sets, notes, resumed)


def _keep_durations(run: RunContext) -> None:
    """Keep what each stage took that did all of its work, for the plans of other runs on this machine."""
    durations = find_durations(run.plan.recipe, run.cache.root)
    for stage in run.plan.stages:
        if stage.name in run.run_log.took_s and stage.name not in run.resumed:
            durations.keep(stage.name, stage.work, run.run_log.took_s[stage.name])


def _check_earlier(earlier: StoredReport, recipe: Recipe, out: Path, evaluation: Samples | None = None) -> None:
    """Refuse an earlier report that the bundle cannot be held against, as far as the recipe and its samples tell."""
    judgement = shorten_names(recipe.validate_, find_own_metrics(recipe))
    digest = None if evaluation is None else digest_columns(evaluation.columns)
    check_earlier(earlier, out.name, recipe.model.task, judgement, digest)


def _judge(run: RunContext, folder: Path, built: Built, earlier: StoredReport | None) -> Report:
    n_samples = run.sets["evaluation"].n if "evaluation" in run.sets else 0
    with run.run_log.time_stage(JUDGING, f"{n_samples} samples"):
        latency = run.plan.latency
        report = validate(
            folder,
            passes=built.passes,
            notes=[note.text for note in built.notes],
            earlier=earlier,
            forecast=latency.speedup if latency is not None and latency.backend == run.plan.recipe.target else None,
            progress=run.run_log.progress,
            outputs=built.outputs,
        )
    run.run_log.log(f"verdict: {report.verdict}")
    return report


@dataclass(frozen=True)
class Built:
    """What the judgement gets of a build beside its bundle.

    `passes`: the models between the passes. `notes`: of this machine alone, which the report has and the bundle's
    hashed files have not. `outputs`: what the candidate gave on the samples, where its files were run.
    """

    passes: Sequence[PassModel]
    notes: list[Note]
    outputs: dict[str, np.ndarray] | None


def _build(run: RunContext, staging: Path, between: Path) -> Built:
    """Run the passes and write the bundle into `staging`, and into `between` the models between the passes."""
    plan, run_log, recipe = run.plan, run.run_log, run.plan.recipe
    if plan.before.classless:
        return _build_unjudged(run, staging)
    samples = run.sets["evaluation"].columns
    not_run, with_float = explain_not_run(recipe) or "", runs_float(recipe, plan.before)
    once = with_float and stays_in_files(recipe, plan.before) and not not_run
    exported, baseline = _export_float(run)
    metrics = find_own_metrics(recipe)
    judgement = shorten_names(recipe.validate_, metrics)
    own = _load_own_metrics(metrics, judgement, baseline, samples) if baseline is not None else []
    chain = None
    if exported is not None and measures_passes(recipe, plan.before):
        chain = PassMeasurements(plan, run.cache, run_log, between, samples, exported)
    comparable = {} if baseline is None or recipe.generates else baseline  # what is scored is no output of a graph
    passed = run_passes(run, exported, comparable, chain.add if chain else not_kept)
    candidate, score, notes = None, None, list[Note]()
    if (baseline is None or not_run) and not once:
        with run_log.time_stage(SCORING):
            before, candidate = _score_checkpoint(run, passed)
        score, notes = _describe_score(run, passed, not_run)
        baseline = before if baseline is None else baseline
    notes += _collect_notes(plan, exported, passed, with_float)
    with run_log.time_stage(WRITING), blame(staging.parent):
        contents = _collect_contents(run, exported, passed, with_float, judgement, notes)
        manifest, of_files = write_models(staging, contents)
    if once:
        baseline, candidate = _run_bundle(run, staging, manifest)
    assert baseline is not None
    frozen = FrozenOutputs(baseline, candidate if score else None, score)
    if metrics:
        with run_log.time_stage("the recipe's own metrics"):
            own = own or _load_own_metrics(metrics, judgement, baseline, samples)
            outputs = candidate if candidate is not None else _run_candidate(run, staging, manifest)
            after = [metric.compute_or_mark(outputs, samples.get("label")) for metric in own]
        records = tuple(metric.record for metric in own)
        frozen = replace(frozen, recorded=records, recorded_values=([metric.baseline for metric in own], after))
    with blame(staging.parent):
        assemble(staging, manifest, of_files, contents, frozen)
    of_files = [*of_files, *(note for result in passed.results for note in result.notes if note.here)]
    for note in (*run.notes, *notes, *of_files):
        run_log.log(note.text)
    costs = [] if recipe.validate_.steps is False else list_costs(recipe.passes, passed.results)
    here = [note for note in (*notes, *of_files) if note.here]
    return Built(chain.models if chain else costs, here, candidate if once else None)


def _build_unjudged(run: RunContext, staging: Path) -> Built:
    """Run the passes of a model that nothing runs, and write a bundle without samples."""
    plan, passed = run.plan, run_passes(run, None, {})
    warnings = [note for note in plan.notes if note.level == "warning"]
    notes = [*warnings, *_collect_notes(plan, None, passed, with_float=False)]
    with run.run_log.time_stage(WRITING), blame(staging.parent):
        contents = _collect_contents(run, None, passed, False, plan.recipe.validate_, notes)
        manifest, of_files = write_models(staging, contents)
        assemble(staging, manifest, of_files, contents, None)
    for note in of_files:
        run.run_log.log(note.text)
    return Built(list_costs(plan.recipe.passes, passed.results), [note for note in of_files if note.here], None)


def _export_float(run: RunContext) -> tuple[FloatModel | None, dict[str, np.ndarray] | None]:
    """Return the float graph and its outputs over the evaluation samples, as far as the recipe has them before passes.

    None for a graph that is not written, and for outputs that are found once the candidate is there.
    """
    plan, exported, baseline = run.plan, None, None
    if plan.recipe.has_onnx:
        with run.run_log.time_stage(EXPORT):
            exported = export(run, plan.keys.float_graph, lambda: load(plan))
        if not stays_in_files(plan.recipe, plan.before):
            samples = run.sets["evaluation"].columns
            with run.run_log.time_stage(BASELINE):
                baseline = run_baseline(run.cache, plan.keys.baseline, exported, plan.inputs, samples)
    return exported, baseline


def _load_own_metrics(
    metrics: Sequence[OwnMetric], judgement: Judgement, baseline: Mapping[str, np.ndarray], samples: Mapping[str, Any]
) -> list[LoadedMetric]:
    distinct = list({metric.short_name: metric for metric in metrics}.values())  # one may be named in two ways
    own = load_own_metrics(distinct, baseline, samples.get("label"))
    check_sliced(own, judgement)
    return own


def _collect_notes(plan: Plan, exported: FloatModel | None, passed: Passed, with_float: bool) -> list[Note]:
    """Return what the report says of the model and the graph, and the plan's warnings that no pass has said."""
    recipe, facts = plan.recipe, plan.before
    missing = None if with_float else note_missing_float(recipe, facts)
    notes = [note for note in (missing, note_narrow_source(recipe, facts)) if note is not None]
    if exported is not None:
        notes += exported.notes()
    if plan.latency is not None and (text := plan.latency.describe_denormals()):
        notes.append(Note("warning", text, here=True))
    if plan.latency is not None and (text := plan.latency.describe_unrounded()):
        notes.append(Note("info", text, here=True))
    if facts.unread and not facts.classless:
        notes.append(Note("warning", describe_unread(facts.unread)))
    told = {note.text for result in passed.results for note in result.notes}
    return notes + [n for step in plan.steps for n in step.notes if n.level == "warning" and n.text not in told]


def _collect_contents(
    run: RunContext,
    exported: FloatModel | None,
    passed: Passed,
    with_float: bool,
    judgement: Judgement,
    notes: Sequence[Note],
) -> Contents:
    """Return what the bundle is made of; `with_float`: the float graph, too."""
    plan, recipe, inputs, evaluation = run.plan, run.plan.recipe, run.plan.inputs, run.sets.get("evaluation")
    portable, surplus = make_portable(recipe), _find_surplus(plan, passed.streamed)
    return Contents(
        recipe=recipe,
        recipe_yaml=recipe_to_yaml(recipe, portable),
        lock=make_lock(inputs, plan.keys, run.sets, exported, passed.results, portable),
        host=describe_host(recipe, portable),
        preprocess=inputs.preprocess,
        folder=inputs.source.folder,
        tokenizer=inputs.tokenizer,
        samples=evaluation.columns if evaluation else {},
        slices=evaluation.slices if evaluation else {},
        judgement=judgement,
        layers=[*layer_rows(pass_names(recipe.passes), passed.results), *note_rows([*run.notes, *notes])],
        graphs=_collect_graphs(plan, exported, passed, with_float),
        streamed=passed.streamed,
        imatrix=passed.imatrix,
        class_names=exported.class_names if exported else (),
        config=_correct_config(inputs.source.folder, passed.streamed or passed.module),
        generation=generation_of(inputs),
        images=inputs.sight.images if inputs.sight is not None else None,
        template=inputs.chats.templates["default"] if inputs.sight is not None and inputs.chats is not None else None,
        cache=run.cache.root,
        module=build_kept(run, passed),
        surplus=surplus,
        load_back=_prepare_load_back(run, surplus) if passed.streamed is not None and evaluation else None,
        detections=inputs.facts.detections,
        source_bytes=None if exported and with_float else _source_bytes(plan, surplus),
    )


def _correct_config(source: Path | None, left: StreamedModel | TorchModel | None) -> dict[str, Any] | None:
    """Return the config.json of what the passes left; None where that of the folder `source` is true, or none is there.

    It is untrue of a model of other sizes, and of a student with a folder of its own.
    """
    if left is None or left.folder is None or (left.folder == source and not left.shapes.config):
        return None
    module = left.build() if isinstance(left, StreamedModel) else left.module
    return make_config(left.folder, module, left.shapes.config)


def _find_surplus(plan: Plan, model: StreamedModel | None) -> dict[str, Path]:
    """Return the source's tensors that are copied as they are -> their files: those that are no part of the model.

    And those of towers that transformers takes apart as it loads them. None beside a model that passes have made
    smaller, or put in its place: they do not fit it.
    """
    own, files = locate_result(plan.recipe, plan.inputs.source) is plan.inputs.source, plan.inputs.source.weights
    writes = any(export.kind == "checkpoint" for export in plan.recipe.export)
    if model is None or model.shapes or not own or not writes or any(p.suffix != ".safetensors" for p in files):
        return {}
    held = {name: path for path in files for name in safetensors_shapes(path)}
    copied = list(plan.before.unread)
    if all(config.stage_on(plan.before) != "model" for config in plan.recipe.passes):
        module = model.build()
        idle = {layer.name for layer in plan.before.layers if layer.role == "idle"} - set(model.schemes)
        apart = find_taken_apart(module, held, [plain(name) for name in module.state_dict()])
        copied += [name for name, parts in apart.items() if {part.rpartition(".")[0] for part in parts} <= idle]
    return {name: held[name] for name in copied}


def _prepare_load_back(run: RunContext, surplus: Mapping[str, Path]) -> LoadBack:
    """Return what the checkpoints are loaded back with: a few samples of the evaluation set."""
    plan, recipe = run.plan, run.plan.recipe
    batches = Batches(run.sets["evaluation"], plan.inputs, plan.before.inputs)
    allowed = allowed_bytes(recipe, held=int(2 * rss_mib() * 2**20))  # this process, and another's libraries
    feeds = choose_samples(batches, plan.inputs.preprocess.kind in TEXTS)
    return LoadBack(locate_result(plan.recipe, plan.inputs.source), feeds, allowed, run.run_log.log, surplus)


def _run_bundle(
    run: RunContext, staging: Path, manifest: Manifest
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the outputs of the float model, whose graph was compared with torch's, and of the candidate's own file."""
    plan, run_log, columns = run.plan, run.run_log, run.sets["evaluation"].columns

    def measure() -> tuple[Outputs, Outputs]:
        gc.collect()  # what the passes have left behind goes first
        heap.return_all()
        with ExitStack() as stack:
            with run_log.time_stage(READING):
                model = open_streamed(plan.inputs, None)
                recall = stack.enter_context(recall_logits(model, _make_scoring_context(run)))
            with run_log.time_stage(RUNNING):
                return score_beside(staging, manifest, columns, recall, run_log.progress)

    return keep_both(run.cache, plan.keys.beside, measure)


def _run_candidate(run: RunContext, staging: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """Return the outputs over the evaluation samples of the graph that will be judged."""
    backend, columns = graph_backend(manifest), run.sets["evaluation"].columns
    if manifest.generates:
        told = run.run_log.progress
        return keep_both(
            run.cache, run.plan.keys.beside, lambda: run_beside(staging, manifest, columns, backend, progress=told)
        )[1]
    graph = manifest.graph_for(backend)
    return run_graph(staging / graph.path, run.plan.inputs, graph.inputs, columns)


def _collect_graphs(plan: Plan, exported: FloatModel | None, passed: Passed, with_float: bool) -> Graphs | None:
    if exported is None or passed.state is None:
        return None
    ends = exported.inputs, exported.outputs
    return Graphs(exported.state.model, passed.state, *ends, with_float, plan.before.states)


def _source_bytes(plan: Plan, kept: Mapping[str, Path]) -> int:
    """Return the bytes of the source's weights, those that no part of the result holds left out."""
    lost = sum(size for name, size in plan.before.unread.items() if name not in kept)
    return sum(path.stat().st_size for path in plan.inputs.source.weights) - lost


def _score_checkpoint(run: RunContext, passed: Passed) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return baseline's and candidate's outputs where no graph is written that the runtime could run."""
    plan = run.plan
    assert passed.source is not None and passed.streamed is not None
    changed = any(config.stage_on(plan.before) == "model" for config in plan.recipe.passes)
    before = open_streamed(plan.inputs, None) if changed else passed.source
    masks = Batches(run.sets["evaluation"], plan.inputs, plan.before.inputs).loss_masks
    return score_in_torch(
        run.cache, plan.keys.torch_outputs, before, passed.streamed, _make_scoring_context(run), masks
    )


def _make_scoring_context(run: RunContext) -> PassContext:
    """Return what a model is run with over the evaluation samples, in torch."""
    recipe, plan = run.plan.recipe, run.plan
    return PassContext(
        batches=Batches(run.sets["evaluation"], plan.inputs, plan.before.inputs),
        target=TARGETS[recipe.target],
        seed=recipe.seed,
        log=run.run_log.log,
        progress=run.run_log.progress,
        device=str(choose_device(recipe.device)),
    )


def _describe_score(run: RunContext, passed: Passed, not_run: str) -> tuple[BuildScore, list[Note]]:
    """Return how the candidate was scored by torch, and the notes that the report has of it.

    `not_run`: why nothing here runs the graph; "" where it is run, so that it computes what its layers' schemes say.
    """
    streamed, recipe = passed.streamed, run.plan.recipe
    assert streamed is not None
    if stays_in_files(recipe, run.plan.before) and not not_run:
        return BuildScore(f"torch {version('torch')}"), []
    gaps = tuple(scoring_gaps(streamed.structure, streamed.kv_cache, recipe.target))
    return BuildScore(f"torch {version('torch')}", gaps, not_run), rounding_notes(streamed, recipe.target)


def _load_sets(plan: Plan, run_log: RunLog) -> tuple[dict[str, Samples], tuple[Note, ...]]:
    """Load the named sets, checked against the model's number of classes; log if calibration and evaluation overlap.

    Returns them, and notes of samples that are left out.
    """
    if plan.before.classless:
        return {}, ()
    n_classes = find_torch_task(plan.recipe.model.task).count_classes(plan.before.outputs)
    sets = {name: load_set(plan.inputs, name, n_classes) for name in plan.inputs.data}
    evaluation = sets["evaluation"]
    recipe, labels = plan.recipe, evaluation.columns.get("label")
    try:
        find_groups(recipe.validate_, evaluation.slices, labels, recipe.model.task, plan.inputs.class_names)
    except UsageError as error:
        raise PlanError([f"validate: {problem}" for problem in error.problems]) from error
    shared = overlap(sets["calibration"], sets["evaluation"]) if "calibration" in sets else 0
    if shared:
        of = f"{shared} of {sets['evaluation'].n} evaluation samples"
        run_log.log(f"data: {of} are also calibration samples; the verdict is optimistic")
    notes = []
    if "train" in sets:
        sets["train"], note = leave_out_unlearnable(sets["train"], plan.inputs)
        notes.append(note)
    notes += [describe_counted(sets[name], name, plan.inputs) for name in ("train", "evaluation") if name in sets]
    return sets, tuple(note for note in notes if note is not None)


def layer_rows(names: Sequence[str], results: Sequence[PassResult[object]]) -> list[dict[str, Any]]:
    """Return one row for each layer: its last deciding pass, what was done and why, and what every pass measured of it.

    `names`: of the passes, as `pass_names` gives them. What a pass measured under its own name ("distill: training
    loss") is a row of its own.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, result in zip(names, results, strict=True):
        for decision in result.decisions:
            row = rows.setdefault(decision.layer, {"layer": decision.layer, "type": decision.type, "action": "kept"})
            if decision.action != "kept" or row["action"] == "kept":
                row |= {"action": decision.action, "pass": name, "reason": decision.reason}
            row.setdefault("history", []).append(f"{name}: {decision.action} {decision.reason}".strip())
            row |= result.measured.get(decision.layer, {})
    for name, result in zip(names, results, strict=True):
        kind = name.partition(" ")[0]
        for layer, numbers in result.measured.items():
            if layer.startswith(f"{kind}: "):
                title = name + layer.removeprefix(kind)
                rows[title] = {"layer": title, "type": "measured", "action": "measured", "pass": name, **numbers}
    return [*rows.values(), *note_rows([note for result in results for note in result.notes])]
