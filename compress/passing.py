"""A recipe's passes, run in their stages: the torch module, its blocks, the graph that is exported from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from compress.block_stage import block_pass_step, open_streamed, shared_work
from compress.blocks.sharing import from_main, share
from compress.blocks.streamed import StreamedModel
from compress.cache import StepCache, step_key
from compress.context import PassContext, PassResult
from compress.data.samples import Samples
from compress.data.training import EncodedSet, encoded_set
from compress.export.integers import with_integers, with_rounded_layers
from compress.export.onnx import save_graph
from compress.exports import CheckpointExport
from compress.facts import Note
from compress.inputs import Batches
from compress.journal import Journal
from compress.models.load import LoadedModel, load_model
from compress.models.students import make_student
from compress.passes import Pass
from compress.passes.base import Stage
from compress.planner import Plan
from compress.quality import shortfall_finder
from compress.quantize.state import GraphState
from compress.stages import FloatModel, float_model, model_pass_step, pass_step
from compress.targets import TARGETS
from compress.timing import module_timer
from runtime.manifest import TensorSpec
from runtime.preprocess import make_preprocessor
from runtime.records import to_json


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
    """What passes left is not looked at."""


def run_passes(
    ground: Ground, exported: FloatModel | None, baseline: Mapping[str, np.ndarray], left: Left = not_kept
) -> Passed:
    """Model passes, block passes, the export between, graph passes. `exported`: the float model, if ONNX is written.

    `left` is told after each pass what it left.
    """
    loaded, modelled = _model_passes(ground, left)
    source, streamed, blocked = _block_passes(ground, loaded, exported, left)
    state = None if exported is None else exported.state
    if exported is not None and streamed is not None and blocked:
        state, notes = _block_graph(ground, ground.plan.keys.passed_graph, exported, loaded, source, streamed)
        blocked[-1] = replace(blocked[-1], notes=(*blocked[-1].notes, *notes))
    elif exported is not None and loaded is not None:
        state = _model_graph(ground, ground.plan.keys.passed_graph, loaded)
    graphed: list[PassResult] = []
    if state is not None and exported is not None:
        state, graphed = _graph_passes(ground, state, exported, baseline, left)
    results = (*modelled, *blocked, *graphed)
    for note in (note for result in results for note in result.notes):
        ground.journal.log(note.text)
    return Passed(results, state, source, streamed)


def block_passes_alone(ground: Ground) -> None:
    """What a further process of one launch does: its share of the calibration data, or of training; no file.

    Where a pass over the graph trains, it takes part in all that comes before, too.
    """
    if any(one.needs_train for _, one, _ in _staged(ground, "graph")):
        run_passes(ground, export(ground, ground.plan.keys.float_graph, lambda: load(ground.plan)), {})
        return
    loaded, _ = _model_passes(ground, not_kept)
    _block_passes(ground, loaded, None, not_kept)


def export(ground: Ground, key: str, load: Callable[[], LoadedModel]) -> FloatModel:
    """The model as a float graph, with parity checked on calibration samples (evaluation samples without a set)."""
    plan = ground.plan
    samples = ground.sets.get("calibration", ground.sets["evaluation"])
    return float_model(ground.cache, key, load, lambda specs: Batches(samples, plan.inputs, specs), plan.recipe.opset)


def load(plan: Plan) -> LoadedModel:
    """The recipe's model with its weights."""
    return load_model(plan.recipe.model, plan.recipe.root, plan.inputs.feeds)


def _staged(ground: Ground, stage: Stage) -> Iterator[tuple[int, Pass, str]]:
    """(number, pass, key) of the passes of one stage."""
    plan = ground.plan
    for index, (one, key) in enumerate(zip(plan.recipe.passes, plan.keys.passes, strict=True)):
        if one.stage_on(plan.before) == stage:
            yield index, one, key


def _context(ground: Ground, specs: Any, **more: Any) -> PassContext:
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


def _model_passes(ground: Ground, left: Left) -> tuple[LoadedModel | None, list[PassResult]]:
    loaded, results = None, []
    for index, one, key in _staged(ground, "model"):
        loaded = loaded or load(ground.plan)
        context = _context(ground, loaded.inputs, **_lessons(ground, loaded.inputs), **_timing(ground, loaded))
        make = partial(make_student, ground.plan.recipe, ground.plan.inputs.feeds, loaded)
        context = replace(context, student=make)
        step = partial(model_pass_step, ground.cache, key, one, loaded)
        with ground.journal.step(one.kind):
            results.append(_taken_up(ground, index, key, step, context))
        loaded = results[-1].model
        left(index, results[-1], partial(_model_graph, ground, ground.plan.keys.exports[index], loaded))
    return loaded, results


