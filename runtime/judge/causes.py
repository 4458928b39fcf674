"""Why a candidate is slow: mechanisms that are seen in its executed graph, each with what would end it and the gain.

None is a list of models: products left in float between Q and DQ, signed activations without kernels, casts, weights
of few bits that are computed in float, layers that are bound by their products so that smaller weights cannot help,
widths that kernels do not like. A cause is told where ending it would save WORTH of the call; what cannot be told
apart from noise is not told.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.judge.cause import Found
from runtime.judge.causes_few_bits import find_compute_bound, find_computed_in_float
from runtime.judge.causes_int8 import find_no_int8_kernels, find_signed_activations, find_unfused_qdq
from runtime.judge.causes_layers import find_odd_widths, find_slower_layers, find_zeros_computed
from runtime.judge.causes_operators import find_casts, find_fixed_cost, find_other_operators
from runtime.judge.twins import ProfiledPair

FINDERS: tuple[Callable[[ProfiledPair, set[str]], Found], ...] = (
    find_signed_activations,
    find_unfused_qdq,
    find_casts,
    find_computed_in_float,
    find_compute_bound,
    find_odd_widths,
    find_no_int8_kernels,
    find_zeros_computed,
    find_slower_layers,
    find_other_operators,
    find_fixed_cost,
)
"""In the order in which nodes are explained: what one has told, those behind it leave out."""
