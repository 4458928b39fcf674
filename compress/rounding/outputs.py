"""What a module gives, as one tensor: for all rooms that run modules without knowing their family. Torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import PassError

MASK = "attention_mask"


def list_outputs(out: Any, feeds: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the floating tensors of what a model gives for some feeds: itself, or of several, by place or by name.

    Those of one number for each token, [b, T] as the mask, are one side by side: [b, T, k], as the beginnings and ends
    of answers; one number for each sample, [b], is [b, 1]. So the last dimension is of one size for all feeds.
    PassError where no output is floating: of choices alone, nothing small can be told.
    """
    values = [out] if isinstance(out, Tensor) else out.values() if hasattr(out, "values") else out
    floating = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    if not floating:
        raise PassError("the model gives no floating-point output to compare; let it give its logits, too")
    listed = [value.reshape(-1, 1) if value.dim() < 2 else value for value in floating]
    mask = feeds.get(MASK)
    of_tokens = [value for value in listed if mask is not None and value.shape == mask.shape]
    if not of_tokens:
        return listed
    others = [value for value in listed if mask is None or value.shape != mask.shape]
    joined = torch.stack(of_tokens, -1)
    return [joined, *others] if listed[0] is of_tokens[0] else [*others, joined]


def measure_units(outputs: list[Tensor]) -> list[float]:
    """Return what each of several outputs is measured in, so that one in pixels hides none of small numbers.

    Its standard deviation; 1 for an only one.
    """
    if len(outputs) == 1:
        return [1.0]
    return [max(float(out.detach().float().std(correction=0)), 1e-12) for out in outputs]


def square_distance(outputs: list[Tensor], targets: list[Tensor]) -> float:
    """Return the squared error of outputs against a whole model's, of several each in its unit, summed."""
    units = measure_units(targets)
    return sum(
        float((out - target).double().square().sum()) / unit**2
        for out, target, unit in zip(outputs, targets, units, strict=True)
    )


def first_output(out: Any) -> Tensor:
    """Return the first tensor of what a module gives: itself, or of several, in a sequence or by name."""
    if isinstance(out, Tensor):
        return out
    values = out.values() if hasattr(out, "values") else out
    return next(value for value in values if isinstance(value, Tensor))


def gives_logits(module: nn.Module) -> bool:
    """Return whether the first output of a module is called logits: unnormalised logarithms of probabilities.

    Wrapped models of `compress.models.huggingface` name their outputs; of one that names none nothing is known.
    """
    names = (getattr(module, "output", ""), *getattr(module, "outputs", ()))
    return next((name for name in names if name), "").endswith("logits")


def model_output(out: Any, feeds: Mapping[str, Tensor]) -> Tensor:
    """Return the first of `list_outputs`."""
    return list_outputs(out, feeds)[0]
