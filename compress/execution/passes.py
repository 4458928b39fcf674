"""A recipe's passes, run in their stages: the torch module, its blocks, the graph that is exported from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from torch import nn

from compress.blocks.device import choose_device
from compress.blocks.materialise import plain
from compress.blocks.sharing import from_main, share
from compress.blocks.squares import gather_squares
from compress.blocks.streamed import StreamedModel
from compress.context import Feeds, PassContext, PassResult
from compress.data.samples import Samples
from compress.data.training import EncodedSet, make_encoded_set
from compress.errors import SourceError
from compress.execution.blocks import hold_shared_work, open_streamed, run_block_pass
from compress.execution.cached import PARITY_BATCHES, FloatModel, float_model, run_graph_pass, run_model_pass
from compress.execution.in_files import float_model_in_files
from compress.execution.quality import find_nats_allowed, graph_runner, score_finder, shortfall_finder
from compress.execution.weight_trials import make_gguf_trials, make_weight_trials
from compress.export.imatrix import Imatrix
from compress.export.onnx import export_float, float_graph, save_graph, with_integers, with_rounded_layers
from compress.export.parity import check_parity
from compress.export.refill import refill
from compress.facts import Note
from compress.formats.targets import TARGETS
from compress.graph.seeing import specs_fed
from compress.models.batch_axis import TOLERANCE
from compress.models.load import OnnxModel, TorchModel, load_model, load_torch_model
from compress.passes import Pass
from compress.passes.base import Stage
from compress.planning.forecast import EXPORT
from compress.planning.importance import read_importance
from compress.planning.in_files import stays_in_files
from compress.planning.measurements import pass_names
from compress.planning.plan import Plan
from compress.planning.sets import Batches, example_feeds
from compress.planning.students import make_student
from compress.planning.timing import explain_no_clock, explain_untimed, make_clock, make_timer, make_writer
from compress.recipe.exports import CheckpointExport, GgufExport
from compress.rounding.latency import StateTimer, round_all_roughly
from compress.rounding.state import GraphState
from compress.store.cache import ResultCache, cache_key
from compress.store.durable import blame
from compress.store.run_log import RunLog
from compress.store.training_state import distinct
from compress.work import Form
from compress.work.contexts import BlockContext, GraphContext, ModelContext, Timing, WeightTrials
from runtime.bundle.manifest import fixed_batch
from runtime.bundle.tensors import TensorSpec
from runtime.encode.preprocess import make_preprocessor
from runtime.measure.workload import MAX_FEEDS, make_feeds
from runtime.tasks.predict import encoding_views

Context = TypeVar("Context", ModelContext, GraphContext)


@dataclass(frozen=True)
class RunContext:
    """What one run carries from pass to pass: the plan, the cache, the run log and the samples of each set."""

    plan: Plan
    cache: ResultCache
    run_log: RunLog
    sets: dict[str, Samples]
    notes: tuple[Note, ...] = ()
    """Of the samples."""
    resumed: set[str] = field(default_factory=set)
    """Names of the stages of which the cache has the result, or some of the work."""


@dataclass(frozen=True)
class Passed:
    """What the passes left. `results`: one for each pass.

    `state`: the graph and the decisions about it; None where no ONNX file is written. `source` and `streamed`: the
    torch model before and after the passes over blocks; None where there is neither such a pass nor a checkpoint.
    `module`: what the passes over the whole torch module left; None where there is no such pass. `imatrix`: of what the
    passes left, where a GGUF file gets one.
    """

    results: tuple[PassResult[object], ...]
    state: GraphState | None
    source: StreamedModel | None
    streamed: StreamedModel | None
    module: TorchModel | None = None
    imatrix: Imatrix | None = None


AfterPass = Callable[[int, PassResult[object], Callable[[], GraphState]], None]
"""(number of a pass, its result, what gives the graph that it left)."""


def not_kept(index: int, result: PassResult[object], graph: Callable[[], GraphState]) -> None:
    """Ignore what a pass left."""


def run_passes(
    run: RunContext, exported: FloatModel | None, baseline: Mapping[str, np.ndarray], after_pass: AfterPass = not_kept
) -> Passed:
    """Run model passes, block passes, the export between, graph passes.

    `exported`: the float model, if ONNX is written.

    `after_pass` is told after each pass what it left.
    """
    loaded, modelled = _run_model_passes(run, after_pass, exported)
    source, streamed, blocked = _run_block_passes(run, loaded, exported, after_pass)
    state = None if exported is None else exported.state
    if exported is not None and streamed is not None and blocked:
        state, notes = _export_blocks(run, run.plan.keys.passed_graph, exported, loaded, source, streamed)
        blocked[-1] = replace(blocked[-1], notes=(*blocked[-1].notes, *notes))
    elif exported is not None and loaded is not None:
        state = _export_module(run, run.plan.keys.passed_graph, exported, loaded)
    graphed: list[PassResult[GraphState]] = []
    if state is not None and exported is not None:
        state, graphed = _run_graph_passes(run, state, exported, baseline, after_pass)
    imatrix = _gather_imatrix(run, streamed)
    results = _note_rebuilt(run, (*modelled, *blocked, *graphed))
    for note in (note for result in results for note in result.notes):
        run.run_log.log(note.text)
    return Passed(results, state, source, streamed, loaded, imatrix)


def block_passes_alone(run: RunContext) -> None:
    """Do a further process's share of one launch: of the calibration data, or of training; write no file.

    Where a pass over the graph trains, it takes part in all that comes before, too.
    """
    if any(config.needs_train for _, config, _ in _iter_stage(run, "graph")):
        run_passes(run, export(run, run.plan.keys.float_graph, lambda: load(run.plan)), {})
        return
    loaded, _ = _run_model_passes(run, not_kept)
    _, streamed, _ = _run_block_passes(run, loaded, None, not_kept)
    _gather_imatrix(run, streamed)


def export(
    run: RunContext,
    key: str,
    load: Callable[[], TorchModel | OnnxModel],
    refilled: Callable[[], ir.Model | None] = lambda: None,
) -> FloatModel:
    """Export the model as a float graph; check parity on calibration samples (evaluation samples without a set).

    `refilled`: as of `float_model`.
    """
    plan, samples = run.plan, _parity_samples(run)
    if stays_in_files(plan.recipe, plan.before):
        return _export_in_files(run, key, open_streamed(plan.inputs, None))
    batches = partial(Batches, samples, plan.inputs)
    about = plan.recipe.opset, refilled, plan.inputs.sight, partial(_note_reuse, run)
    return float_model(run.cache, key, plan.keys.made_of[key], load, batches, *about)


def _export_in_files(run: RunContext, key: str, streamed: StreamedModel) -> FloatModel:
    """Return what `export` does of a language model whose weights stay in their files."""
    plan, samples = run.plan, _parity_samples(run)
    context = PassContext(**_list_fields(run, plan.before.inputs))
    about = plan.recipe.opset, context, plan.inputs.sight, partial(_note_reuse, run)
    batches = partial(Batches, samples, plan.inputs)
    return float_model_in_files(run.cache, key, plan.keys.made_of[key], streamed, batches, *about)


def _note_reuse(run: RunContext) -> None:
    """Say that a graph is taken from the cache; what the stage takes without an export tells nothing of later ones."""
    run.run_log.log(
        "the graph is that of an earlier run with these weights; it agrees with torch on this run's samples"
    )
    run.resumed.add(EXPORT)


def _parity_samples(run: RunContext) -> Samples:
    return run.sets.get("calibration", run.sets["evaluation"])


def load(plan: Plan) -> TorchModel | OnnxModel:
    """Load the recipe's model with its weights."""
    with blame(plan.recipe.root, SourceError):
        return load_model(plan.inputs.source, plan.inputs.feeds)


