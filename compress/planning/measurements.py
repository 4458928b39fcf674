"""Whether what each pass leaves is measured on the way, and what a plan says of it."""

from __future__ import annotations

from collections.abc import Sequence

from compress.facts import ModelFacts, Note
from compress.passes import Pass
from compress.planning.judging import explain_not_run
from compress.recipe.exports import GraphExport
from compress.recipe.schema import Recipe
from runtime.words import size_text

LARGEST_BYTES = 512 * 2**20
"""Of a float model's weights: what lies between its passes is exported, scored and timed without being asked for."""


def n_between(recipe: Recipe, facts: ModelFacts) -> int:
    """Count the models between the float one and the candidate that are measured, too. `facts`: of the float model."""
    wanted = recipe.validate_.steps
    if wanted is False or not recipe.passes or not _runs_here(recipe):
        return 0
    return len(recipe.passes) - 1 if wanted is True or facts.n_bytes <= LARGEST_BYTES else 0


def measures_passes(recipe: Recipe, facts: ModelFacts) -> bool:
    """Return whether the report will have a row for each pass."""
    return n_between(recipe, facts) > 0 or (recipe.validate_.steps is True and len(recipe.passes) == 1)


def pass_names(passes: Sequence[Pass]) -> list[str]:
    """Return each pass's name in a report: its kind, from the second of a kind on with a number ("distill 2")."""
    kinds = [pass_.kind for pass_ in passes]
    counts = [kinds[: index + 1].count(kind) for index, kind in enumerate(kinds)]
    return [kind if count == 1 else f"{kind} {count}" for kind, count in zip(kinds, counts, strict=True)]


def measurement_problems(recipe: Recipe) -> list[str]:
    """Return why passes cannot be measured though the recipe asks for it."""
    if recipe.validate_.steps is not True or _runs_here(recipe):
        return []
    return [
        f"validate.steps: true measures what each pass leaves as an ONNX graph, and target {recipe.target} gets "
        "what nothing here runs; use auto, or export {kind: onnx} for onnxruntime-cpu"
    ]


def measurement_note(recipe: Recipe, facts: ModelFacts, n_samples: int) -> Note | None:
    """Return what the plan says of measuring each pass; None: nothing. `n_samples`: of the evaluation set."""
    n = n_between(recipe, facts)
    names = ", ".join(pass_.kind for pass_ in recipe.passes[:-1])
    if n:
        text = f"validate: the model is measured after {names}, too, on {n_samples} samples (`steps: false` skips that)"
        return Note("info", text)
    if recipe.validate_.steps == "auto" and len(recipe.passes) > 1 and _runs_here(recipe):
        why = f"the model has {size_text(facts.n_bytes)} of weights, more than {size_text(LARGEST_BYTES)}"
        return Note("info", f"validate: the model is not measured after {names}, as {why} (`steps: true` does that)")
    return None


def _runs_here(recipe: Recipe) -> bool:
    """Return whether the candidate is an ONNX file, which the runtime can run and time."""
    return explain_not_run(recipe) is None and any(
        isinstance(export, GraphExport) and recipe.target_of(export) == recipe.target for export in recipe.export
    )
