"""Positions of several axes: how a decoder counts them where images lie between its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


@dataclass(frozen=True)
class ImagePositions:
    """How an image's tokens go on from what is before it, and what comes behind it, the same for every image."""

    within: Tensor
    """Of each token of an image, less its first one's: int64 [axes, n_tokens]."""
    advance: int
    """By how much an image moves on what comes behind it."""

    def count(self, positions: Tensor, marks: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Return positions [axes, batch, t] of tokens, and the next call's shift.

        `positions`: as of a text's, [batch, t]; `marks`: whether a token is an image's; `shift`: by how much images of
        earlier calls have moved on less than their tokens, [batch, 1].
        """
        n = self.within.shape[1]
        before = marks.to(torch.int64).cumsum(1) - marks.to(torch.int64)
        fewer = n - self.advance
        place = before % n
        moved = torch.where(marks, (self.within - torch.arange(n, device=place.device))[:, place], 0)
        axes = positions - shift - before // n * fewer + moved
        return axes, shift + marks.sum(1, keepdim=True) // n * fewer


def fit_positions(count: Callable[..., Any], given: Any, ids: Tensor, token_id: int) -> ImagePositions | None:
    """Return what counts positions as a model does; None where there is none such.

    `count`: the model's own method, and `given`, its (args, kwargs) for a question about an image, `ids` [1, t], of
    which the images' tokens are `token_id`. The question is tried once, and twice, one behind the other.
    """

    def repeat(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.cat([value, value], 1 if value.shape == ids.shape else 0)

    one, two = (count(*args, **kwargs)[0] for args, kwargs in (given, tree_map(repeat, given)))
    marks = ids == token_id
    if one.dim() != 3 or one.shape[1:] != ids.shape or bool(marks[0, -1]):
        return None
    within = one[:, 0, marks[0]] - int(marks.nonzero()[0, 1])
    found = ImagePositions(within, int(one[0, 0, -1]) + 1 - ids.shape[1] + within.shape[1])
    for wanted, tokens in ((one, ids), (two, repeat(ids))):
        counted, shift = torch.arange(tokens.shape[1])[None], torch.zeros(1, 1, dtype=torch.int64)
        if not torch.equal(found.count(counted, tokens == token_id, shift)[0], wanted):
            return None
    return found
