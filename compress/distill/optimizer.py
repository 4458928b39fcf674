"""The optimizer of a training run: which parameters decay, each with its factor on the rate; gradients of processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.distill.course import Course
from compress.errors import PassError


def make_optimizer(module: nn.Module, course: Course, rates: Mapping[str, float]) -> torch.optim.Optimizer:
    """Make AdamW (arXiv:1711.05101) or SGD with momentum over the parameters that want a gradient.

    Matrices and kernels decay, biases, norms and other vectors do not. Each group's "factor" multiplies the rate that
    is set before every step; `rates`: parameter -> its factor, 1 where not named.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            decay = course.weight_decay if parameter.dim() > 1 else 0.0
            groups.setdefault((rates.get(name, 1.0), decay), []).append(parameter)
    given: list[dict[str, Any]] = [
        {"params": parameters, "factor": factor, "weight_decay": decay}
        for (factor, decay), parameters in groups.items()
    ]
    if course.optimizer == "sgd":
        return torch.optim.SGD(given, lr=course.learning_rate, momentum=course.momentum)
    return torch.optim.AdamW(given, lr=course.learning_rate, eps=course.epsilon)


def reduce_gradients(parameters: Sequence[nn.Parameter], reduce: Callable[[Tensor], Tensor]) -> None:
    """Put the sum over processes into every gradient; one message for all. Absent ones are taken for 0."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    total = reduce(torch.cat([grad.reshape(-1) for grad in grads]))
    for parameter, grad, summed in zip(parameters, grads, total.split([g.numel() for g in grads]), strict=True):
        parameter.grad = summed.view(grad.shape).clone()


def check_sizes(n_rows: int, course: Course, n_processes: int, name: str) -> None:
    """Raise PassError if there is nothing to learn from, or not a sample for each process."""
    if not n_rows:
        raise PassError(f"{name}: held_out {course.held_out:g} leaves no sample to learn from; hold out less")
    if course.batch_size < n_processes:
        raise PassError(
            f"{name}: batch_size {course.batch_size} is less than the {n_processes} processes; give each a sample"
        )