def _load_torch(run: RunContext) -> TorchModel:
    """Load the recipe's model as a torch module; ExportError where one rebuilt from an ONNX file differs from it."""
    plan = run.plan
    with blame(plan.recipe.root, SourceError):
        loaded = load_torch_model(plan.inputs.source, plan.inputs.feeds)
    if plan.before.source == "onnx":
        check_rebuilt(run, lambda: loaded)
    return loaded


def check_rebuilt(run: RunContext, rebuilt: Callable[[], TorchModel]) -> float:
    """Compare the module rebuilt from an ONNX file with the file, on the samples that exports are checked with.

    Returns the largest difference, relative to the largest output. Raises ExportError beyond the exports' tolerance.
    """
    plan = run.plan
    key = cache_key("rebuilt", plan.keys.float_graph)

    def write(folder: Path) -> dict[str, Any]:
        exported = export(run, plan.keys.float_graph, lambda: load(plan))
        batches = Batches(_parity_samples(run), plan.inputs, exported.inputs)[:PARITY_BATCHES]
        return {"parity": float(f"{check_parity(rebuilt(), exported.state.model, batches):.2e}")}

    cached = run.cache.get(key) or run.cache.put(key, write)
    return float(cached.record["parity"])


def _note_rebuilt(run: RunContext, results: tuple[PassResult[object], ...]) -> tuple[PassResult[object], ...]:
    """Say with the first pass that worked on, or learned of, a module rebuilt from an ONNX file how near that came."""
    recipe, before = run.plan.recipe, run.plan.before
    if not before.rebuilt:
        return results
    parity = check_rebuilt(run, partial(_load_torch, run))
    text = (
        f"the torch module rebuilt from the ONNX file differs from it by {parity:.1e} of the largest output on real "
        f"inputs (allowed {TOLERANCE:.0e})"
    )
    first = next(i for i, pass_ in enumerate(recipe.passes) if pass_.stage_on(before) == "model" or pass_.needs_train)
    noted = replace(results[first], notes=(Note("info", text), *results[first].notes))
    return (*results[:first], noted, *results[first + 1 :])


