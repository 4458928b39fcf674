"""What a process of `compress bench` does for a row: builds its bundle and measures it, or finds why it is slow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.commands.bench_measure import find_cause, measure_bundle
from compress.errors import CompressError
from compress.execution.run import build_recipe
from compress.planning.forecast import JUDGING, START
from compress.planning.make_plan import make_plan
from compress.planning.plan import Plan
from compress.recipe.load import load_recipe
from compress.search.orders import Answer, Order
from compress.search.trying import answer
from runtime.bundle.records import from_json
from runtime.errors import RuntimeFailure

WORK = "compress.commands.bench_work:obey"


@dataclass(frozen=True)
class RowOrder(Order):
    """`do` "build": build the bundle and measure it; "judge": find why the bundle that is there is slow.

    `seconds`: what is left; a row that is foreseen to take longer is not begun. `gates`: what its quality is held to.
    `measuring_s`: what measuring took of rows like it.
    """

    backend: str = ""
    gates: tuple[dict[str, Any], ...] = ()
    measuring_s: float = 0.0


@dataclass
class Stages:
    """The seconds of each stage of a row, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Note the seconds of what is done while the context is open."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - start, 2)


def obey(order: dict[str, Any]) -> dict[str, Any]:
    """Do what a `RowOrder` says and return the answer, both as JSON values. Failures are answers.

    `report` of the answer has fields of a `BenchRow`.
    """
    told = from_json(RowOrder, order, "order")
    return answer(lambda: _explain(told) if told.do == "judge" else _do_row(told))


def _do_row(order: RowOrder) -> Answer:
    """Plan the row, refuse what cannot work or would come too late, build it and measure it."""
    stages, cache = Stages(), Path(order.cache) if order.cache else None
    with stages.time("plan"):
        try:
            recipe = load_recipe(order.recipe)
            needed = foresee_build(make_plan(recipe, cache, timed=False)) + order.measuring_s
        except (CompressError, RuntimeFailure) as error:
            if error.exit_code != 2:
                raise
            return Answer("refused", str(error))
    if order.seconds is not None and needed > order.seconds:
        return Answer("late", f"it takes about {needed:.0f} s, and {max(order.seconds, 0):.0f} s are left")
    with stages.time("build"):
        build_recipe(recipe, Path(order.out), cache, quiet=True, timed=False)
    fields = measure_bundle(Path(order.out), order.backend, order.gates, stages.time)
    return Answer("done", report={**fields, "stages": stages.seconds})


def foresee_build(plan: Plan) -> float:
    """Return the least seconds of building a plan's bundle, without judging."""
    return sum(stage.duration.least_s for stage in plan.stages if stage.name not in (START, JUDGING))


def _explain(order: RowOrder) -> Answer:
    return Answer("done", report={"why": find_cause(Path(order.out), order.backend)})
