"""`compress auto`: a model, data and a goal become a recipe that says them, and the study that reaches it."""

from __future__ import annotations

from pathlib import Path

from compress.commands.new import NewAnswers, make_draft
from compress.errors import RecipeError
from compress.search.pursue import pursue
from compress.search.study import Study


def reach_goal(
    said: NewAnswers,
    out: Path,
    budget_s: float | None,
    cache: Path | None,
    quiet: bool = False,
    keep_module: bool = False,
) -> Study:
    """Draft the recipe, which the study in `out` keeps as goal.yaml, and pursue its goal; errors of both.

    `keep_module`: as in a recipe, of a model that is torch's.
    """
    draft = make_draft(said, Path())
    if draft.inputs is None:
        raise RecipeError("a goal is judged on samples: give --data, or --train and --evaluation")
    recipe = draft.make_recipe(Path(), keep_module=keep_module and draft.inputs.facts.source == "torch")
    return pursue(recipe, out, cache, budget_s=budget_s, quiet=quiet)
