"""What the passes that train share around training itself: zeros that stay, what the report says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from compress.distill.training_log import TrainLog, numbers, summary
from compress.facts import Note


def zero_keeper(module: nn.Module) -> Callable[[int], None]:
    """Return a function that puts back the zeros that matrices and kernels have now."""
    masks = [(p, p.detach() != 0) for p in module.parameters() if p.dim() > 1 and bool((p == 0).any())]

    def put_back(step: int) -> None:
        with torch.no_grad():
            for parameter, mask in masks:
                parameter.mul_(mask.to(parameter.device))

    return put_back


def no_keeper(step: int) -> None:
    """Keep no zeros: they may go."""


def gather_numbers(kind: str, log: TrainLog) -> dict[str, dict[str, float]]:
    """Return the numbers, and the curves as step -> loss."""
    return {
        kind: numbers(log) | {"seconds": round(log.seconds, 1)},
        f"{kind}: training loss": {str(step): loss for step, loss in log.curve},
        f"{kind}: loss held out": {str(step): loss for step, loss in log.looks},
    }


def describe_training(kind: str, log: TrainLog) -> Note:
    """Return a note of what training came to; a warning where it broke, or nothing was better than the start."""
    stood_still = log.start_loss is not None and not log.best_step
    level: Literal["info", "warning"] = "warning" if log.end == "diverged" or stood_still else "info"
    return Note(level, summary(kind, log))


def describe_kept_steps(log: TrainLog) -> str:
    """Say how much of it is in the weights that were kept."""
    return "nothing" if log.best_step == 0 else f"{log.best_step} steps"
