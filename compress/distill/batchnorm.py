"""Batch normalisation over the samples of all processes: torch has it for GPUs only. With one process: torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Reduce = Callable[[Tensor], Tensor]
"""The sum over all processes, the same in each."""


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    return [part for part in module.modules() if isinstance(part, _BatchNorm)]


def set_mode(module: nn.Module, freeze_batchnorm: bool) -> None:
    """Switch off what is random in training; running statistics follow the data unless frozen."""
    module.eval()
    for norm in batch_norms(module):
        norm.train(not freeze_batchnorm)


@contextmanager
def share_statistics(module: nn.Module, reduce: Reduce, n_processes: int) -> Iterator[None]:
    """Make norms in train mode use mean and variance of all processes' samples while the context is open."""
    if n_processes == 1:
        yield
        return
    norms = batch_norms(module)
    for norm in norms:
        norm.forward = _make_shared_forward(norm, reduce)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


class _Summed(torch.autograd.Function):
    """The sum over processes; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, reduce: Reduce) -> Tensor:
        ctx.reduce = reduce
        return reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.reduce(grads[0].contiguous()), None


def _make_shared_forward(norm: _BatchNorm, reduce: Reduce) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if not norm.training:
            return type(norm).forward(norm, x)
        return _normalize(norm, x, reduce)

    return forward


def _normalize(norm: _BatchNorm, x: Tensor, reduce: Reduce) -> Tensor:
    """Normalize [b, C, ...] by the statistics of all processes' samples, which the running ones follow."""
    others = [0, *range(2, x.dim())]
    shape = (1, -1, *[1] * (x.dim() - 2))
    values = x.float()
    n = float(reduce(torch.tensor(float(x.numel() // x.shape[1]))))
    mean = _Summed.apply(values.sum(others), reduce) / n  # [C]
    centred = values - mean.view(shape)
    variance = _Summed.apply(centred.square().sum(others), reduce) / n  # [C]
    _follow(norm, mean.detach(), variance.detach() * n / max(n - 1, 1))
    out = centred * (variance + norm.eps).rsqrt().view(shape)
    if norm.weight is not None:
        out = out * norm.weight.view(shape) + norm.bias.view(shape)
    return out.to(x.dtype)


@torch.no_grad()
def _follow(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
        return
    norm.num_batches_tracked.add_(1)
    rate = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean, rate)
    norm.running_var.lerp_(variance, rate)
