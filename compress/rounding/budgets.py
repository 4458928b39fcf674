"""The choice of least predicted loss that keeps a budget, as it is counted or timed whole.

Prices of layers are a forecast. What is chosen is counted, or timed, as a whole; by what the prices were wrong the
budget is corrected, and the next choice is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compress.rounding.allocate import SLACK, choose_within_budget

TRIES = 8
"""Choices that are counted or timed whole."""
NEAR = 0.02
"""Part of a budget of time that may be left over: timings differ by as much."""
NEAR_BYTES = 0.002
"""The same of a budget of bytes."""
Table = Sequence[Sequence[float]]
"""[group][choice]."""


Point = tuple[float, float]
"""A choice that was measured: the sum of its prices, and by how much it is over the budget."""


class BudgetMissed(ValueError):
    """No choice was found that keeps the budget once it is counted or timed; the message is what the last came to."""


@dataclass(frozen=True)
class Measured:
    """What a choice came to. `over`: by how much it is above the budget, in the prices' unit; `text`: in words."""

    over: float
    text: str


@dataclass(frozen=True)
class Prices:
    """What the choices cost. `budget`: for all groups together; `measure`: counts or times a choice, given as numbers.

    `measure` None: the prices are exact. `tolerance`: of the budget, what may be left over without another try.
    `cheapest_over`: by how much the cheapest choices of all are above the budget, where that was measured.
    """

    table: Table
    budget: float
    measure: Callable[[Sequence[int]], Measured] | None = None
    tolerance: float = 0.0
    cheapest_over: float | None = None


@dataclass(frozen=True)
class BudgetChoice:
    """The number of each group's choice, what it was measured to come to, and the budget as corrected by that."""

    numbers: tuple[int, ...]
    text: str
    budget: float


def choose_measured(
    losses: Table, prices: Prices, log: Callable[[str], None], beyond: Sequence[Sequence[int]] = ()
) -> BudgetChoice:
    """Return the choice of least loss that keeps the budget; `beyond`: as of `choose_within_budget`.

    OutOfReach where no choice keeps it by the prices, BudgetMissed where none of those tried kept it.
    """
    budget, least = prices.budget, sum(map(min, prices.table))
    tried: dict[tuple[int, ...], Measured] = {}
    kept: list[BudgetChoice] = []
    start = None if prices.cheapest_over is None else (least, prices.cheapest_over)
    low: Point | None = start
    high: Point | None = None
    for _ in range(TRIES):
        # what the cheapest of all comes to is for `measure` to say
        numbers = tuple(choose_within_budget(losses, prices.table, max(budget, least), beyond))
        if prices.measure is None:
            return BudgetChoice(numbers, "", budget)
        spent = _sum_up(prices.table, numbers)
        known = numbers in tried
        measured = tried[numbers] if known else prices.measure(numbers)
        if not known:
            log(measured.text)
        tried[numbers] = measured
        if measured.over > SLACK * abs(spent):
            high = (spent, measured.over) if high is None or spent < high[0] else high
        else:
            kept.append(BudgetChoice(numbers, measured.text, max(budget, least)))
            low = (spent, measured.over) if low is None or spent > low[0] else low
            if -measured.over <= prices.tolerance:
                break
        following = _correct_budget(start, low, high)
        if known or following is None or following == budget:
            break
        budget = following
    if not kept:
        raise BudgetMissed(list(tried.values())[-1].text)
    return min(kept, key=lambda choice: _sum_up(losses, choice.numbers))


def _correct_budget(start: Point | None, low: Point | None, high: Point | None) -> float | None:
    """Return the sum of prices that will come to the budget, by what was kept and what was above it.

    `start`: the cheapest choices of all; `low`: the dearest that was kept; `high`: the cheapest that was above. On the
    straight line through two of them; of one alone, prices are taken to differ by what things cost. None where
    measurements contradict each other.
    """
    first, second = (low, high) if low is not None and high is not None else (start, low or high)
    if first is None or second is None or first == second:
        (spent, over) = second or first or (0.0, 0.0)
        return spent - over
    if first[0] >= second[0] or first[1] >= second[1]:
        return None
    return first[0] - first[1] * (second[0] - first[0]) / (second[1] - first[1])


def _sum_up(table: Table, numbers: Sequence[int]) -> float:
    return sum(row[k] for row, k in zip(table, numbers, strict=True))
