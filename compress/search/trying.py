"""What is done for one trial, in whatever process: plan and build its bundle, with less on a rung, and judge it."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compress.errors import CompressError, OutputError
from compress.execution.run import build_recipe
from compress.planning.forecast import JUDGING, START
from compress.planning.make_plan import make_plan
from compress.planning.plan import Plan
from compress.recipe.load import load_recipe
from compress.recipe.schema import Recipe
from compress.recipe.search import Racing
from compress.search.outcome import explain_foreseen_miss, foresee_sizes
from compress.search.workers import TrialAnswer, TrialOrder
from compress.specs import DataSpec
from compress.store.durable import temporary_folder
from runtime.bundle.records import from_json, to_json
from runtime.errors import RuntimeFailure
from runtime.report.report import to_dict
from runtime.report.validate import validate


def obey(order: dict[str, Any]) -> dict[str, Any]:
    """Do what an order says and return the answer, both as JSON values. Failures are answers."""
    told = from_json(TrialOrder, order, "order")
    return answer(lambda: _judge(told) if told.do == "judge" else _build(told))


def answer(work: Callable[[], TrialAnswer]) -> dict[str, Any]:
    """Do some work and return its answer as JSON values, with its seconds. Failures are answers."""
    start = time.monotonic()
    try:
        found = work()
    except (CompressError, RuntimeFailure) as error:
        found = TrialAnswer("failed", str(error), stop=isinstance(error, OutputError))
    except MemoryError as error:
        found = TrialAnswer("failed", f"out of memory: {error}")
    except Exception as error:  # noqa: BLE001  (a trial that fails is a recorded trial, whatever it failed of)
        found = TrialAnswer("failed", f"{type(error).__name__}: {error}")
    values: dict[str, Any] = to_json(found)
    return {**values, "seconds": time.monotonic() - start, "host": platform.node()}


@contextmanager
def time_stage(stages: dict[str, float], name: str) -> Iterator[None]:
    """Note the seconds of what is done while the context is open."""
    start = time.monotonic()
    try:
        yield
    finally:
        stages[name] = round(time.monotonic() - start, 2)


def _build(order: TrialOrder) -> TrialAnswer:
    """Plan the recipe, refuse what cannot work or is foreseen to be far from its gates, and write the bundle."""
    cache = Path(order.cache) if order.cache else None
    stages: dict[str, float] = {}
    try:
        with time_stage(stages, "plan"):
            recipe = load_recipe(order.recipe)
            plan = make_plan(recipe, cache, twins=False, timed=order.timed)
            if order.share < 1:
                counts = {name: facts.n_samples for name, facts in plan.inputs.data.items()}
                recipe = reduce_recipe(recipe, Racing.model_validate(order.racing, strict=False), order.share, counts)
                plan = make_plan(recipe, cache, twins=False, timed=order.timed)
    except (CompressError, RuntimeFailure) as error:
        if error.exit_code != 2:
            raise
        return TrialAnswer("refused", str(error))
    foreseen = {
        "weights_ratio": plan.before.n_bytes / max(plan.after.n_bytes, 1),
        "seconds": plan.duration.seconds,
        "memory_bytes": float(plan.forecast.memory_bytes),
    }
    sizes = foresee_sizes(plan.before.n_bytes, plan.after.n_bytes)
    if order.refuse and (why := explain_foreseen_miss(recipe.validate_.gates, sizes)):
        return TrialAnswer("refused", why, foreseen=foreseen)
    needed = plan.duration.least_s if order.judging_s is None else _foresee_build(plan) + order.judging_s
    if order.refuse and order.seconds is not None and needed > order.seconds:
        return TrialAnswer("late", f"it takes {needed:.0f} s at least, and {order.seconds:.0f} s are left")
    if order.do == "start":
        with temporary_folder() as folder:
            first = recipe.model_copy(update={"passes": recipe.passes[: order.n_passes]})
            build_recipe(first, folder / "started", cache, quiet=True)
        return TrialAnswer("done")
    with time_stage(stages, "build"):
        notes = build_recipe(recipe, Path(order.out), cache, quiet=True, timed=order.timed)
    reused = tuple(work.name for work in plan.steps if work.cached)
    return TrialAnswer("done", notes=notes, reused=reused, foreseen=foreseen, stages=stages)


def _foresee_build(plan: Plan) -> float:
    """Return the seconds that building a plan's bundle takes at least, without judging it."""
    return sum(stage.duration.least_s for stage in plan.stages if stage.name not in (START, JUDGING))


def _judge(order: TrialOrder) -> TrialAnswer:
    return TrialAnswer("done", report=to_dict(validate(order.out, notes=order.notes)))


def reduce_recipe(recipe: Recipe, racing: Racing, share: float, n_samples: Mapping[str, int]) -> Recipe:
    """Return the recipe with a share of its training and samples, as `racing.shorten` says; itself where share is 1.

    `n_samples`: of each declared set, for those that do not say how many they take. A set that has several parts and
    does not say so of one of them keeps that part whole.
    """
    if share >= 1:
        return recipe
    changes: dict[str, object] = {}
    if "training" in racing.shorten:
        changes["passes"] = tuple(pass_.shorten(share) for pass_ in recipe.passes)
    names = [name for name in ("evaluation", "calibration") if name in racing.shorten]
    changed: dict[str, object] = {}
    for name in names:
        declared = getattr(recipe.data, name)
        if isinstance(declared, DataSpec):
            changed[name] = _reduce(declared, share, n_samples.get(name))
        elif declared is not None:
            changed[name] = {key: _reduce(spec, share, None) for key, spec in declared.items()}
    changes["data"] = recipe.data.model_copy(update=changed)
    return recipe.model_copy(update=changes)


def _reduce(spec: DataSpec, share: float, n_all: int | None) -> DataSpec:
    n = spec.samples if spec.samples is not None else None if spec.also else n_all
    if n is not None:
        # Of fewer than 64, an accuracy's standard error is more than 6 points, and their order tells nothing.
        spec = spec.model_copy(update={"samples": min(n, max(math.ceil(n * share), 64))})
    return spec.model_copy(update={"also": tuple(_reduce(part, share, None) for part in spec.also)})
