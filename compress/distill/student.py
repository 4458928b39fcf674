"""A smaller model that starts from a larger one of its class; and a teacher called by its student's names. Torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.blocks.materialise import plain

Choose = Callable[[int, int], Sequence[int]]
"""(how many blocks the teacher has in a list, how many the student) -> of which each of the student's starts."""


def start_from(student: nn.Module, teacher: nn.Module, choose: Choose) -> None:
    """Give the student, in place, the leading part of each of the teacher's tensors of the same name.

    Where the student is larger along an axis, or has a tensor of its own, its values stay. `choose` is asked about
    every list of blocks of which the student has another number.
    """
    known = {plain(name): tensor for name, tensor in teacher.state_dict().items()}
    places = _match_blocks(student, teacher, choose)
    with torch.no_grad():
        for name, values in student.state_dict().items():
            source = known.get(_to_teacher_name(plain(name), places))
            if source is not None and source.dim() == values.dim():
                _copy_corner(values, source)


def _match_blocks(student: nn.Module, teacher: nn.Module, choose: Choose) -> dict[str, Sequence[int]]:
    """Map each list of blocks that differs in length to the teacher's that each of the student's starts from."""
    own, others = (
        {plain(path): len(part) for path, part in module.named_modules() if isinstance(part, nn.ModuleList)}
        for module in (student, teacher)
    )
    return {path: choose(others[path], n) for path, n in own.items() if others.get(path, n) != n}


def _to_teacher_name(name: str, places: Mapping[str, Sequence[int]]) -> str:
    for path, blocks in places.items():
        if name.startswith(f"{path}."):
            number, _, rest = name.removeprefix(f"{path}.").partition(".")
            return f"{path}.{blocks[int(number)]}.{rest}"
    return name


def _copy_corner(values: Tensor, source: Tensor) -> None:
    """Copy as much of `source` as `values` (changed in place) has room for."""
    common = tuple(slice(0, min(a, b)) for a, b in zip(values.shape, source.shape, strict=True))
    values[common].copy_(source[common])


class CalledAs(nn.Module):
    """A model whose forward takes its inputs under other names. `names`: those -> its own."""

    def __init__(self, wrapped: nn.Module, names: Mapping[str, str]) -> None:
        super().__init__()
        self.wrapped, self.names = wrapped, dict(names)

    def forward(self, **feeds: Tensor) -> Any:
        return self.wrapped(**{self.names[name]: tensor for name, tensor in feeds.items()})


def rename_inputs(module: nn.Module, own: Mapping[str, str], wanted: Mapping[str, str]) -> nn.Module:
    """Return the module, called by the parameters `wanted`. Both: input -> parameter of forward."""
    names = {wanted[key]: parameter for key, parameter in own.items() if key in wanted}
    return module if all(a == b for a, b in names.items()) else CalledAs(module, names)
