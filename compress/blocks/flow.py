"""Activations between the blocks: what the next block reads of each micro-batch, on the compressed and float path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.blocks.activations import HeldTensor, Holder, Interned, MicroBatch
from compress.blocks.block import BlockCall
from compress.blocks.skeleton import Form, Template, forms_of, passage


class BatchFlow:
    """The activations of one process's micro-batches. `hidden` and `floats`: what the next block reads on each path.

    `floats` is `hidden` itself as long as both paths are one.
    """

    def __init__(self, batches: Sequence[MicroBatch], holder: Holder) -> None:
        self.batches = batches
        self.holder = holder
        self.forms: tuple[Form, ...] = ()
        self.templates: list[tuple[Template, ...]] = []
        self.hidden: list[HeldTensor] = []
        self.floats: list[HeldTensor] | None = None

    def enter(
        self,
        module: nn.Module,
        names: Sequence[str],
        blocks: Sequence[nn.Module],
        real: Callable[..., Any],
    ) -> None:
        """Run everything up to the first block, and keep what every block is called with."""
        intern = Interned()
        with torch.no_grad():
            for batch in self.batches:
                self.forms = self.forms or forms_of(_bind_forward(module, batch.first), names, blocks, real)
                entered = passage(_bind_forward(module, batch.feeds), names, blocks, self.forms, intern)
                self.templates.append(entered.templates)
                self.hidden.append(self.holder.hold(entered.hidden))

    def enter_float(self, module: nn.Module, names: Sequence[str], blocks: Sequence[nn.Module]) -> None:
        """Run everything up to the first block for the float path, where what is before the blocks is not float."""
        with torch.no_grad():
            passages = [
                passage(_bind_forward(module, batch.feeds), names, blocks, self.forms, Interned())
                for batch in self.batches
            ]
        self.floats = [self.holder.hold(entered.hidden) for entered in passages]

    def calls(self, block: int) -> list[BlockCall]:
        """Return the calls of the k-th block on the compressed path, one for each micro-batch."""
        return [
            BlockCall(self._bind_arguments(i, self.templates[i][block]), batch.rows, batch.n_rows)
            for i, batch in enumerate(self.batches)
        ]

    def _bind_arguments(self, i: int, template: Template) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return a function that gives the i-th micro-batch's arguments when called: a call holds no activations."""
        return lambda: template.fill(self.hidden[i].get())

    def advance(self, outputs: Iterator[Tensor]) -> None:
        """Take a block's outputs as the next block's inputs; an input is dropped when its output is there."""
        for i, out in enumerate(outputs):
            self.hidden[i] = self.holder.hold(out)

    def float_forward(self, block: int, forward: Callable[..., Any]) -> list[HeldTensor]:
        """Run the k-th block with float weights on the float path and return what the next block reads there."""
        given = list(self.hidden) if self.floats is None else self.floats
        with torch.no_grad():
            for i in range(len(self.batches)):
                args, kwargs = self.templates[i][block].fill(given[i].get())
                given[i] = self.holder.hold(self.forms[block].take_hidden(forward(*args, **kwargs)).float())
        self.floats = given
        return given


def feeds_calls(batches: Sequence[MicroBatch]) -> list[BlockCall]:
    """Return the calls of the whole model, one for each micro-batch."""
    return [BlockCall(_bind_feeds(batch.feeds), batch.rows, batch.n_rows) for batch in batches]


def _bind_feeds(feeds: Mapping[str, Tensor]) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda: ((), dict(feeds))


def _bind_forward(module: nn.Module, feeds: Mapping[str, Tensor]) -> Callable[[], Any]:
    return lambda: module(**feeds)
