"""Read a layer's weight as matrices [groups, out, in] and what they multiply as rows [groups, n, in]. Torch.

Of a convolution, `in` runs over the positions of the kernel and, fastest, over the channels: the M inputs of an N:M
pattern are then channels at one position, which is what sparse tensor cores take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.blocks.block import BlockWork
from compress.blocks.layers import CONVOLUTIONS
from compress.blocks.lockstep import Tap, run_in_lockstep, tap_inputs
from compress.blocks.sharing import gather_from_processes
from compress.facts import InputGroup
from compress.pruning.layers import windows

CHUNK = 1 << 24
"""Numbers of patches that are held at once."""
Visit = Callable[[InputGroup, Tensor], None]


def groups_of(layer: nn.Module) -> int:
    """Return the number of groups of a convolution; 1 for other layers."""
    return int(getattr(layer, "groups", 1))


def as_matrices(weight: Tensor, groups: int = 1) -> Tensor:
    """Return a weight [out, in, *kernel] as [groups, out / groups, kernel * in]."""
    return weight.movedim(1, -1).reshape(groups, len(weight) // groups, -1)


def as_weight(matrices: Tensor, shape: Sequence[int]) -> Tensor:
    """Return matrices as the weight [out, in, *kernel], which is `shape`: the inverse of `as_matrices`."""
    out, inputs, *kernel = shape
    return matrices.reshape(out, *kernel, inputs).movedim(-1, 1).contiguous()


def inputs_of(layer: nn.Module, x: Tensor, rows: Tensor | None = None, at_once: int = CHUNK) -> Iterator[Tensor]:
    """Yield what the weight multiplies for the input `x`, in parts [groups, n, in].

    `rows` [B, T]: False where padding is, which is left out where `x` has that shape; not of a convolution.
    """
    if isinstance(layer, CONVOLUTIONS):
        size = math.prod(layer.kernel_size) * x[0].numel()
        for part in x.split(max(1, at_once // size)):
            yield patches(layer, part)
        return
    flat = x.reshape(-1, x.shape[-1])
    if rows is not None and len(flat) == rows.numel():
        flat = flat[rows.reshape(-1)]
    yield flat[None]


def patches(layer: Any, x: Tensor) -> Tensor:
    """Return [groups, n, kernel * in / groups]: what each output of a convolution is a product with.

    `x` [N, in, *size].
    """
    seen = windows(layer, x)  # [N, in, *places, *taps]
    n_space = len(layer.kernel_size)
    last = seen.permute(0, *range(2, 2 + 2 * n_space), 1)  # [N, *places, *taps, in]
    kernel, channels = math.prod(layer.kernel_size), x.shape[1]
    grouped = last.reshape(-1, kernel, layer.groups, channels // layer.groups)
    return grouped.permute(2, 0, 1, 3).reshape(layer.groups, len(grouped), -1)


def visit_inputs(
    block: BlockWork, convolutions: Sequence[str], visit: Visit, act: Callable[[InputGroup], None]
) -> None:
    """Run all micro-batches once and stop before each input group: `visit` for each micro-batch, then `act`.

    Works like `BlockWork.lockstep`, but `visit` gets rows [groups, n, in] and each of `convolutions` is an input group
    too.
    """
    if not convolutions:
        block.lockstep(lambda input_group, rows: visit(input_group, rows[None]), act)
        return
    taps = _order_taps(block, convolutions)
    modules = dict(taps)

    def visit_rows(input_group: InputGroup, x: Tensor, i: int) -> None:
        for rows in inputs_of(modules[input_group], x, block.calls[i].rows):
            visit(input_group, rows)

    runs = [partial(block.forward, i) for i in range(len(block.calls))]
    stops = run_in_lockstep(runs, taps, visit_rows, lambda go: go())
    with torch.no_grad(), closing(stops):
        for input_group in stops:
            act(input_group)


def _order_taps(block: BlockWork, convolutions: Sequence[str]) -> list[Tap]:
    """Return the block's input groups and the convolutions as the first micro-batch meets them, the same in all
    processes.

    What it does not meet comes last.
    """
    input_groups = (*block.input_groups, *(InputGroup((name,)) for name in convolutions))
    taps = [(input_group, block.layers[input_group.layers[0]]) for input_group in input_groups]
    met: list[int] = []
    if len(block.calls):
        with torch.no_grad(), tap_inputs(taps, lambda number, _: met.append(number)):
            block.forward(0)
    order: list[int] = next((numbers for numbers in gather_from_processes(met) if numbers), [])
    return [taps[number] for number in dict.fromkeys([*order, *range(len(taps))])]
