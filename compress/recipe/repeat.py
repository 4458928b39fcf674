"""A recipe with what one run of it settled written out: steps that a clock allowed, values that were left to `auto`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compress.passes import Pass
from compress.recipe.schema import Recipe


def repeat_training(recipe: Recipe, made: Mapping[str, int | Mapping[str, Any]]) -> Recipe:
    """Let passes that learn take the values that they found, and where a clock ended them the steps that they made.

    `made`: index of the pass -> its fields (the lock's `training`); of older bundles, its steps.
    """
    passes = tuple(_repeat_steps(pass_, made.get(str(number))) for number, pass_ in enumerate(recipe.passes))
    return recipe.model_copy(update={"passes": passes})


def _repeat_steps(pass_: Pass, made: int | Mapping[str, Any] | None) -> Pass:
    if made is None:
        return pass_
    fields = {"steps": made} if isinstance(made, int) else dict(made)
    fields |= {"epochs": None, "max_seconds": None} if "steps" in fields else {}
    return type(pass_).model_validate({**dict(pass_), **fields})