def _iter_stage(run: RunContext, stage: Stage) -> Iterator[tuple[int, Pass, str]]:
    """Yield (number, pass, key) of the passes of one stage."""
    plan = run.plan
    for index, (config, key) in enumerate(zip(plan.recipe.passes, plan.keys.passes, strict=True)):
        if config.stage_on(plan.before) == stage:
            yield index, config, key


def _list_fields(run: RunContext, specs: tuple[TensorSpec, ...], apart: bool = False) -> dict[str, Any]:
    """Return the fields of a PassContext, for a model with these inputs. `apart`: as of `Batches`."""
    plan, calibration = run.plan, run.sets.get("calibration")
    limit = plan.recipe.limits.memory_gib
    batches = Batches(calibration, plan.inputs, specs, apart=apart) if calibration is not None else None
    return {
        "batches": () if batches is None else batches,
        "loss_masks": None if batches is None else batches.loss_masks,
        "target": TARGETS[plan.recipe.target],
        "seed": plan.recipe.seed,
        "log": run.run_log.log,
        "progress": run.run_log.progress,
        "device": str(choose_device(plan.recipe.device)),
        "memory_mib": None if limit is None else 1024 * limit,
    }


def _run_model_passes(
    run: RunContext, after_pass: AfterPass, exported: FloatModel | None = None
) -> tuple[TorchModel | None, list[PassResult[TorchModel]]]:
    loaded, results = None, list[PassResult[TorchModel]]()
    names = pass_names(run.plan.recipe.passes)
    for index, config, key in _iter_stage(run, "model"):
        loaded = loaded or _load_torch(run)
        students = (pass_.find_student() for pass_ in run.plan.recipe.passes)
        apart = run.plan.inputs.facts.reads_apart and all(s is None or s.source is None for s in students)
        context = ModelContext(
            **_list_fields(run, loaded.inputs),
            **_list_training_fields(run, loaded.inputs, apart),  # packed rows' samples: the students, too
            student=partial(make_student, run.plan.inputs.source, run.plan.inputs.feeds, loaded),
            timing=_make_timing(run, loaded),
        )
        run_pass = partial(run_model_pass, run.cache, key, config, loaded)
        with run.run_log.time_stage(names[index]):
            results.append(_resume_pass(run, index, key, run_pass, context))
        loaded = results[-1].model
        after_pass(index, results[-1], partial(_export_module, run, run.plan.keys.exports[index], exported, loaded))
    return loaded, results