def _taken_up(
    ground: Ground, index: int, key: str, step: Callable[[PassContext], PassResult], context: PassContext
) -> PassResult:
    """The result of the pass of that number. What a killed run had done of it lies under `key`, and is gone on from.

    Several processes do the same work together; what the first one finds in the cache counts for all.
    """
    if from_main(ground.cache.get(key) is not None if share().rank == 0 else None):
        return step(context)
    with shared_work(ground.cache, key, f"{ground.plan.recipe.name}: passes.{index}") as work:
        return step(replace(context, work=work))


def _timing(ground: Ground, loaded: LoadedModel) -> dict[str, Any]:
    """What a pass measures with."""
    recipe = ground.plan.recipe
    samples = ground.sets.get("calibration", ground.sets["evaluation"])
    folder = ground.cache.root / "measured"
    return {
        "time_modules": module_timer(recipe, loaded, Batches(samples, ground.plan.inputs, loaded.inputs)),
        "threads": recipe.validate_.benchmark.threads,
        "measurements": lambda key: folder / f"{step_key('measured', to_json(key))}.json",
    }


def _lessons(ground: Ground, specs: tuple[TensorSpec, ...]) -> dict[str, Any]:
    """What a pass learns from: the training set, encoded for the model's inputs, and the model as it came."""
    source_is_torch = ground.plan.before.source == "torch"
    return {
        "train": _train_set(ground, specs),
        "teacher": (lambda: load(ground.plan)) if source_is_torch else None,
    }


def _train_set(ground: Ground, specs: tuple[TensorSpec, ...]) -> EncodedSet | None:
    """The recipe's training set, encoded for the model."""
    samples, inputs = ground.sets.get("train"), ground.plan.inputs
    if samples is None:
        return None
    preprocessor = make_preprocessor(inputs.preprocess, specs, inputs.tokenizer)
    return encoded_set(samples, preprocessor, inputs.recipe.model.task)


def _block_passes(
    ground: Ground, loaded: LoadedModel | None, exported: FloatModel | None, left: Left
) -> tuple[StreamedModel | None, StreamedModel | None, list[PassResult]]:
    """(the model before, after, results)."""
    plan, results = ground.plan, []
    steps = list(_staged(ground, "blocks"))
    if not steps and not any(isinstance(one, CheckpointExport) for one in plan.recipe.export):
        return None, None, []
    source = streamed = open_streamed(plan.inputs, loaded)
    for note in source.notes:
        ground.journal.log(note)
    context = _context(ground, plan.before.inputs)
    for index, one, key in steps:
        with ground.journal.step(one.kind):
            label = f"{plan.recipe.name}: passes.{index}"
            results.append(block_pass_step(ground.cache, key, label, one, streamed, context))
        streamed = results[-1].model
        left(index, results[-1], partial(_block_state, ground, index, exported, loaded, source, streamed))
    return source, streamed, results


def _model_graph(ground: Ground, key: str, loaded: LoadedModel) -> GraphState:
    """What passes over the torch module left, as a graph."""
    return with_rounded_layers(export(ground, key, lambda: loaded).state, loaded.rounded)


def _block_state(
    ground: Ground,
    index: int,
    exported: FloatModel | None,
    loaded: LoadedModel | None,
    source: StreamedModel,
    streamed: StreamedModel,
) -> GraphState:
    """What the passes up to that of number `index` left."""
    assert exported is not None
    return _block_graph(ground, ground.plan.keys.exports[index], exported, loaded, source, streamed)[0]


def _block_graph(
    ground: Ground,
    key: str,
    exported: FloatModel,
    loaded: LoadedModel | None,
    source: StreamedModel | None,
    streamed: StreamedModel,
) -> tuple[GraphState, tuple[Note, ...]]:
    """What passes over blocks left, as a graph, and what could not be taken over.

    Where they have only rounded, the float model's graph serves: its integers take their layers' places.
    """
    state = exported.state
    if loaded is not None or source is None or not streamed.store.same_floats(source.store):
        state = export(ground, key, lambda: _as_loaded(ground, streamed)).state
    return with_integers(state, streamed)


def _graph_passes(
    ground: Ground, state: GraphState, exported: FloatModel, baseline: Mapping[str, np.ndarray], left: Left
) -> tuple[GraphState, list[PassResult]]:
    inputs, evaluation = ground.plan.inputs, ground.sets["evaluation"]
    finder = shortfall_finder(inputs, exported.inputs, evaluation.columns, baseline, save_graph, ground.journal.log)
    context = _context(ground, exported.inputs, shortfalls=finder, **_lessons(ground, exported.inputs))
    results: list[PassResult] = []
    for index, one, key in _staged(ground, "graph"):
        step = partial(pass_step, ground.cache, key, one, state)
        with ground.journal.step(one.kind):
            results.append(_taken_up(ground, index, key, step, context) if one.needs_train else step(context))
        state = results[-1].model
        left(index, results[-1], partial(_same, state))
    return state, results


def _same(state: GraphState) -> GraphState:
    return state


def _as_loaded(ground: Ground, streamed: StreamedModel) -> LoadedModel:
    """What passes over blocks left, as a whole module with dequantized weights, for the export."""
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
