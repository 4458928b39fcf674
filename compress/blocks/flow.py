"""Activations between the blocks: what the next block reads of each micro-batch, on the compressed and float path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.blocks.activations import Held, Holder, Interned, MicroBatch
from compress.blocks.skeleton import Form, Template, forms_of, passage
from compress.blocks.step import Call


class Flow:
    """Of one process's micro-batches. `hidden` and `floats`: what the next block reads on each path.

    `floats` is `hidden` itself as long as both paths are one.
    """

    def __init__(self, batches: Sequence[MicroBatch], holder: Holder) -> None:
        self.batches = batches
        self.holder = holder
        self.forms: tuple[Form, ...] = ()
        self.templates: list[tuple[Template, ...]] = []
        self.hidden: list[Held] = []
        self.floats: list[Held] | None = None

    def enter(
        self,
        module: nn.Module,
        names: Sequence[str],
        blocks: Sequence[nn.Module],
        real: Callable[..., Any],
    ) -> None:
        """Run everything up to the first block, noting what every block is called with."""
        intern = Interned()
        with torch.no_grad():
            for batch in self.batches:
                self.forms = self.forms or forms_of(_run(module, batch.first), names, blocks, real)
                found = passage(_run(module, batch.feeds), names, blocks, self.forms, intern)
                self.templates.append(found.templates)
                self.hidden.append(self.holder.hold(found.hidden))

    def enter_float(self, module: nn.Module, names: Sequence[str], blocks: Sequence[nn.Module]) -> None:
        """The float path's own way up to the first block, where what is before the blocks is not float."""
        with torch.no_grad():
            found = [
                passage(_run(module, batch.feeds), names, blocks, self.forms, Interned()) for batch in self.batches
            ]
        self.floats = [self.holder.hold(one.hidden) for one in found]

    def calls(self, block: int) -> list[Call]:
        """Of the k-th block on the compressed path."""
        return [
            Call(self._arguments(i, self.templates[i][block]), batch.rows, batch.n_rows)
            for i, batch in enumerate(self.batches)
        ]

    def _arguments(self, i: int, template: Template) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
        """Of the i-th micro-batch as it stands when they are asked for: a call holds no activations itself."""
        return lambda: template.filled(self.hidden[i].get())

    def advance(self, outputs: Iterator[Tensor]) -> None:
        """Take a block's outputs for what the next one reads; an input is let go of when its output is there."""
        for i, out in enumerate(outputs):
            self.hidden[i] = self.holder.hold(out)

    def float_forward(self, block: int, forward: Callable[..., Any]) -> list[Held]:
        """Take what the k-th block with float weights gives on the float path for what the next one reads there."""
        given = list(self.hidden) if self.floats is None else self.floats
        with torch.no_grad():
            for i in range(len(self.batches)):
                args, kwargs = self.templates[i][block].filled(given[i].get())
                given[i] = self.holder.hold(self.forms[block].taken(forward(*args, **kwargs)).float())
        self.floats = given
        return given


def feeds_calls(batches: Sequence[MicroBatch]) -> list[Call]:
    """Of the whole model."""
    return [Call(_fed(batch.feeds), batch.rows, batch.n_rows) for batch in batches]


def _fed(feeds: Mapping[str, Tensor]) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda: ((), dict(feeds))


def _run(module: nn.Module, feeds: Mapping[str, Tensor]) -> Callable[[], Any]:
    return lambda: module(**feeds)
