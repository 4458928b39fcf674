"""From a recipe to a judged bundle, left to right."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.cache import StepCache, default_root
from compress.data.samples import Samples, overlap
from compress.export.bundle import Contents, assemble
from compress.export.onnx import save_graph
from compress.facts import Note
from compress.inputs import Batches, load_set
from compress.journal import Journal
from compress.lock import make_lock
from compress.models.load import LoadedModel, load_model
from compress.output import explained, publish, reserved
from compress.passes.context import PassContext, PassResult
from compress.planner import Plan, make_plan
from compress.quality import shortfall_finder
from compress.quantize.state import GraphState
from compress.recipe import recipe_to_yaml
from compress.schema import Recipe
from compress.stages import FloatModel, baseline_step, float_model, model_pass_step, pass_step
from compress.targets import TARGETS
from runtime.report import Report
from runtime.validate import validate

LOG = "compress.log"


@dataclass(frozen=True)
class Ground:
    """What every step of one run stands on."""

    plan: Plan
    cache: StepCache
    journal: Journal
    sets: dict[str, Samples]


def apply_recipe(recipe: Recipe, out: Path, cache: Path | None = None, quiet: bool = False) -> Report:
    """Do what the recipe says, judge the bundle, write it to `out`. Steps that are in `cache` are not done again.

    The bundle appears under its name only when it is whole and judged, whatever the verdict; until then the one that
    was there stays. The log is `<out>/compress.log`, or `<out>.compress.log` when the run fails. Raises CompressError
    and runtime failures.
    """
    out, root = Path(out).resolve(), cache or default_root()
    with reserved(out) as staging:
        log_file = out.with_name(f"{out.name}.{LOG}")
        with explained(out):
            journal = Journal(log_file, quiet)
        with journal.failures():
            ground = _prepare(recipe, StepCache(root, journal.log), journal)
            with explained(root):
                _build(ground, staging)
            with explained(out):
                report = _judge(staging, journal)
                shutil.copyfile(log_file, staging / LOG)
                publish(staging, out)
                log_file.unlink()
    return report


def _prepare(recipe: Recipe, cache: StepCache, journal: Journal) -> Ground:
    """The plan and the data."""
    plan = make_plan(recipe, cache.root)
    for note in plan.notes:
        journal.log(note.text)
    with journal.step("loading data"):
        return Ground(plan, cache, journal, _load_sets(plan, journal))


def _judge(bundle: Path, journal: Journal) -> Report:
    with journal.step("judging"):
        report = validate(bundle)
    journal.log(f"verdict: {report.verdict}")
    return report


def _build(ground: Ground, staging: Path) -> None:
    """Run the steps and write the bundle into `staging`."""
    plan, journal, cache = ground.plan, ground.journal, ground.cache
    inputs, recipe = plan.inputs, plan.recipe
    evaluation = ground.sets["evaluation"]
    with journal.step("exporting to float ONNX"):
        model = _export(ground, plan.keys.float_graph, lambda: _load(plan))
    with journal.step("baseline outputs"):
        baseline = baseline_step(cache, plan.keys.baseline, model, inputs, evaluation.columns)
    state, results = _run_passes(ground, model, baseline)
    with journal.step("writing the bundle"):
        assemble(
            staging,
            Contents(
                recipe=recipe,
                recipe_yaml=recipe_to_yaml(recipe),
                lock=make_lock(inputs, plan.keys, ground.sets, model.parity),
                float_model=model.state.model,
                state=state,
                preprocess=inputs.preprocess,
                inputs=model.inputs,
                outputs=model.outputs,
                folder=inputs.folder,
                class_names=model.class_names,
                samples=evaluation.columns,
                baseline_outputs=baseline,
                layers=layer_rows([one.kind for one in recipe.passes], results),
            ),
        )


def _run_passes(ground: Ground, model: FloatModel, baseline: dict[str, Any]) -> tuple[GraphState, list[PassResult]]:
    """Model passes on the torch module, the export between, graph passes on what was exported."""
    plan, journal = ground.plan, ground.journal
    evaluation, calibration = ground.sets["evaluation"], ground.sets.get("calibration")
    context = PassContext(
        batches=Batches(calibration, plan.inputs, model.inputs) if calibration is not None else (),
        target=TARGETS[plan.recipe.target],
        seed=plan.recipe.seed,
        log=journal.log,
        progress=journal.progress,
        shortfalls=shortfall_finder(plan.inputs, model.inputs, evaluation.columns, baseline, save_graph, journal.log),
    )
    results: list[PassResult] = []
    loaded = None
    steps = list(zip(plan.recipe.passes, plan.keys.passes, strict=True))
    for one, key in ((one, key) for one, key in steps if one.stage == "model"):
        loaded = loaded or _load(plan)
        with journal.step(one.kind):
            results.append(model_pass_step(ground.cache, key, one, loaded, context))
        loaded = results[-1].model
    state = model.state if loaded is None else _export(ground, plan.keys.passed_graph, lambda: loaded).state
    for one, key in ((one, key) for one, key in steps if one.stage == "graph"):
        with journal.step(one.kind):
            results.append(pass_step(ground.cache, key, one, state, context))
        state = results[-1].model
    for note in (note for result in results for note in result.notes):
        journal.log(note.text)
    return state, results


def _load(plan: Plan) -> LoadedModel:
    return load_model(plan.recipe.model, plan.recipe.root, plan.inputs.feeds)


def _export(ground: Ground, key: str, load: Callable[[], LoadedModel]) -> FloatModel:
    """The model as a float graph, with parity checked on calibration samples (evaluation samples without a set)."""
    plan = ground.plan
    samples = ground.sets.get("calibration", ground.sets["evaluation"])
    return float_model(
        ground.cache, key, load, lambda specs: Batches(samples, plan.inputs, specs), plan.recipe.export[0].opset
    )


def _load_sets(plan: Plan, journal: Journal) -> dict[str, Samples]:
    """The named sets, checked against the model's number of classes; says where calibration and evaluation overlap."""
    task, outputs = plan.recipe.model.task, plan.before.outputs
    width = outputs[0].shape[-1] if outputs and outputs[0].shape else None
    n_classes = width if task.endswith("classification") and isinstance(width, int) else None
    sets = {name: load_set(plan.inputs, name, n_classes) for name in plan.inputs.data}
    shared = overlap(sets["calibration"], sets["evaluation"]) if "calibration" in sets else 0
    if shared:
        of = f"{shared} of {sets['evaluation'].n} evaluation samples"
        journal.log(f"data: {of} are also calibration samples; the verdict is optimistic")
    return sets


def layer_rows(kinds: Sequence[str], results: Sequence[PassResult]) -> list[dict[str, Any]]:
    """One row for each layer: its last deciding pass, what was done and why, and what every pass measured of it."""
    rows: dict[str, dict[str, Any]] = {}
    for kind, result in zip(kinds, results, strict=True):
        for decision in result.decisions:
            row = rows.setdefault(decision.layer, {"layer": decision.layer, "type": decision.type, "action": "kept"})
            if decision.action != "kept" or row["action"] == "kept":
                row |= {"action": decision.action, "pass": kind, "reason": decision.reason}
            row.setdefault("history", []).append(f"{kind}: {decision.action} {decision.reason}".strip())
            row |= result.measured.get(decision.layer, {})
    return [*rows.values(), *_note_rows(results)]


def _note_rows(results: Sequence[PassResult]) -> list[dict[str, Any]]:
    notes: list[Note] = [note for result in results for note in result.notes]
    return [{"layer": "", "type": "note", "action": note.level, "reason": note.text} for note in notes]
