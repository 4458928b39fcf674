"""The choice of least predicted loss that keeps a budget, as it is counted or timed whole.

Prices of layers are a forecast. What is chosen is counted, or timed, as a whole; by what the prices were wrong the
budget is corrected, and the next choice is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compress.quantize.allocate import choose_within_budget

TRIES = 6
"""Choices that are counted or timed whole."""
NEAR = 0.02
"""Part of a budget of time that may be left over: timings differ by as much."""
NEAR_BYTES = 0.002
"""The same of a budget of bytes."""
Table = Sequence[Sequence[float]]
"""[group][choice]."""


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
    """

    table: Table
    budget: float
    measure: Callable[[Sequence[int]], Measured] | None = None
    tolerance: float = 0.0


@dataclass(frozen=True)
class Choice:
    """The number of each group's choice, what it was measured to come to, and the budget as corrected by that."""

    numbers: tuple[int, ...]
    text: str
    budget: float


def choose_measured(
    losses: Table, prices: Prices, log: Callable[[str], None], beyond: Sequence[Sequence[int]] = ()
) -> Choice:
    """Return the choice of least loss that keeps the budget; `beyond`: as of `choose_within_budget`.

    OutOfReach where no choice keeps it by the prices, BudgetMissed where none of those tried kept it.
    """
    budget, least = prices.budget, sum(map(min, prices.table))
    tried: dict[tuple[int, ...], Measured] = {}
    kept: list[Choice] = []
    for _ in range(TRIES):
        # what the cheapest of all comes to is for `measure` to say
        numbers = tuple(choose_within_budget(losses, prices.table, max(budget, least), beyond))
        if prices.measure is None:
            return Choice(numbers, "", budget)
        if numbers in tried:
            break
        tried[numbers] = measured = prices.measure(numbers)
        log(measured.text)
        spent = _sum_up(prices.table, numbers)
        if measured.over > 0:
            budget = min(budget, spent) - measured.over
            continue
        kept.append(Choice(numbers, measured.text, budget))
        if -measured.over <= prices.tolerance:
            break
        budget = spent - measured.over
    if not kept:
        raise BudgetMissed(list(tried.values())[-1].text)
    return min(kept, key=lambda choice: _sum_up(losses, choice.numbers))


def _sum_up(table: Table, numbers: Sequence[int]) -> float:
    return sum(row[k] for row, k in zip(table, numbers, strict=True))