def _resume_pass(
    run: RunContext, index: int, key: str, run_pass: Callable[[Context], PassResult[Form]], context: Context
) -> PassResult[Form]:
    """Run the pass of that number. What a killed run had done of it lies under `key`, and is continued.

    Several processes do the same work together; what the first one finds in the cache counts for all.
    """
    if from_main(run.cache.get(key) is not None if share().rank == 0 else None):
        return run_pass(context)
    with hold_shared_work(run.cache, key, f"{run.plan.recipe.name}: passes.{index}") as work:
        return run_pass(replace(context, work=work))


def _make_timing(run: RunContext, loaded: TorchModel) -> Timing | None:
    """Return how a pass over the module measures speed: a call reads a sample, or as many as the inputs fix.

    None for language models, where the target runs engines, and where it does not run here: another runtime's times
    would be no answer.
    """
    recipe = run.plan.recipe
    if explain_no_clock(recipe) is not None:
        return None
    samples = run.sets.get("calibration", run.sets["evaluation"])
    example = example_feeds(Batches(samples, run.plan.inputs, loaded.inputs)[0], loaded.inputs)
    size = fixed_batch(loaded.inputs) or 1

    def export_module(module: nn.Module) -> ir.Model:
        return float_graph(export_float(replace(loaded, module=module), example, recipe.opset))

    return Timing(
        make_clock(recipe, run.cache.root),
        export_module,
        [{key: np.ascontiguousarray(values[:size]) for key, values in example.items()}],
        lambda graph: make_writer(recipe)(round_all_roughly(graph)),
    )


def _make_graph_timing(run: RunContext, config: Pass, exported: FloatModel) -> StateTimer | None:
    """Return how a pass that chooses by time measures it; None for any other, and where nothing is timed."""
    plan = run.plan
    if not (config.chooses_by_time or config.time_budget == "graph") or explain_untimed(plan.recipe) is not None:
        return None
    return make_timer(plan.recipe, run.cache.root, _make_timed_feeds(run, exported.inputs))


def _make_timed_feeds(run: RunContext, specs: tuple[TensorSpec, ...]) -> list[Feeds]:
    """Return the batches that the result will be timed on."""
    inputs, recipe = run.plan.inputs, run.plan.recipe
    speed = recipe.validate_.benchmark
    preprocessor = make_preprocessor(inputs.preprocess, specs, inputs.tokenizer)
    if inputs.facts.states:
        return Batches(run.sets["evaluation"], inputs, specs)[:MAX_FEEDS]
    view = encoding_views(recipe.model.task, run.sets["evaluation"].columns)[0]
    return make_feeds(preprocessor, view, fixed_batch(specs) or speed.batch_size, recipe.seed, speed.sequence_length)


def _list_training_fields(run: RunContext, specs: tuple[TensorSpec, ...], apart: bool = False) -> dict[str, Any]:
    """Return the fields of a TrainingContext beside a PassContext's, for a model with these inputs."""
    before = run.plan.before
    return {
        "train": _train_set(run, specs, apart),
        "teacher": (lambda: _load_torch(run)) if before.source == "torch" or before.rebuilt else None,
    }


def _train_set(run: RunContext, specs: tuple[TensorSpec, ...], apart: bool) -> EncodedSet | None:
    """Return the recipe's training set, encoded for the model; None without one."""
    samples, inputs = run.sets.get("train"), run.plan.inputs
    if samples is None:
        return None
    preprocessor = make_preprocessor(inputs.preprocess, specs, inputs.tokenizer)
    return make_encoded_set(samples, preprocessor, inputs.recipe.model.task, apart)


def _run_block_passes(
    run: RunContext, loaded: TorchModel | None, exported: FloatModel | None, after_pass: AfterPass
) -> tuple[StreamedModel | None, StreamedModel | None, list[PassResult[StreamedModel]]]:
    """Run the passes over blocks; return (the model before, after, results)."""
    plan, results = run.plan, []
    passes = list(_iter_stage(run, "blocks"))
    if not passes and not any(
        isinstance(export_config, CheckpointExport | GgufExport) for export_config in plan.recipe.export
    ):
        return None, None, []
    source = streamed = open_streamed(plan.inputs, loaded)
    for note in source.notes:
        run.run_log.log(note)
    fields = _list_fields(run, plan.before.inputs, plan.inputs.facts.reads_apart)
    allowed = find_nats_allowed(plan.recipe.validate_)
    context = BlockContext(**fields, writes_text=plan.recipe.model.decoder_only, nats_allowed=allowed)
    names = pass_names(plan.recipe.passes)
    for index, config, key in passes:
        with run.run_log.time_stage(names[index]):
            label = f"{plan.recipe.name}: passes.{index}"
            importance = read_importance(plan.inputs, config)[0] if config.importance_file else {}
            trials = _make_trials(run, loaded, exported, streamed)
            context = replace(context, trials=trials, importance=importance)
            results.append(run_block_pass(run.cache, key, label, config, streamed, context))
        streamed = results[-1].model
        after_pass(index, results[-1], partial(_export_after_pass, run, index, exported, loaded, source, streamed))
    return source, streamed, results


