"""Large vocabularies: logits of few tokens at a time, and tables that a student keeps as its teacher has them. Torch.

Of 512 tokens and 151,936 words the logits of one model are 311 MB in float32, and a loss makes several copies of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compress.blocks.forward import name_outputs, remove_hooks_on_exit

PIECE_LOGITS = 2**25
"""Logits of a model that are there at once: 64 MiB in bfloat16. A product of fewer tokens reads the head for little."""
MEASURED_LOGITS = 2**20
"""Logits of which a loss makes its copies at once: few enough for a processor's caches, and for memory that is at hand.
Of 1,024 tokens over the 151,936 words of Qwen2.5-Coder 0.5B the divergence so takes 0.67 of its time."""
Measure = Callable[[slice], Callable[[Tensor, slice], Tensor]]
"""Which of the tokens -> (logits [m, V], which of those they are of) -> [m]."""


def find_head(module: nn.Module, feeds: Mapping[str, Tensor], least: int) -> nn.Linear | None:
    """Return the layer of `least` weights or more whose output the model gives first; None where there is none.

    A model that does anything to its logits (scales, caps them) has none: it is the very tensor that is looked for.
    """
    large = [part for part in module.modules() if isinstance(part, nn.Linear) and part.weight.numel() >= least]
    if not large:
        return None
    given: dict[nn.Linear, Tensor] = {}
    handles = [part.register_forward_hook(lambda part, args, out: given.update({part: out})) for part in large]
    with remove_hooks_on_exit(handles), torch.no_grad():
        first = next(iter(name_outputs(module(**feeds)).values()))
    return next((part for part, out in given.items() if out is first), None)


def share_tables(student: nn.Module, teacher: nn.Module, head: nn.Linear | None, least: int) -> list[str]:
    """Freeze the student's embeddings and head of `least` weights that are the teacher's; both then hold one tensor.

    Returns the names of their modules. Texts show a student few of the rows, and moments would need twice their memory.
    """
    others, shared = dict(teacher.named_modules()), []
    for name, part in student.named_modules():
        is_table = isinstance(part, nn.Embedding) or part is head
        other = others.get(name)
        if not is_table or other is None or part.weight.numel() < least or part.weight.shape != other.weight.shape:
            continue
        if torch.equal(part.weight, other.weight):
            part.requires_grad_(False)
            other.weight = part.weight
            shared.append(name)
    return shared


def reduce_weights(module: nn.Module) -> None:
    """Hold in bfloat16 the matrices that autocast would round to it in every call: the same outputs to the last bit."""
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            holders.setdefault(parameter, []).append(part)
    for parameter, parts in holders.items():
        if parameter.dim() == 2 and all(type(part) is nn.Linear for part in parts):
            reduced = nn.Parameter(parameter.detach().bfloat16(), requires_grad=False)
            for part in parts:
                part.register_parameter("weight", reduced)


class Head:
    """An output layer that a model's forward passes over, so that it is asked for a few tokens at a time.

    `reduced`: it is computed in bfloat16; a layer that is not trained is rounded to that once. `like`: another model's,
    whose weight may be the same.
    """

    def __init__(self, layer: nn.Linear, reduced: bool, like: Head | None = None) -> None:
        self.layer, self.trained = layer, layer.weight.requires_grad
        self.asked: nn.Linear
        if like is not None and like.layer.weight is layer.weight and layer.bias is like.layer.bias is None:
            self.asked = like.asked
        else:
            self.asked = layer if self.trained or not reduced else copy.deepcopy(layer).bfloat16()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits: [m, D] -> [m, V]."""
        return self.asked.to(hidden.device)(hidden)

    @contextmanager
    def pass_over(self) -> Iterator[None]:
        """Let the layer give what it is given while the context is open."""
        layer: Any = self.layer
        layer.forward = lambda hidden: hidden
        try:
            yield
        finally:
            del layer.forward


def measure_in_pieces(measure: Measure, hidden: Tensor, head: Head) -> Tensor:
    """Return `measure` of the logits that a head gives of hidden states [n, D], of few tokens at a time: [n]."""

    def measure_piece(part: Tensor, tokens: slice) -> Tensor:
        gaps: Tensor = _ByRows.apply(head(part), measure(tokens))
        return gaps

    pieces = _split(len(hidden), PIECE_LOGITS // head.layer.out_features)
    if head.trained:  # its gradients, too, are of all pieces
        return torch.cat([checkpoint(measure_piece, hidden[piece], piece, use_reentrant=False) for piece in pieces])
    gaps: Tensor = _InPieces.apply(hidden, measure_piece, pieces)
    return gaps


def _split(n: int, size: int) -> list[slice]:
    """Return `n` in slices of `size`, at least of 1; one, empty, of none."""
    return [slice(start, start + max(size, 1)) for start in range(0, max(n, 1), max(size, 1))]


class _ByRows(torch.autograd.Function):
    """What is measured of logits [m, V], a few rows at a time; the slope of each is taken with it."""

    @staticmethod
    def forward(context: Any, logits: Tensor, measure: Callable[[Tensor, slice], Tensor]) -> Tensor:
        wanted, gaps = context.needs_input_grad[0], list[Tensor]()
        slopes = torch.empty_like(logits) if wanted else None
        for rows in _split(len(logits), MEASURED_LOGITS // logits.shape[1]):
            few = logits[rows].detach().requires_grad_(wanted)
            with torch.set_grad_enabled(wanted):
                gap = measure(few, rows)
                if slopes is not None:
                    (slopes[rows],) = torch.autograd.grad(gap.sum(), few)
            gaps.append(gap.detach())
        if slopes is not None:
            context.save_for_backward(slopes)
        return torch.cat(gaps)

    @staticmethod
    def backward(context: Any, wanted: Tensor) -> tuple[Tensor, None]:
        (slopes,) = context.saved_tensors
        # A sum wants each as it is. To multiply bfloat16 by float32 ones took a tenth of a step of Qwen2.5-Coder 0.5B.
        return slopes if bool((wanted == 1).all()) else slopes.mul_(wanted[:, None]), None


class _InPieces(torch.autograd.Function):
    """Each token's number depends on its own state alone: its slope is taken at once, and no logits are kept for it."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, measure: Callable[..., Tensor], pieces: list[slice]) -> Tensor:
        gaps, slopes = list[Tensor](), list[Tensor]()
        for piece in pieces:
            with torch.set_grad_enabled(context.needs_input_grad[0]):
                part = hidden[piece].detach().requires_grad_(context.needs_input_grad[0])
                gap = measure(part, piece)
                if context.needs_input_grad[0]:
                    slopes += torch.autograd.grad(gap.sum(), part)
            gaps.append(gap.detach())
        if slopes:
            context.save_for_backward(torch.cat(slopes))
        return torch.cat(gaps)

    @staticmethod
    def backward(context: Any, wanted: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = context.saved_tensors
        return slopes * wanted[:, None].to(slopes.dtype), None, None
