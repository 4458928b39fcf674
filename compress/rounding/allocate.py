"""Which choice each item gets, so that the predicted loss is least and a budget is kept: an integer programme.

One of the choices for each group of layers, minimising the sum of their losses under one budget: a multiple-choice
knapsack, solved to its optimum by HiGHS (`scipy.optimize.milp`). The budget may be of bits, bytes or milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from runtime.errors import MissingDependency

SPAN = 1e6
"""The objective's largest loss, and the largest of costs that are no integers: HiGHS also stops at absolute differences
of 1e-6, which are far below then."""
TRIES = 5
SLACK = 1e-9
"""Part of a budget by which an answer may be above it: what floating point makes of a sum."""


class OutOfReach(ValueError):
    """No choice keeps the budget. `least`: what the cheapest choice of every item costs."""

    def __init__(self, least: float, budget: float) -> None:
        super().__init__(f"the least that the choices cost is {least:g}, more than the budget of {budget:g}")
        self.least = least


def choose_within_budget(
    losses: Sequence[Sequence[float]],
    costs: Sequence[Sequence[float]],
    budget: float,
    beyond: Sequence[Sequence[int]] = (),
) -> list[int]:
    """Return the number of each item's choice, with the least sum of losses and a sum of costs of at most `budget`.

    `losses`, `costs`: [item][choice], losses 0 or more. `beyond`: earlier answers; in the new one at least one item has
    a choice of less loss than in each of them, for it is to lose less than they did. The same input gives the same
    answer. OutOfReach where no choice keeps the budget, and all that; ValueError where a loss is not finite.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise MissingDependency("scipy", "choosing what each layer gets") from error
    table, prices = np.array(losses, np.float64), np.array(costs, np.float64)  # [items, choices]
    if not (np.isfinite(table).all() and np.isfinite(prices).all()):
        raise ValueError("a predicted loss, or a cost, is not finite")
    least = prices.min(axis=1)
    if _is_above(float(least.sum()), budget):
        raise OutOfReach(float(least.sum()), budget)
    # what every choice of an item costs is taken off, so that large items that differ little are told apart
    extra, room = prices - least[:, None], budget - float(least.sum())
    unit = _find_unit(extra)
    rows = np.repeat(np.arange(len(table)), table.shape[1])
    one_each = csr_array((np.ones(table.size), (rows, np.arange(table.size))))
    better = [(table < table[np.arange(len(table)), list(answer)][:, None]).astype(float).ravel() for answer in beyond]
    limit = room / unit
    for _ in range(TRIES):
        answer = milp(
            (table * (SPAN / (table.max() or 1.0))).ravel(),
            integrality=np.ones(table.size),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(one_each, 1, 1),
                LinearConstraint((extra / unit).reshape(1, -1), -np.inf, limit),
                *(LinearConstraint(row.reshape(1, -1), 1, np.inf) for row in better),
            ],
            options={"mip_rel_gap": 1e-9},
        )
        if answer.x is None:
            raise OutOfReach(float(least.sum()), budget) if better else ValueError(f"HiGHS: {answer.message}")
        chosen: list[int] = answer.x.reshape(table.shape).argmax(1).tolist()
        spent = float(prices[np.arange(len(table)), chosen].sum())
        if not _is_above(spent, budget):
            return chosen
        limit -= 2 * (spent - budget) / unit  # the solver takes 1 - 1e-6 for 1, which of a large item are some bytes
    raise ValueError("HiGHS gives no answer that keeps the budget")


def _is_above(cost: float, budget: float) -> bool:
    return cost > budget + SLACK * max(abs(cost), abs(budget))


def _find_unit(costs: np.ndarray) -> float:
    """Return what to divide costs by: of whole numbers their common divisor, else what makes the largest SPAN."""
    if (costs == np.round(costs)).all() and costs.max() < 2**53:
        return float(math.gcd(*costs.astype(np.int64).ravel().tolist()) or 1)
    return float(costs.max()) / SPAN


def join_groups(names: Sequence[str], together: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return `names` in groups, in order: those that are together, directly or through others, in one."""
    first: dict[str, str] = {name: name for name in names}

    def find(name: str) -> str:
        while first[name] != name:
            first[name] = first[first[name]]
            name = first[name]
        return name

    for some in together:
        known = [find(name) for name in some if name in first]
        for name in known[1:]:
            first[find(name)] = find(known[0])
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(find(name), []).append(name)
    return [tuple(group) for group in groups.values()]