def _gather_imatrix(run: RunContext, streamed: StreamedModel | None) -> Imatrix | None:
    """Return what the model that the passes left reads of the calibration set; None where no file asks for it."""
    recipe, inputs = run.plan.recipe, run.plan.inputs
    if streamed is None or not any(isinstance(each, GgufExport) and each.imatrix for each in recipe.export):
        return None
    context = PassContext(**_list_fields(run, run.plan.before.inputs, inputs.facts.reads_apart))
    with run.run_log.time_stage("importance matrix"):
        return Imatrix(gather_squares(streamed, context), run.sets["calibration"].n)


def _make_trials(
    run: RunContext, loaded: TorchModel | None, exported: FloatModel | None, streamed: StreamedModel
) -> WeightTrials:
    """Return how a pass over blocks tries what schemes come to, in the file of what it works on."""
    plan = run.plan
    for export_config in plan.recipe.export:
        if isinstance(export_config, GgufExport) and plan.recipe.target_of(export_config) == plan.recipe.target:
            return make_gguf_trials(plan.inputs, streamed, export_config)
    if exported is None or stays_in_files(plan.recipe, plan.before):
        return make_weight_trials(plan.inputs, run.cache.root, None, list, run.run_log.log)

    def find_graph() -> GraphState:
        if loaded is None:
            return exported.state
        return _export_after_model_passes(run, exported, loaded)

    make_timed = partial(_make_timed_feeds, run, exported.inputs)
    return make_weight_trials(plan.inputs, run.cache.root, find_graph, make_timed, run.run_log.log)


def _export_module(run: RunContext, key: str, exported: FloatModel | None, loaded: TorchModel) -> GraphState:
    """Export what passes over the torch module left, as a graph, with what they rounded."""
    return with_rounded_layers(_export_floats(run, key, exported, loaded), loaded.rounded)


def _export_floats(run: RunContext, key: str, exported: FloatModel | None, loaded: TorchModel) -> GraphState:
    """Export the torch module, as a float graph: of an ONNX file, with its inputs and outputs.

    Where the passes have changed values alone, the graph of the model as it came is taken, with these values.
    """
    before = run.plan.before
    if before.source == "onnx":  # whose graph is another than the module's
        loaded, exported = replace(loaded, inputs=before.inputs, outputs=before.outputs), None
    return export(run, key, lambda: loaded, partial(_refill_module, run, exported, loaded)).state


def _refill_module(run: RunContext, exported: FloatModel | None, loaded: TorchModel) -> ir.Model | None:
    """Return the graph of the recipe's model with the values of what passes made of it; None: that is not sure."""
    if exported is None:
        return None
    before, after = (
        {plain(name): tensor.detach().cpu().float().numpy() for name, tensor in distinct(module).items()}
        for module in (_load_torch(run).module, loaded.module)
    )
    if before.keys() != after.keys():
        return None
    return refill(exported.state.model, list(before), before.__getitem__, after.__getitem__)


def _export_after_model_passes(run: RunContext, exported: FloatModel | None, loaded: TorchModel) -> GraphState:
    """Export what all passes over the torch module left, as a float graph."""
    last = max(index for index, _, _ in _iter_stage(run, "model"))
    return _export_floats(run, run.plan.keys.exports[last], exported, loaded)


