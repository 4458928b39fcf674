"""`compress auto`: a model, data and a goal become a recipe that says them, and the study that reaches it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compress.planning.draft import draft_recipe
from compress.recipe.goal import split_goal
from compress.recipe.schema import Recipe
from compress.search.pursue import pursue
from compress.search.study import Study


def draft_goal(source: str, goal: str, **given: Any) -> Recipe:
    """Return a recipe of a model, its data and a goal. `given`: as `draft_recipe` takes them. Raises what it raises."""
    draft = draft_recipe(source, **given)
    return draft.make_recipe(Path(), goal=split_goal(goal))


def reach_goal(
    source: str, goal: str, out: Path, *, budget_s: float, cache: Path | None = None, quiet: bool = False, **given: Any
) -> Study:
    """Draft the recipe, which the study in `out` keeps as goal.yaml, and pursue its goal; see `pursue`."""
    return pursue(draft_goal(source, goal, **given), out, cache, budget_s=budget_s, quiet=quiet)
