"""A recipe's passes, run in their stages: the torch module, its blocks, the graph that is exported from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from compress.blocks.sharing import from_main, share
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.data.samples import Samples
from compress.data.training import EncodedSet, make_encoded_set
from compress.errors import SourceError
from compress.execution.blocks import block_pass_step, hold_shared_work, open_streamed
from compress.execution.cached import FloatModel, float_model, model_pass_step, pass_step
from compress.execution.measurements import module_timer
from compress.execution.quality import shortfall_finder
from compress.export.onnx import save_graph, with_integers, with_rounded_layers
from compress.facts import Note
from compress.formats.targets import TARGETS
from compress.models.load import LoadedModel, load_model
from compress.passes import Pass
from compress.passes.base import Stage
from compress.planning.inputs import Batches, make_student
from compress.planning.plan import Plan
from compress.quantize.state import GraphState
from compress.recipe.exports import CheckpointExport
from compress.store.cache import StepCache, step_key
from compress.store.durable import blame
from compress.store.run_log import Journal
from runtime.bundle.records import to_json
from runtime.bundle.tensors import TensorSpec
from runtime.encode.preprocess import make_preprocessor


@dataclass(frozen=True)
class Ground:
    """What every step of one run stands on."""

    plan: Plan
    cache: StepCache
    journal: Journal
    sets: dict[str, Samples]


@dataclass(frozen=True)
class Passed:
    """What the passes left. `results`: one for each pass.

    `state`: the graph and the decisions about it; None where no ONNX file is written. `source` and `streamed`: the
    torch model before and after the passes over blocks; None where there is neither such a pass nor a checkpoint.
    """

    results: tuple[PassResult, ...]
    state: GraphState | None
    source: StreamedModel | None
    streamed: StreamedModel | None


Left = Callable[[int, PassResult, Callable[[], GraphState]], None]
"""(number of a pass, its result, what gives the graph that it left)."""


def not_kept(index: int, result: PassResult, graph: Callable[[], GraphState]) -> None:
    """Ignore what a pass left."""


def run_passes(
    ground: Ground, exported: FloatModel | None, baseline: Mapping[str, np.ndarray], left: Left = not_kept
) -> Passed:
    """Run model passes, block passes, the export between, graph passes.

    `exported`: the float model, if ONNX is written.

    `left` is told after each pass what it left.
    """
    loaded, modelled = _run_model_passes(ground, left)
    source, streamed, blocked = _run_block_passes(ground, loaded, exported, left)
    state = None if exported is None else exported.state
    if exported is not None and streamed is not None and blocked:
        state, notes = _export_blocks(ground, ground.plan.keys.passed_graph, exported, loaded, source, streamed)
        blocked[-1] = replace(blocked[-1], notes=(*blocked[-1].notes, *notes))
    elif exported is not None and loaded is not None:
        state = _export_module(ground, ground.plan.keys.passed_graph, loaded)
    graphed: list[PassResult] = []
    if state is not None and exported is not None:
        state, graphed = _run_graph_passes(ground, state, exported, baseline, left)
    results = (*modelled, *blocked, *graphed)
    for note in (note for result in results for note in result.notes):
        ground.journal.log(note.text)
    return Passed(results, state, source, streamed)


def block_passes_alone(ground: Ground) -> None:
    """Do a further process's share of one launch: of the calibration data, or of training; write no file.

    Where a pass over the graph trains, it takes part in all that comes before, too.
    """
    if any(config.needs_train for _, config, _ in _iter_stage(ground, "graph")):
        run_passes(ground, export(ground, ground.plan.keys.float_graph, lambda: load(ground.plan)), {})
        return
    loaded, _ = _run_model_passes(ground, not_kept)
    _run_block_passes(ground, loaded, None, not_kept)


def export(ground: Ground, key: str, load: Callable[[], LoadedModel]) -> FloatModel:
    """Export the model as a float graph; check parity on calibration samples (evaluation samples without a set)."""
    plan = ground.plan
    samples = ground.sets.get("calibration", ground.sets["evaluation"])
    return float_model(ground.cache, key, load, lambda specs: Batches(samples, plan.inputs, specs), plan.recipe.opset)


def load(plan: Plan) -> LoadedModel:
    """Load the recipe's model with its weights."""
    with blame(plan.recipe.root, SourceError):
        return load_model(plan.recipe.model, plan.recipe.root, plan.inputs.feeds)