def _export_after_pass(
    run: RunContext,
    index: int,
    exported: FloatModel | None,
    loaded: TorchModel | None,
    source: StreamedModel,
    streamed: StreamedModel,
) -> GraphState:
    """Export what the passes up to that of number `index` left, as a graph."""
    assert exported is not None
    return _export_blocks(run, run.plan.keys.exports[index], exported, loaded, source, streamed)[0]


def _export_blocks(
    run: RunContext,
    key: str,
    exported: FloatModel,
    loaded: TorchModel | None,
    source: StreamedModel | None,
    streamed: StreamedModel,
) -> tuple[GraphState, tuple[Note, ...]]:
    """Export what passes over blocks left, as a graph, with notes of what could not be taken over.

    Where they have only rounded, the graph of the model that they got serves: their integers take the layers' places.
    """
    rounded_alone = source is not None and streamed.store.same_floats(source.store)
    if rounded_alone and loaded is None:
        state = exported.state
    elif rounded_alone and loaded is not None:
        state = _export_after_model_passes(run, exported, loaded)
    elif stays_in_files(run.plan.recipe, run.plan.before):
        state = _export_in_files(run, key, streamed).state
    else:
        refilled = partial(_refill, exported.state.model, source if loaded is None else None, streamed)
        state = export(run, key, lambda: _build_module(run, streamed), refilled).state
    return with_integers(state, streamed)


def _refill(graph: ir.Model, source: StreamedModel | None, streamed: StreamedModel) -> ir.Model | None:
    """Return the graph, which was exported from `source`, with the other model's values; None: that is not sure."""
    if source is None or set(source.store.names()) != set(streamed.store.names()):
        return None
    before, after = (lambda name, store=model.store: store.read(name).numpy() for model in (source, streamed))
    return refill(graph, source.store.names(), before, after)


def _run_graph_passes(
    run: RunContext, state: GraphState, exported: FloatModel, baseline: Mapping[str, np.ndarray], after_pass: AfterPass
) -> tuple[GraphState, list[PassResult[GraphState]]]:
    inputs, evaluation = run.plan.inputs, run.sets["evaluation"]
    log, slices = run.run_log.log, evaluation.slices
    specs = specs_fed(state.model, exported.inputs)
    run_samples = graph_runner(inputs, specs, evaluation.columns, save_graph)
    context = GraphContext(
        **_list_fields(run, specs),
        **_list_training_fields(run, specs),
        shortfalls=shortfall_finder(inputs, evaluation.columns, baseline, run_samples, log, slices),
        score=score_finder(inputs, evaluation.columns, baseline, run_samples),
        write=make_writer(run.plan.recipe),
    )
    results: list[PassResult[GraphState]] = []
    names = pass_names(run.plan.recipe.passes)
    for index, config, key in _iter_stage(run, "graph"):
        context = replace(context, timing=_make_graph_timing(run, config, exported))
        run_pass = partial(run_graph_pass, run.cache, key, config, state)
        with run.run_log.time_stage(names[index]):
            results.append(
                _resume_pass(run, index, key, run_pass, context) if config.needs_train else run_pass(context)
            )
        state = results[-1].model
        after_pass(index, results[-1], partial(_return_state, state))
    return state, results


def _return_state(state: GraphState) -> GraphState:
    return state


def build_kept(run: RunContext, passed: Passed) -> TorchModel | None:
    """Return the torch module that a bundle is to keep; None where the recipe does not ask for it."""
    if not run.plan.recipe.keep_module:
        return None
    if passed.streamed is not None:
        built = _build_module(run, passed.streamed)
        return replace(built, shapes=passed.streamed.shapes)
    return passed.module or _load_torch(run)


def _build_module(run: RunContext, streamed: StreamedModel) -> TorchModel:
    """Build a whole module of what passes over blocks left, with dequantized weights, for the export."""
    plan = run.plan
    module = streamed.materialise()
    choose = getattr(getattr(module, "wrapped", None), "set_attn_implementation", None)
    if choose is not None:
        choose("eager")  # as a loaded model has it: the form that attention is recognized in
    return TorchModel(
        architecture=plan.before.architecture,
        inputs=plan.before.inputs,
        outputs=plan.before.outputs,
        module=module,
        parameters=streamed.parameters,
        folder=plan.inputs.source.folder,
        task=plan.recipe.model.task,
    )
