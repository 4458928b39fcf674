"""From a recipe to a judged bundle, left to right."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.block_stage import open_streamed, torch_outputs_step
from compress.blocks.sharing import main_process
from compress.cache import StepCache, default_root
from compress.chain import Chain
from compress.context import PassContext, PassResult
from compress.data.samples import Samples, overlap
from compress.export.bundle import Contents, Graphs, assemble, note_rows
from compress.inputs import Batches, generation_of, load_set
from compress.journal import Journal
from compress.lock import make_lock
from compress.models.source import locate
from compress.output import explained, publish, reserved
from compress.passing import Ground, Passed, block_passes_alone, export, load, not_kept, run_passes
from compress.planner import Plan, make_plan
from compress.recipe import recipe_to_yaml
from compress.schema import Recipe
from compress.stages import FloatModel, baseline_step
from compress.step_rules import measures_steps, step_names
from compress.targets import TARGETS
from runtime.report import Report
from runtime.steps import StepModel
from runtime.validate import validate

LOG = "compress.log"


def apply_recipe(recipe: Recipe, out: Path, cache: Path | None = None, quiet: bool = False) -> Report | None:
    """Do what the recipe says, judge the bundle, write it to `out`. Steps that are in `cache` are not done again.

    The bundle appears under its name only when it is whole and judged, whatever the verdict; until then the one that
    was there stays. The log is `<out>/compress.log`, or `<out>.compress.log` when the run fails. Raises CompressError
    and runtime failures.
    """
    out, root = Path(out).resolve(), cache or default_root()
    if not main_process():
        _help(recipe, StepCache(root))
        return None
    with reserved(out) as staging:
        log_file = out.with_name(f"{out.name}.{LOG}")
        with explained(out):
            journal = Journal(log_file, quiet)
        with journal.failures():
            ground = _prepare(recipe, StepCache(root, journal.log), journal)
            with tempfile.TemporaryDirectory() as between:
                with explained(root):
                    steps = _build(ground, staging, Path(between))
                with explained(out):
                    report = _judge(staging, journal, steps)
            with explained(out):
                shutil.copyfile(log_file, staging / LOG)
                publish(staging, out)
                log_file.unlink()
    return report


def _help(recipe: Recipe, cache: StepCache) -> None:
    """What the further processes of a `torchrun` launch do: their share of the calibration; the first writes all."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / LOG, quiet=True)
        with journal.failures():
            block_passes_alone(_prepare(recipe, cache, journal))


def _prepare(recipe: Recipe, cache: StepCache, journal: Journal) -> Ground:
    """The plan and the data."""
    plan = make_plan(recipe, cache.root)
    for note in plan.notes:
        journal.log(note.text)
    with journal.step("loading data"):
        return Ground(plan, cache, journal, _load_sets(plan, journal))


def _judge(bundle: Path, journal: Journal, steps: Sequence[StepModel]) -> Report:
    with journal.step("judging"):
        report = validate(bundle, steps=steps)
    journal.log(f"verdict: {report.verdict}")
    return report


def _build(ground: Ground, staging: Path, between: Path) -> Sequence[StepModel]:
    """Run the steps and write the bundle into `staging`, and into `between` what lay between the passes: given back."""
    plan, journal = ground.plan, ground.journal
    inputs, recipe = plan.inputs, plan.recipe
    evaluation = ground.sets["evaluation"]
    exported, baseline, candidate = None, None, None
    if recipe.has_onnx:
        with journal.step("exporting to float ONNX"):
            exported = export(ground, plan.keys.float_graph, lambda: load(plan))
        with journal.step("baseline outputs"):
            baseline = baseline_step(ground.cache, plan.keys.baseline, exported, inputs, evaluation.columns)
    chain = None
    if exported is not None and measures_steps(recipe, plan.before):
        chain = Chain(plan, ground.cache, journal, between, evaluation.columns, exported)
    passed = run_passes(ground, exported, baseline or {}, chain.add if chain else not_kept)
    if baseline is None:
        with journal.step("scoring the model in torch"):
            baseline, candidate = _torch_outputs(ground, passed)
    with journal.step("writing the bundle"):
        _, notes = assemble(
            staging,
            Contents(
                recipe=recipe,
                recipe_yaml=recipe_to_yaml(recipe),
                lock=make_lock(inputs, plan.keys, ground.sets, exported.parity if exported else None),
                preprocess=inputs.preprocess,
                folder=inputs.folder,
                tokenizer=inputs.tokenizer,
                samples=evaluation.columns,
                baseline_outputs=baseline,
                layers=layer_rows(step_names(recipe.passes), passed.results),
                graphs=_graphs(exported, passed),
                streamed=passed.streamed,
                candidate_outputs=candidate,
                class_names=exported.class_names if exported else (),
                generation=generation_of(plan.inputs),
                cache=ground.cache.root,
                source_bytes=None if exported else _source_bytes(plan),
            ),
        )
    for note in notes:
        journal.log(note.text)
    return chain.steps if chain else ()


def _graphs(exported: FloatModel | None, passed: Passed) -> Graphs | None:
    if exported is None or passed.state is None:
        return None
    return Graphs(exported.state.model, passed.state, exported.inputs, exported.outputs)


def _source_bytes(plan: Plan) -> int:
    weights = locate(plan.recipe.model, plan.recipe.root).weights
    return sum(path.stat().st_size for path in weights)


def _torch_outputs(ground: Ground, passed: Passed) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Baseline's and candidate's outputs where no graph is written that the runtime could run."""
    plan = ground.plan
    assert passed.source is not None and passed.streamed is not None
    changed = any(one.stage_on(plan.before) == "model" for one in plan.recipe.passes)
    before = open_streamed(plan.inputs, None) if changed else passed.source
    context = PassContext(
        batches=Batches(ground.sets["evaluation"], plan.inputs, plan.before.inputs),
        target=TARGETS[plan.recipe.target],
        seed=plan.recipe.seed,
        log=ground.journal.log,
        progress=ground.journal.progress,
    )
    return torch_outputs_step(ground.cache, plan.keys.torch_outputs, before, passed.streamed, context)


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


def layer_rows(names: Sequence[str], results: Sequence[PassResult]) -> list[dict[str, Any]]:
    """One row for each layer: its last deciding pass, what was done and why, and what every pass measured of it.

    `names`: of the passes, as `step_names` gives them. What a pass measured under its own name ("distill: training
    loss") is a row of its own.
    """
    rows: dict[str, dict[str, Any]] = {}
    for step, result in zip(names, results, strict=True):
        for decision in result.decisions:
            row = rows.setdefault(decision.layer, {"layer": decision.layer, "type": decision.type, "action": "kept"})
            if decision.action != "kept" or row["action"] == "kept":
                row |= {"action": decision.action, "pass": step, "reason": decision.reason}
            row.setdefault("history", []).append(f"{step}: {decision.action} {decision.reason}".strip())
            row |= result.measured.get(decision.layer, {})
    for step, result in zip(names, results, strict=True):
        kind = step.partition(" ")[0]
        for name, numbers in result.measured.items():
            if name.startswith(f"{kind}: "):
                own = step + name.removeprefix(kind)
                rows[own] = {"layer": own, "type": "measured", "action": "measured", "pass": step, **numbers}
    return [*rows.values(), *note_rows([note for result in results for note in result.notes])]