def _iter_stage(ground: Ground, stage: Stage) -> Iterator[tuple[int, Pass, str]]:
    """Yield (number, pass, key) of the passes of one stage."""
    plan = ground.plan
    for index, (config, key) in enumerate(zip(plan.recipe.passes, plan.keys.passes, strict=True)):
        if config.stage_on(plan.before) == stage:
            yield index, config, key


def _make_context(ground: Ground, specs: Any, **more: Any) -> PassContext:
    plan, calibration = ground.plan, ground.sets.get("calibration")
    return PassContext(
        batches=Batches(calibration, plan.inputs, specs) if calibration is not None else (),
        target=TARGETS[plan.recipe.target],
        seed=plan.recipe.seed,
        log=ground.journal.log,
        progress=ground.journal.progress,
        memory_mib=None if plan.recipe.limits.memory_gib is None else 1024 * plan.recipe.limits.memory_gib,
        **more,
    )


def _run_model_passes(ground: Ground, left: Left) -> tuple[LoadedModel | None, list[PassResult]]:
    loaded, results = None, []
    for index, config, key in _iter_stage(ground, "model"):
        loaded = loaded or load(ground.plan)
        context = _make_context(
            ground, loaded.inputs, **_training_arguments(ground, loaded.inputs), **_measuring_arguments(ground, loaded)
        )
        make = partial(make_student, ground.plan.recipe, ground.plan.inputs.feeds, loaded)
        context = replace(context, student=make)
        step = partial(model_pass_step, ground.cache, key, config, loaded)
        with ground.journal.step(config.kind):
            results.append(_resume_pass(ground, index, key, step, context))
        loaded = results[-1].model
        left(index, results[-1], partial(_export_module, ground, ground.plan.keys.exports[index], loaded))
    return loaded, results


def _resume_pass(
    ground: Ground, index: int, key: str, step: Callable[[PassContext], PassResult], context: PassContext
) -> PassResult:
    """Run the pass of that number. What a killed run had done of it lies under `key`, and is continued.

    Several processes do the same work together; what the first one finds in the cache counts for all.
    """
    if from_main(ground.cache.get(key) is not None if share().rank == 0 else None):
        return step(context)
    with hold_shared_work(ground.cache, key, f"{ground.plan.recipe.name}: passes.{index}") as work:
        return step(replace(context, work=work))


def _measuring_arguments(ground: Ground, loaded: LoadedModel) -> dict[str, Any]:
    """Return the arguments of a PassContext that a pass measures with."""
    recipe = ground.plan.recipe
    samples = ground.sets.get("calibration", ground.sets["evaluation"])
    folder = ground.cache.root / "measured"
    return {
        "time_modules": module_timer(recipe, loaded, Batches(samples, ground.plan.inputs, loaded.inputs)),
        "threads": recipe.validate_.benchmark.threads,
        "measurements": lambda key: folder / f"{step_key('measured', to_json(key))}.json",
    }


def _training_arguments(ground: Ground, specs: tuple[TensorSpec, ...]) -> dict[str, Any]:
    """Return the arguments of a PassContext that a pass learns from.

    They are the training set, encoded for the model's inputs, and the model as it came.
    """
    source_is_torch = ground.plan.before.source == "torch"
    return {
        "train": _train_set(ground, specs),
        "teacher": (lambda: load(ground.plan)) if source_is_torch else None,
    }


def _train_set(ground: Ground, specs: tuple[TensorSpec, ...]) -> EncodedSet | None:
    """Return the recipe's training set, encoded for the model; None without one."""
    samples, inputs = ground.sets.get("train"), ground.plan.inputs
    if samples is None:
        return None
    preprocessor = make_preprocessor(inputs.preprocess, specs, inputs.tokenizer)
    return make_encoded_set(samples, preprocessor, inputs.recipe.model.task)


