"""Which width each dimension gets, so that costs keep to their limits and the damage, summed over dimensions, is least.

A knapsack whose prices may depend on each other. A price for the cost turns it into one sum to make small, dimension by
dimension (Everett 1963, "Generalized Lagrange Multiplier Method"; Shoham and Gersho 1988); the price is bisected. What
that leaves of the budget is then used up by exchanges of one or two dimensions, exactly checked. Of two costs, each in
parts of its limit, several mixtures are priced, and the choice that does the least damage is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from compress.errors import PassError
from compress.pruning.costs import Cost, Term

EXCHANGES = 400
"""At most; each makes the damage less."""
MOST_WIDTHS = 4096
"""Of all dimensions together, of which all pairs are exchanged; of more those near the choice."""
TRIED = 64
"""Exchanges that are checked against the true cost, the best first."""
MIXTURES = 9
"""Of two costs, from the first alone to the second alone."""


@dataclass(frozen=True, eq=False)
class Options:
    """The widths that one dimension may get, rising int64, and the damage each does, float64; the last is all units."""

    widths: np.ndarray
    damage: np.ndarray


@dataclass(frozen=True, eq=False)
class Limit:
    """What a cost may be at most."""

    cost: Cost
    most: float

    def holds(self, widths: Sequence[int]) -> bool:
        return self.cost.at(widths) <= self.most


def list_widths(name: str, n_units: int, round_to: int, min_units: int) -> np.ndarray:
    """Return the multiples of `round_to` that keep at least `min_units`, and the full width; int64, rising.

    PassError where `min_units` is below 1 or above the full width.
    """
    if not 1 <= min_units <= n_units:
        raise PassError(f"{name}: min_units is {min_units}, but the dimension has {n_units} units; give 1 to {n_units}")
    widths = np.arange(round_to, n_units, round_to)
    return np.append(widths[widths >= min_units], n_units).astype(np.int64)


def choose_widths(options: Sequence[Options], limits: Sequence[Limit], or_nearest: bool = False) -> tuple[int, ...]:
    """Choose a width for each dimension so that one or two costs keep to their limits and the summed damage is small.

    Where no choice keeps to them: with `or_nearest` the one that exceeds them least, else PassError.
    """
    full = [len(option.widths) - 1 for option in options]
    if _keeps(options, full, limits):
        return _pick_widths(options, full)
    for limit in () if or_nearest else limits:
        _refuse_out_of_reach(options, limit, full)
    cheapest = [(price, _minimize_at_price(options, price, full, np.inf)) for price in _mix_costs(limits)]
    ends: list[list[int]] = []
    for price, choice in cheapest:
        if _keeps(options, choice, limits):
            starts = (_bisect_price(options, price, choice, limits), choice)
            ends += [_exchange_widths(options, limits, start) for start in starts]
    if ends:
        return _pick_widths(options, min(ends, key=lambda choice: _sum_damage(options, choice)))
    if or_nearest:
        choices = [_pick_widths(options, choice) for _, choice in cheapest]
        return min(choices, key=lambda widths: max(limit.cost.at(widths) / limit.most for limit in limits))
    names = " and ".join(limit.cost.unit for limit in limits)
    raise PassError(f"no widths were found that keep to the budgets of {names} at once; ask for less of one")


def _keeps(options: Sequence[Options], choice: Sequence[int], limits: Sequence[Limit]) -> bool:
    widths = _pick_widths(options, choice)
    return all(limit.holds(widths) for limit in limits)


def _refuse_out_of_reach(options: Sequence[Options], limit: Limit, full: Sequence[int]) -> None:
    cost = limit.cost
    least = cost.at(_pick_widths(options, _minimize_at_price(options, cost, full, np.inf)))
    if least <= limit.most:
        return
    whole = cost.at(_pick_widths(options, full))
    raise PassError(
        f"the budget of {limit.most:.6g} {cost.unit} cannot be met: the least that these widths reach is {least:.6g} "
        f"of {whole:.6g} ({whole / least:.2f} times fewer); ask for less, allow fewer units (min_units), or prune "
        "more dimensions"
    )


def _mix_costs(limits: Sequence[Limit]) -> list[Cost]:
    """Return the costs that are priced: of one limit its own, of two the mixtures of both in parts of their limits."""
    if len(limits) == 1:
        return [limits[0].cost]
    first, second = (_scale(limit.cost, 1 / limit.most) for limit in limits)
    shares = np.linspace(0, 1, MIXTURES)
    return [
        Cost("parts", first.n_units, (*_scale(first, 1 - share).terms, *_scale(second, share).terms))
        for share in map(float, shares)
    ]


def _scale(cost: Cost, factor: float) -> Cost:
    def scale(term: Term) -> Term:
        price = term.price
        return replace(term, price=lambda sizes: factor * price(sizes))

    return Cost(cost.unit, cost.n_units, tuple(map(scale, cost.terms)) if factor else ())


def _pick_widths(options: Sequence[Options], choice: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(option.widths[j]) for option, j in zip(options, choice, strict=True))


def _sum_damage(options: Sequence[Options], choice: Sequence[int]) -> float:
    """Return the damage of a choice, summed over dimensions."""
    return sum(float(option.damage[j]) for option, j in zip(options, choice, strict=True))


def _bisect_price(options: Sequence[Options], cost: Cost, cheapest: list[int], limits: Sequence[Limit]) -> list[int]:
    """Return the choice at the lowest price of `cost` that still keeps to the limits."""
    low, high, best = -30.0, 30.0, cheapest  # of the price's logarithm, in damage over cost
    scale = sum(float(option.damage[0]) for option in options) / max(cost.at(_pick_widths(options, cheapest)), 1e-300)
    # an interval 60 wide, halved down to what a float tells apart
    for _ in range(50):
        middle = (low + high) / 2
        tried = _minimize_at_price(options, cost, best, max(scale, 1e-300) * float(np.exp(middle)))
        if _keeps(options, tried, limits):
            high, best = middle, tried
        else:
            low = middle
    return best


def _minimize_at_price(options: Sequence[Options], cost: Cost, start: Sequence[int], price: float) -> list[int]:
    """Return a choice where no single dimension makes damage + price * cost less; an infinite price: cost alone."""
    choice = [*start]
    for _ in range(20):
        before = [*choice]
        for d, option in enumerate(options):
            changes = _compute_cost_changes(options, cost, choice, d)
            worth = changes if np.isinf(price) else option.damage + price * changes
            choice[d] = int(len(worth) - 1 - np.argmin(worth[::-1]))  # of equals the widest
        if choice == before:
            break
    return choice


def _compute_cost_changes(options: Sequence[Options], cost: Cost, choice: Sequence[int], d: int) -> np.ndarray:
    """Return by how much every option of dimension `d` changes the cost."""
    widths = _pick_widths(options, choice)
    return np.array([cost.change(widths, d, int(width)) for width in options[d].widths])


def _exchange_widths(options: Sequence[Options], limits: Sequence[Limit], choice: list[int]) -> list[int]:
    """Change one dimension or two at a time, the damage falling most, as long as the limits hold."""
    for _ in range(EXCHANGES):
        better = _find_exchange(options, limits, choice)
        if better is None:
            break
        choice = better
    return choice


def _find_exchange(options: Sequence[Options], limits: Sequence[Limit], choice: list[int]) -> list[int] | None:
    """Return the choice after the exchange that lowers the damage most; None where no exchange lowers it."""
    owner = np.concatenate([np.full(len(option.widths), d) for d, option in enumerate(options)])
    place = np.concatenate([np.arange(len(option.widths)) for option in options])
    harm = np.concatenate([option.damage - option.damage[choice[d]] for d, option in enumerate(options)])
    near = np.full(len(harm), True)
    if len(harm) > MOST_WIDTHS:  # all pairs would not fit into memory: those near the choice
        near = np.abs(place - np.asarray(choice)[owner]) <= MOST_WIDTHS // (2 * len(options))
    pairs = _add_pairs(harm[near])
    pairs[(owner[near][:, None] == owner[near]) & ~np.eye(len(pairs), dtype=bool)] = np.inf
    for limit in limits:
        room = limit.most - limit.cost.at(_pick_widths(options, choice))
        more = np.concatenate([_compute_cost_changes(options, limit.cost, choice, d) for d in range(len(options))])
        pairs[_add_pairs(more[near]) > room + 1e-9 * abs(limit.most)] = np.inf
    owner, place = owner[near], place[near]
    first = np.argpartition(pairs, min(TRIED, pairs.size - 1), axis=None)[:TRIED]
    for flat in first[np.argsort(pairs.flat[first], kind="stable")]:
        a, b = np.unravel_index(flat, pairs.shape)
        if not pairs[a, b] < -1e-12 * (1 + np.abs(harm[near]).max()):
            return None
        tried = [*choice]
        tried[owner[a]], tried[owner[b]] = int(place[a]), int(place[b])
        if _keeps(options, tried, limits):  # prices may depend on each other
            return tried
    return None


def _add_pairs(changes: np.ndarray) -> np.ndarray:
    """Return the sum of each pair of changes, [n, n], and on the diagonal each change alone."""
    sums = changes[:, None] + changes
    sums[np.diag_indices(len(changes))] = changes
    return sums
