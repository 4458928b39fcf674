"""AWQ's scales: weights of inputs that are large on average are made larger before rounding, their inputs smaller.

Lin et al., AWQ: Activation-aware Weight Quantization (2023, arXiv:2306.00978): s = mean|X|^a, searched over a; with
`mean|X|^a / mean|W|^(1 - a)`, as its authors' code has it, among the candidates. Deviation: the error that is compared
is that of the layers that read the tensor, through the Gram matrix of what they read, not that of the module around
them: no forward pass is needed for a candidate. Where an engine rounds what the layers read, too, scales change what
that loses, and a sample of rows tells how much. Torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.formats.schemes import WeightScheme
from compress.rounding.gptq import output_error
from compress.rounding.grid import finite, fit_grid

STEPS = 20
"""Exponents tried, of each form."""
JUDGED_ROWS = 256
"""Rows of the weights together, evenly spaced, on which a candidate's error is measured."""
ROUGH = 3
"""One in so many of the grid's candidates is tried for each candidate here."""
GAIN = 0.995
"""Part of the error without scales; what gains less is not worth changing the weights for."""


@dataclass(frozen=True, eq=False)
class Scaling:
    """`scales` [in], None where none lowers the error. `alpha`: the exponent. The errors are relative to the output."""

    scales: Tensor | None
    alpha: float
    error_before: float
    error_after: float


@dataclass(frozen=True, eq=False)
class RoundedInputs:
    """A sample of what layers read, `rows` [n, in], and `round`, which rounds it as an engine does before a product."""

    rows: Tensor
    round: Callable[[Tensor], Tensor]

    def measure_energy(self, weight: Tensor, scales: Tensor) -> float:
        """Return E|Q (x - r(x / s) s)|^2, what a product with `weight` Q [out, in] loses by it under scales s [in]."""
        lost = (self.round(self.rows / scales) * scales - self.rows).double()
        return float((lost @ weight.double().T).square().sum()) / len(lost)


def search_scales(
    weights: Sequence[Tensor],
    schemes: Sequence[WeightScheme],
    gram: Tensor,
    magnitude: Tensor,
    tied: Callable[[Tensor], Tensor] = lambda scales: scales,
    signed: bool = True,
    steps: int = STEPS,
    inputs: RoundedInputs | None = None,
) -> Scaling:
    """Find the scales under which rounding `weights` [out, in], each to its scheme, changes their outputs least.

    `gram` X^T X / n [in, in] and `magnitude` mean|X| [in] of what they read. `tied` brings scales into the form that
    can be folded. `signed`: as in `fit_grid`. `inputs`: how these are rounded, too; None: they are not.
    """
    step = -(-sum(map(len, weights)) // JUDGED_ROWS)
    some = [weight[::step].float() for weight in weights]
    plain = torch.ones_like(magnitude)
    before = _measure_error(some, schemes, gram, plain, signed, inputs)
    best = Scaling(None, 0.0, before, before)
    for scales, alpha in _list_candidates(weights, magnitude, steps):
        scales = tied(scales)
        error = _measure_error(some, schemes, gram, scales, signed, inputs)
        if error < min(best.error_after, GAIN * before):
            best = Scaling(scales, alpha, before, error)
    return best


def _list_candidates(weights: Sequence[Tensor], magnitude: Tensor, steps: int) -> list[tuple[Tensor, float]]:
    """Return candidates (scales, exponent), each of geometric middle 1 (that of the largest and the smallest)."""
    mean = torch.cat([weight.abs().double() for weight in weights]).mean(0)
    x, w = (_log_sizes(sizes) for sizes in (magnitude.double(), mean))
    alphas = [k / steps for k in range(1, steps + 1)]
    candidates = [(x * a, a) for a in alphas] + [(x * a - w * (1 - a), a) for a in alphas]
    # Powers of what is tiny, and their products, leave the numbers that float32 has; their logarithms do not.
    return [((logs - (logs.max() + logs.min()) / 2).exp().float(), alpha) for logs, alpha in candidates]


def _log_sizes(sizes: Tensor) -> Tensor:
    """Return the logarithms of sizes, none below a ten-thousandth of the largest; zeros where all are zero."""
    largest = sizes.max()
    return (sizes / largest).clamp_min(1e-4).log() if largest > 0 else torch.zeros_like(sizes)


def _measure_error(
    weights: Sequence[Tensor],
    schemes: Sequence[WeightScheme],
    gram: Tensor,
    scales: Tensor,
    signed: bool,
    inputs: RoundedInputs | None,
) -> float:
    """Return E|(W - Q(W s) / s) x|^2 / E|W x|^2 under the scales s, all weights together, with what `inputs` add."""
    importance = gram.diagonal() / scales**2
    rounded = []
    for weight, scheme in zip(weights, schemes, strict=True):
        scaled = weight * scales
        if not finite(scaled):  # of a weight near the largest number
            return math.inf
        grid = fit_grid(scaled, scheme, importance, signed, ROUGH)
        rounded.append(grid.values(grid.quantize(scaled)) / scales)
    exact, coarse = torch.cat(list(weights)), torch.cat(rounded)
    error = output_error(exact, coarse, gram)
    if inputs is None:
        return error
    energy = float(((exact @ gram.to(exact.dtype)) * exact).sum(dtype=torch.float64))
    return error + inputs.measure_energy(coarse, scales) / max(energy, 1e-30)
