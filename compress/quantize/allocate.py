"""Which weights get how many bits, so that the predicted loss is least and the average is kept: an integer programme.

One of the choices for each group, minimising the sum of their losses under one budget: a multiple-choice knapsack,
solved to its optimum by HiGHS (`scipy.optimize.milp`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from runtime.errors import MissingDependency

GAP = 1e-9
"""Relative difference from the optimum at which the solver stops."""
SPAN = 1e6
"""The objective's largest loss: HiGHS also stops at an absolute difference of 1e-6, which is far below it then."""


def choose_bits(
    sizes: Sequence[int], losses: Sequence[Sequence[float]], choices: Sequence[int], budget: int
) -> list[int]:
    """Return the bits of each group, one of `choices`, with the least sum of losses.

    `sizes`: weights of each group; `losses`: [group][choice], 0 or more; `budget`: bits of all weights together, at
    most. The same input gives the same answer. ValueError where even the fewest bits exceed the budget, or a loss is
    not finite.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise MissingDependency("scipy", "choosing the bits of each layer") from error
    table = np.array(losses, dtype=np.float64)  # [groups, choices]
    if not np.isfinite(table).all():
        raise ValueError("a predicted loss is not finite")
    if sum(sizes) * min(choices) > budget:
        raise ValueError(f"{min(choices)} bits for each weight are more than the budget of {budget} bits")
    unit = math.gcd(*sizes)  # integers stay small, so that the solver's tolerance is no part of a bit
    n_groups, n_choices = table.shape
    bits = np.outer([size // unit for size in sizes], choices).astype(np.float64)  # [groups, choices]
    rows = np.repeat(np.arange(n_groups), n_choices)
    one_each = csr_array((np.ones(table.size), (rows, np.arange(table.size))))
    answer = milp(
        (table * (SPAN / (table.max() or 1.0))).ravel(),
        integrality=np.ones(table.size),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(bits.reshape(1, -1), -np.inf, budget // unit)],
        options={"mip_rel_gap": GAP},
    )
    if answer.x is None:
        raise ValueError(f"HiGHS found no answer: {answer.message}")
    return [choices[i] for i in answer.x.reshape(table.shape).argmax(1)]
