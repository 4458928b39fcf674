"""How far a student's tensors are from a teacher's: one number for each sample, 0 for equal ones. Torch.

Every function takes [b, ...] and gives [b], so that a batch may be cut into parts and weighed together again.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Distance = Literal["mse", "cosine"]
Pooling = Literal["none", "mean", "cls", "max"]


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Return KL(teacher || student) of softmax(logits / T) times T^2, nats, over the last dimension: [..., C] -> [...].

    T^2 keeps the size of the gradient as T grows (Hinton et al. 2015, arXiv:1503.02531, section 2).
    """
    s, t = (logits.float() if temperature == 1 else logits.float() / temperature for logits in (student, teacher))
    # In this form loss and gradient of equal logits are 0 to the last bit: Adam would make steps of any rounding error.
    own, other = s.logsumexp(-1, keepdim=True), t.logsumexp(-1, keepdim=True)
    gap = (own - other).squeeze(-1)
    return (gap + ((t - other).exp() * (t - s)).sum(-1)) * temperature**2


def each_label(logits: Tensor) -> Tensor:
    """Return logits [..., C] of labels that are told apart one by one as those of yes and no, [..., C, 2]."""
    return torch.stack([logits, torch.zeros_like(logits)], dim=-1)


def set_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross-entropy, mean over labels: outputs [b, C], labels 0 or 1 [b, C] -> [b]."""
    return F.binary_cross_entropy_with_logits(outputs.float(), labels.float(), reduction="none").mean(1)


def number_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error of numbers: [b] or [b, K] -> [b]."""
    gaps = (outputs.float().reshape(len(targets), -1) - targets.float().reshape(len(targets), -1)).square()
    return gaps.mean(1)


def label_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy for classes, the squared error for scores.

    Classes: int64 [b], outputs [b, C]. Scores: [b], outputs [b] or [b, 1].
    """
    if labels.dtype == torch.int64 and outputs.dim() > 1 and outputs.shape[-1] > 1:
        return F.cross_entropy(outputs.float(), labels, reduction="none")
    return (outputs.float().reshape(len(labels)) - labels.float()).square()


def relative_error(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean squared error over the teacher's mean square: [b, ...] -> [b].

    So layers of any size weigh the same; TinyBERT (Jiao et al. 2020, arXiv:1909.10351, eq. 8) has the plain mean.
    `mask` [b, T]: tokens of [b, T, D] that count.
    """
    kept = _token_factor(teacher, mask)
    error = ((student.float() - teacher.float()) * kept).square().flatten(1).mean(1)
    return error / (teacher.float() * kept).square().flatten(1).mean(1).clamp_min(1e-12)


def cosine_error(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return 1 - cosine over the last dimension, mean over tokens (DistilBERT, Sanh et al. 2019, arXiv:1910.01108).

    Taken as half the squared distance of the unit vectors, which is exactly 0 for equal ones, and so is its gradient.
    """
    apart = F.normalize(student.float(), dim=-1) - F.normalize(teacher.float(), dim=-1)
    return average_masked(apart.square().sum(-1) / 2, mask)  # [b] or [b, ...] -> [b]


def attention_error(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    """Return KL(teacher || student) of attention maps [b, heads, T, T], mean over heads and tokens.

    MiniLM, arXiv:2002.10957. Where the numbers of heads differ, the mean maps are compared.
    `mask` [b, T]: tokens, padding left out.
    """
    if student.shape[1] != teacher.shape[1]:
        student, teacher = student.mean(1, keepdim=True), teacher.mean(1, keepdim=True)
    s, t = student.float().clamp_min(1e-9), teacher.float().clamp_min(1e-9)
    gap = (t * (t.log() - s.log()) + s - t).sum(-1).mean(1)  # [b, T]; s - t adds up to 0 and makes the gradient exact
    return average_masked(gap, mask)


def average_masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """Average [b, T] -> [b], over the tokens of the mask; [b, ...] -> [b] without one."""
    if mask is None or values.dim() < 2 or values.shape[:2] != mask.shape:
        return values.flatten(1).mean(1) if values.dim() > 1 else values
    kept = mask.to(values.dtype)
    return (values.flatten(2).mean(2) if values.dim() > 2 else values).mul(kept).sum(1) / kept.sum(1).clamp_min(1)


def pool_tokens(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Pool one embedding a text: [b, T, D] and the mask [b, T] -> [b, D], as the runtime pools; not normalised."""
    kept = mask[..., None].to(hidden.dtype)
    if pooling == "mean":
        return (hidden * kept).sum(1) / kept.sum(1).clamp_min(1e-9)
    if pooling == "max":
        return hidden.masked_fill(kept == 0, torch.finfo(hidden.dtype).min).amax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), mask.bool().int().argmax(1)]  # cls: the first token


def _token_factor(teacher: Tensor, mask: Tensor | None) -> Tensor | float:
    """Return the factor that zeroes padding in [b, T, D]; 1.0 for anything else."""
    if mask is None or teacher.dim() != 3 or teacher.shape[:2] != mask.shape:
        return 1.0
    return mask[..., None].float()
