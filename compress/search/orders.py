"""What is said between a study and the processes that do its trials. No torch: the study itself needs none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from itertools import takewhile
from typing import Any, Literal

from compress.recipe.schema import Recipe

USUAL_WORK = "compress.search.trying:obey"
"""module:function that answers an order in the process that got it, both as JSON values."""


def find_work(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that `USUAL_WORK` or its like names."""
    module, _, function = name.partition(":")
    work: Callable[[dict[str, Any]], dict[str, Any]] = getattr(import_module(module), function)
    return work


@dataclass(frozen=True)
class Order:
    """What a process is told to do: `do` "build" or "judge" the bundle at `out`.

    "start": only what comes before the first pass that times something, so that the cache has it, and no bundle.
    `recipe`: the file with the explicit recipe, of which `share` is done. `seconds`: what is left of the budget.
    `refuse`: a build that is foreseen to take longer, or to leave a file far from a gate, is not begun. `notes`: of the
    build, for the report.
    """

    do: Literal["start", "build", "judge"]
    out: str
    recipe: str = ""
    cache: str | None = None
    share: float = 1.0
    racing: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    refuse: bool = True


@dataclass(frozen=True)
class Answer:
    """What came of an order. `state`: refused before any work, late (not begun: no time is left), failed, or done.

    `stop`: the failure is the disk's or the place's, which no other trial escapes. `report`: of a judgement, as JSON.
    """

    state: Literal["done", "refused", "late", "failed"]
    reason: str = ""
    seconds: float = 0.0
    host: str = ""
    notes: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    foreseen: dict[str, float] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    stop: bool = False


def keep_untimed(recipe: Recipe) -> Recipe:
    """Return the recipe with the passes before the first one that times something; all where none does."""
    before = takewhile(lambda pass_: not pass_.measures_time, recipe.passes)
    return recipe.model_copy(update={"passes": tuple(before)})