def _run_block_passes(
    ground: Ground, loaded: LoadedModel | None, exported: FloatModel | None, left: Left
) -> tuple[StreamedModel | None, StreamedModel | None, list[PassResult]]:
    """Run the passes over blocks; return (the model before, after, results)."""
    plan, results = ground.plan, []
    steps = list(_iter_stage(ground, "blocks"))
    if not steps and not any(isinstance(export_config, CheckpointExport) for export_config in plan.recipe.export):
        return None, None, []
    source = streamed = open_streamed(plan.inputs, loaded)
    for note in source.notes:
        ground.journal.log(note)
    context = _make_context(ground, plan.before.inputs)
    for index, config, key in steps:
        with ground.journal.step(config.kind):
            label = f"{plan.recipe.name}: passes.{index}"
            results.append(block_pass_step(ground.cache, key, label, config, streamed, context))
        streamed = results[-1].model
        left(index, results[-1], partial(_export_after_pass, ground, index, exported, loaded, source, streamed))
    return source, streamed, results


def _export_module(ground: Ground, key: str, loaded: LoadedModel) -> GraphState:
    """Export what passes over the torch module left, as a graph."""
    return with_rounded_layers(export(ground, key, lambda: loaded).state, loaded.rounded)


def _export_after_pass(
    ground: Ground,
    index: int,
    exported: FloatModel | None,
    loaded: LoadedModel | None,
    source: StreamedModel,
    streamed: StreamedModel,
) -> GraphState:
    """Export what the passes up to that of number `index` left, as a graph."""
    assert exported is not None
    return _export_blocks(ground, ground.plan.keys.exports[index], exported, loaded, source, streamed)[0]


def _export_blocks(
    ground: Ground,
    key: str,
    exported: FloatModel,
    loaded: LoadedModel | None,
    source: StreamedModel | None,
    streamed: StreamedModel,
) -> tuple[GraphState, tuple[Note, ...]]:
    """Export what passes over blocks left, as a graph, with notes of what could not be taken over.

    Where they have only rounded, the float model's graph serves: its integers take their layers' places.
    """
    state = exported.state
    if loaded is not None or source is None or not streamed.store.same_floats(source.store):
        state = export(ground, key, lambda: _build_module(ground, streamed)).state
    return with_integers(state, streamed)


def _run_graph_passes(
    ground: Ground, state: GraphState, exported: FloatModel, baseline: Mapping[str, np.ndarray], left: Left
) -> tuple[GraphState, list[PassResult]]:
    inputs, evaluation = ground.plan.inputs, ground.sets["evaluation"]
    finder = shortfall_finder(inputs, exported.inputs, evaluation.columns, baseline, save_graph, ground.journal.log)
    context = _make_context(ground, exported.inputs, shortfalls=finder, **_training_arguments(ground, exported.inputs))
    results: list[PassResult] = []
    for index, config, key in _iter_stage(ground, "graph"):
        step = partial(pass_step, ground.cache, key, config, state)
        with ground.journal.step(config.kind):
            results.append(_resume_pass(ground, index, key, step, context) if config.needs_train else step(context))
        state = results[-1].model
        left(index, results[-1], partial(_return_state, state))
    return state, results


def _return_state(state: GraphState) -> GraphState:
    return state


def _build_module(ground: Ground, streamed: StreamedModel) -> LoadedModel:
    """Build a whole module of what passes over blocks left, with dequantized weights, for the export."""
    plan = ground.plan
    module = streamed.materialise()
    choose = getattr(getattr(module, "wrapped", None), "set_attn_implementation", None)
    if choose is not None:
        choose("eager")  # as a loaded model has it: the form that attention is recognized in
    return LoadedModel(
        kind="torch",
        architecture=plan.before.architecture,
        inputs=plan.before.inputs,
        outputs=plan.before.outputs,
        module=module,
        parameters=streamed.parameters,
        folder=plan.inputs.folder,
        task=plan.recipe.model.task,
    )
