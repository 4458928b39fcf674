"""Rounding of a weight by whatever its scheme stores: here alone llama.cpp's formats are told from others. Torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compress.formats.schemes import WeightScheme
from compress.rounding.gptq import GptqRules, Hessian, RoundedWeight, gptq_round, gptq_round_together
from compress.rounding.grid import round_to_grid
from compress.rounding.k_quants import gptq_round_k, round_to_k
from compress.rounding.quantized_weight import QuantizedWeight, by_rows


def round_weight(
    weight: Tensor,
    scheme: WeightScheme,
    importance: Tensor | None = None,
    signed: bool = True,
    shared: float | None = None,
) -> QuantizedWeight:
    """Round `weight` [out, in] to the nearest, a tall one some rows at a time where rows have scales of their own.

    `importance` [in] weighs the inputs' errors. `signed`, `shared`: as of `fit_grid`; scales of llama.cpp's
    formats are neither.
    Raises ValueError as `fit_grid` and `round_to_k` do.
    """
    if scheme.block:
        return by_rows(weight, lambda rows: round_to_k(rows, scheme, importance))
    if not scheme.has_separate_rows:
        return round_to_grid(weight, scheme, importance, signed, shared)
    return by_rows(weight, lambda rows: round_to_grid(rows, scheme, importance, signed, shared))


def gptq_round_weights(
    weights: Sequence[Tensor], hessian: Hessian, scheme: WeightScheme, rules: GptqRules
) -> list[RoundedWeight]:
    """Quantize weights [out, in] that read the same inputs by GPTQ, together where the format lets them be.

    Raises ValueError as `round_weight` does.
    """
    if scheme.block:
        return [gptq_round_k(weight, hessian, scheme, rules) for weight in weights]
    if len(weights) == 1:
        return [gptq_round(weights[0], hessian, scheme, rules)]
    return gptq_round_together(weights, hessian, scheme, rules)
