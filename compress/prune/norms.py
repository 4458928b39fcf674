"""Batch norms whose running statistics are those of the data again, after what lies before them has changed. Torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from compress.blocks.trace import remove_hooks_on_exit
from compress.prune.statistics import Batch


@torch.no_grad()
def follow_data(module: nn.Module, batches: Sequence[Batch]) -> None:
    """Set running means and variances to those of the calibration data, in place; what the module gives stays.

    Each norm's weight and bias take up what its statistics change by. Units that are gone, and layers that were fitted
    anew, leave the old statistics far from the data: in eval mode that is as good as any affine map, but training
    normalises by each batch's own, and would begin with another model than the one that was pruned.
    """
    sums: dict[_BatchNorm, Tensor] = {}
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    norms = [norm for norm in norms if norm.affine and norm.running_mean is not None]
    handles = [norm.register_forward_pre_hook(_make_sum_hook(norm, sums), with_kwargs=True) for norm in norms]
    with remove_hooks_on_exit(handles):
        for batch in batches:
            module(**batch)
    for norm, (n, x, xx) in sums.items():
        _restate_norm(norm, x / n, (xx / n - (x / n).square()).clamp_min(0))


def _make_sum_hook(norm: _BatchNorm, sums: dict[_BatchNorm, Tensor]) -> Callable[[nn.Module, Any, Any], None]:
    """Return a hook that sums over all batches: number of values, values, and their squares, float64 [3, C]."""

    def hook(part: nn.Module, args: Any, kwargs: Any) -> None:
        x = next(iter((*args, *kwargs.values()))).double().movedim(1, 0).flatten(1)  # [C, values]
        batch_sums = torch.stack([torch.full((len(x),), float(x.shape[1])).double(), x.sum(1), x.square().sum(1)])
        sums[norm] = sums[norm] + batch_sums if norm in sums else batch_sums

    return hook


def _restate_norm(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Express the same map by another mean and variance (float64 [C]), in place."""
    assert norm.running_mean is not None and norm.running_var is not None
    before, after = ((values.double() + norm.eps).sqrt() for values in (norm.running_var, variance))
    weight = norm.weight.double()
    norm.bias.add_((weight * (mean - norm.running_mean.double()) / before).float())
    norm.weight.copy_((weight * after / before).float())
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance)
