"""What is done for one trial, in whatever process: plan and build its bundle, and judge it."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compress.errors import CompressError, OutputError
from compress.execution.run import build_recipe
from compress.planning.make_plan import make_plan
from compress.recipe.load import load_recipe
from compress.recipe.search import Racing
from compress.search.fidelity import reduce_recipe
from compress.search.orders import Answer, Order, keep_untimed
from compress.search.outcome import explain_foreseen_miss, foresee_sizes
from compress.store.durable import temporary_folder
from runtime.bundle.records import from_json, to_json
from runtime.errors import RuntimeFailure
from runtime.report.report import to_dict
from runtime.report.validate import validate


def obey(order: dict[str, Any]) -> dict[str, Any]:
    """Do what an order says and return the answer, both as JSON values. Failures are answers."""
    told = from_json(Order, order, "order")
    return answer(lambda: _judge(told) if told.do == "judge" else _build(told))


def answer(work: Callable[[], Answer]) -> dict[str, Any]:
    """Do some work and return its answer as JSON values, with its seconds. Failures are answers."""
    start = time.monotonic()
    try:
        found = work()
    except (CompressError, RuntimeFailure) as error:
        found = Answer("failed", str(error), stop=isinstance(error, OutputError))
    except MemoryError as error:
        found = Answer("failed", f"out of memory: {error}")
    except Exception as error:  # noqa: BLE001  (a trial that fails is a recorded trial, whatever it failed of)
        found = Answer("failed", f"{type(error).__name__}: {error}")
    values: dict[str, Any] = to_json(found)
    return {**values, "seconds": time.monotonic() - start, "host": platform.node()}


def _build(order: Order) -> Answer:
    """Plan the recipe, refuse what cannot work or is foreseen to be far from its gates, and write the bundle."""
    cache = Path(order.cache) if order.cache else None
    try:
        recipe = load_recipe(order.recipe)
        plan = make_plan(recipe, cache, twins=False)
        if order.share < 1:
            counts = {name: facts.n_samples for name, facts in plan.inputs.data.items()}
            recipe = reduce_recipe(recipe, Racing.model_validate(order.racing, strict=False), order.share, counts)
            plan = make_plan(recipe, cache, twins=False)
    except (CompressError, RuntimeFailure) as error:
        if error.exit_code != 2:
            raise
        return Answer("refused", str(error))
    foreseen = {
        "weights_ratio": plan.before.n_bytes / max(plan.after.n_bytes, 1),
        "seconds": plan.forecast.seconds,
        "memory_bytes": float(plan.forecast.memory_bytes),
    }
    sizes = foresee_sizes(plan.before.n_bytes, plan.after.n_bytes)
    if order.refuse and (why := explain_foreseen_miss(recipe.validate_.gates, sizes)):
        return Answer("refused", why, foreseen=foreseen)
    if order.refuse and order.seconds is not None and plan.forecast.seconds > order.seconds:
        return Answer("late", f"about {plan.forecast.seconds:.0f} s, and {order.seconds:.0f} are left")
    if order.do == "start":
        with temporary_folder() as folder:
            build_recipe(keep_untimed(recipe), folder / "started", cache, quiet=True)
        return Answer("done")
    notes = build_recipe(recipe, Path(order.out), cache, quiet=True)
    reused = tuple(work.name for work in plan.steps if work.cached)
    return Answer("done", notes=notes, reused=reused, foreseen=foreseen)


def _judge(order: Order) -> Answer:
    return Answer("done", report=to_dict(validate(order.out, notes=order.notes)))
