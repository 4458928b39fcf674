"""Gradients of a model's outputs, sent back through its blocks: one block is in memory at a time, as on the way there.

What each block reads is kept on the way forward; then the output's gradient goes back, last block first, each block
being run once more. So the gradient with respect to any layer's output is exact, however large the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.blocks.activations import HeldTensor, Holder, LeafTensor, MicroBatch, micro_batches
from compress.blocks.block import BlockWork
from compress.blocks.sharing import share
from compress.blocks.stream import plan_blocks
from compress.blocks.stream_memory import HELD_BYTES
from compress.blocks.streamed import StreamedModel
from compress.blocks.work import AFTER, BEFORE, BatchFlow, Planned, Work
from compress.context import PassContext
from compress.errors import PassError
from compress.rounding.products import Compute
from compress.store.durable import temporary_folder

Cotangent = Callable[[int, Tensor, Tensor | None], Tensor]
"""(number of the micro-batch, the model's output, rows [B, T] that are no padding, or None) -> the gradient with
respect to the output, of its shape."""


@dataclass(frozen=True)
class BackwardBlock:
    """A block on the way back: `run(watch)` sends every micro-batch through it, forward and back.

    `watch(i)` is called before micro-batch `i` goes forward.
    """

    work: BlockWork
    run: Callable[[Callable[[int], None]], None]


def first_micro_batches(model: StreamedModel, context: PassContext, most_rows: int, at_once: int) -> list[MicroBatch]:
    """Return the first micro-batches of the calibration data: as many as have `most_rows` tokens, one at least.

    `at_once`: tokens of one of them, at most, unless one sample has more.
    """
    rows = at_once if context.rows is None else min(at_once, context.rows)
    chosen: list[MicroBatch] = []
    for batch in micro_batches(context.batches, model.parameters, rows):
        if chosen and sum(one.n_rows for one in chosen) + batch.n_rows > most_rows:
            break
        chosen.append(batch)
    return chosen


def send_back(
    model: StreamedModel,
    context: PassContext,
    batches: Sequence[MicroBatch],
    cotangent: Cotangent,
    compute: Compute = "float32",
) -> Generator[BackwardBlock, None, None]:
    """Yield the parts of a model, last first: what is behind the blocks, each block, what is before them.

    Of several processes each sends its share of `batches`; `cotangent` gets their numbers among all. Whoever takes a
    block runs it once, before the next one is asked for.
    """
    mine = [(i, batch) for i, batch in enumerate(batches) if share().mine(i)]
    work = Work(
        model,
        [batch for _, batch in mine],
        Holder(None),
        False,
        compute,
        torch.device(context.device),
    )
    with ExitStack() as held:
        yield from _Backward(model, work, [i for i, _ in mine], cotangent, held).blocks()


class _Backward:
    """The state of one way there and back. `gradients`: of what the part before gave, by micro-batch."""

    def __init__(
        self, model: StreamedModel, work: Work, numbers: Sequence[int], cotangent: Cotangent, held: ExitStack
    ) -> None:
        self.work, self.numbers, self.cotangent, self.held = work, numbers, cotangent, held
        self.plan = plan_blocks(model)
        self.after = model.structure.after
        self.gradients: list[Tensor | None] = []

    def blocks(self) -> Iterator[BackwardBlock]:
        if self.work.whole:
            yield from self._open(self.plan[0], None)
            return
        inside = [entry for entry in self.plan if entry.block is not None]
        flow = self.work.enter()
        if len(inside) * sum(hidden.get().nbytes for hidden in flow.hidden) > HELD_BYTES:
            flow.holder = Holder(self.held.enter_context(temporary_folder()))
        inputs = [self._advance(entry, flow) for entry in inside]
        if flow.hands_on_floats:
            raise PassError(
                f"{inside[0].name}: blocks read numbers of the one before beside its hidden state, through which no "
                "gradient is sent back; use a pass that needs none, as gptq"
            )
        last = Planned(len(self.plan), AFTER, self.after)
        yield from self._open(last, list(flow.hidden))
        for entry, (held, flow.beside) in zip(reversed(inside), reversed(inputs), strict=True):
            yield from self._open(entry, held)
        for entry in self.plan:
            if entry.name == BEFORE and entry.block is None:
                yield from self._open(entry, None)

    def _advance(self, entry: Planned, flow: BatchFlow) -> tuple[list[HeldTensor], list[dict[int, Any]]]:
        """Send the data through a block; return the hidden states that it read, and what beside them."""
        held = list(flow.hidden), list(flow.beside)
        block = self.work.open(entry)
        with torch.no_grad():
            flow.advance(block.forward(i) for i in range(len(held[0])))
        block.close()
        self.work.release()
        return held

    def _open(self, entry: Planned, held: Sequence[HeldTensor] | None) -> Iterator[BackwardBlock]:
        """Yield one part; `held`: what it reads, where a gradient is to go on from it."""
        leaves = [LeafTensor(tensor) for tensor in held or ()]
        if leaves and self.work.flow is not None:
            self.work.flow.hidden = list(leaves)
        block = self.work.open(entry)
        last = self.work.whole or entry.name == AFTER

        def run(watch: Callable[[int], None]) -> None:
            gradients: list[Tensor | None] = []
            for i in range(len(block.calls)):
                watch(i)
                with torch.enable_grad():
                    out = block.forward(i)
                given = self._cotangent_of(block, i, out) if last else self.gradients[i]
                if out.requires_grad and given is not None:
                    torch.autograd.backward(out, given.to(out.dtype))
                gradients.append(leaves[i].take_gradient() if leaves else None)
                del out
            self.gradients = gradients

        yield BackwardBlock(block, run)
        block.close()
        self.work.release()

    def _cotangent_of(self, block: BlockWork, i: int, out: Tensor) -> Tensor:
        return self.cotangent(self.numbers[i], out.detach(), block.calls[i].rows)
