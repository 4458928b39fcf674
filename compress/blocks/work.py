"""Where a stream's blocks come from: one module whose parts are filled, worked on, run and emptied in turn.

Between the blocks lie the activations: what the next block reads of each micro-batch, on the compressed and float path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compress.blocks import heap
from compress.blocks.activations import HeldTensor, Holder, Interned, MicroBatch, map_tensors, running
from compress.blocks.block import BlockCall, BlockWork, Part
from compress.blocks.device import CPU
from compress.blocks.layers import is_layer
from compress.blocks.materialise import Holders, empty, fill, holders, plain
from compress.blocks.skeleton import (
    Form,
    StopForward,
    Template,
    first_hidden,
    forms_of,
    passage,
    standing_in,
    until_reached,
    without_cache,
)
from compress.blocks.store import WeightStore
from compress.blocks.tables import find_tables, row_reader
from compress.facts import InputGroup
from compress.rounding.outputs import first_output
from compress.rounding.products import Compute

if TYPE_CHECKING:
    from compress.blocks.streamed import StreamedModel

Read = Callable[[str], Tensor]
BEFORE, AFTER = "before", "after"
"""Names of the parts outside the blocks."""


@dataclass(frozen=True)
class Planned:
    """A block to come, or a part outside the blocks. `block`: its number among the blocks; None outside of them."""

    index: int
    name: str
    input_groups: tuple[InputGroup, ...]
    block: int | None = None
    feeds_more: bool = False
    """A later block reads what this one gives."""


class Work:
    """A module on meta, the store that fills it, and the data on its way. `batches` None: weights alone."""

    def __init__(
        self,
        model: StreamedModel,
        batches: Sequence[MicroBatch] | None,
        holder: Holder,
        float_too: bool,
        compute: Compute,
        device: torch.device = CPU,
        together: bool = True,
        lazy: bool = False,
    ) -> None:
        self.lazy = lazy and batches is None
        self.store, self.compute, self.float_too = model.store, compute, float_too
        self.device, self.together = device, together
        self.build = model.build
        self.module = self._build_module()
        parts = {plain(path): part for path, part in self.module.named_modules()}
        self.structure = model.structure
        self.names = [block.name for block in model.structure.blocks]
        self.experts = {block.name: block.experts for block in model.structure.blocks}
        self.whole = self.names == [""]
        self.blocks = [] if self.whole else [parts[name] for name in self.names]
        self._place_lookups(self.module)
        self.tables = find_tables(self.module, model.structure, model.tied)
        self.late = {layer for input_group in model.structure.after for layer in input_group.layers}
        self.flow = None if batches is None else BatchFlow(batches, holder, device)
        self._floats: list[HeldTensor] | None = None

    def open(self, entry: Planned) -> BlockWork:
        """Return the block with its weights and the calls that reach it."""
        if entry.block is None:
            return self._open_outside(entry)
        return self._open_whole(entry) if self.whole else self._open_block(entry, entry.block)

    def advance(self, block: BlockWork) -> None:
        """Compute what the next block reads."""
        assert self.flow is not None
        self.flow.advance(block.outputs())

    def drop(self, path: Path) -> None:
        """Read from now on what a finished block left in a file, and drop its weights from memory."""
        self.store = self.store.over([path])
        self.release()

    def release(self) -> None:
        """Drop the weights of what was opened from memory."""
        self._floats = None
        if not self.lazy:
            empty(self.module)
        heap.return_all()

    def enter(self) -> BatchFlow:
        """Run everything up to the first block, unless that was done; return the data on its way."""
        self._enter_blocks()
        assert self.flow is not None
        return self.flow

    def replay(self, entry: Planned, path: Path) -> None:
        """Pass the data through a block that an earlier run finished, whose tensors are in the file `path`."""
        if entry.feeds_more and entry.block is not None:
            self._enter_blocks()
            float_store, self.store = self.store, self.store.over([path])
            self.advance(self._open_block(entry, entry.block, float_store))
        self.drop(path)

    def _build_module(self) -> nn.Module:
        """Return a new module, its parameters on meta, its buffers on the device."""
        module = self.build()
        without_cache(module)
        for part in module.modules():
            part._buffers |= {key: held.to(self.device) for key, held in part._buffers.items() if held is not None}
        return module

    def _place_lookups(self, module: nn.Module) -> None:
        """Let tables outside the blocks look rows up where they lie, in float32 and on the device afterwards."""
        for _, part in self._iter_outside(module):
            if _is_table(part):
                part.register_forward_pre_hook(_move_indices, with_kwargs=True)
                part.register_forward_hook(lambda module, args, out: out.to(self.device, torch.float32))

    def _open_block(self, entry: Planned, number: int, float_store: WeightStore | None = None) -> BlockWork:
        block, flow = self.blocks[number], self.flow
        if flow is None:
            if not self.lazy:
                self._fill_module(block, entry.name, self.store.read)
            return BlockWork(self._make_part(entry, block, layers_of(block, entry.name), [], _no_data))
        self._enter_blocks()
        if self.float_too:
            self._fill_module(block, entry.name, (float_store or self.store).read_float)
            self._floats = flow.float_forward(number, block)
        self._fill_module(block, entry.name, self.store.read)
        calls = flow.calls(number)

        def run(i: int) -> Tensor:
            args, kwargs = calls[i].arguments()
            return flow.take(number, i, block(*args, **kwargs))

        return BlockWork(self._make_part(entry, block, layers_of(block, entry.name), calls, run))

    def _open_whole(self, entry: Planned) -> BlockWork:
        """Return the whole model as one block."""
        if self.flow is None:
            if not self.lazy:
                self._fill_module(self.module, "", self.store.read)
            return BlockWork(self._make_part(entry, self.module, layers_of(self.module), [], _no_data))
        batches = self.flow.batches

        def run(i: int) -> Tensor:
            return first_output(self.module(**batches[i].on(self.device).feeds))

        if self.float_too:
            self._fill_module(self.module, "", self.store.read_float)
            with torch.no_grad():
                self._floats = [self.flow.holder.hold(run(i)) for i in range(len(batches))]
        self._fill_module(self.module, "", self.store.read)
        calls = self.flow.feeds_calls()
        return BlockWork(self._make_part(entry, self.module, layers_of(self.module), calls, run))

    def _open_outside(self, entry: Planned) -> BlockWork:
        """Return a part outside the blocks: forwards of "before" end at the first block, "after" begins at the last."""
        after = entry.name == AFTER
        whole = not after or self.flow is None
        if not self.lazy:
            self._fill_outside(self.module, late=after or self.flow is None, views=not whole)
        layers = {name: layer for name, layer in self._find_outside_layers().items() if (name in self.late) == after}
        if self.flow is None:
            return BlockWork(self._make_part(entry, self.module, layers, [], _no_data))
        if after:
            self._enter_blocks()
        run = self._make_after_run(self.module, self.flow.hidden) if after else self._make_before_run()
        part = self._make_part(entry, self.module, layers, self.flow.feeds_calls(), run)
        return BlockWork(
            replace(part, float_outputs=self._make_float_after_run()) if after and self.float_too else part
        )

    def _make_before_run(self) -> Callable[[int], Tensor]:
        """Return a function that runs a forward as far as the first block and gives what that block reads."""
        assert self.flow is not None
        batches = self.flow.batches

        def call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            raise StopForward(first_hidden(args, kwargs, self.names[number]))

        def run(i: int) -> Tensor:
            with standing_in(self.blocks, call):
                return until_reached(lambda: self.module(**batches[i].on(self.device).feeds))

        return run

    def _make_after_run(self, module: nn.Module, hidden: Sequence[HeldTensor]) -> Callable[[int], Tensor]:
        """Return a function that gives the model's output in a forward whose last block gives `hidden`."""
        assert self.flow is not None
        flow = self.flow
        parts = {plain(path): part for path, part in module.named_modules()}
        blocks = [parts[name] for name in self.names]

        def run(i: int) -> Tensor:
            def call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                last = number == len(blocks) - 1
                given = hidden[i].get() if last else first_hidden(args, kwargs, self.names[number])
                return flow.forms[number].give_hidden(given, number)

            with standing_in(blocks, call):
                return first_output(module(**flow.batches[i].on(self.device).feeds))

        return run

    def _make_float_after_run(self) -> Callable[[int], Tensor]:
        """Return a function that gives the float model's output, from another module, made on the first call."""
        flow = self.flow
        made: list[Callable[[int], Tensor]] = []
        assert flow is not None

        def run(i: int) -> Tensor:
            if not made:
                module = self._build_module()
                self._place_lookups(module)
                self._fill_outside(module, late=True, views=False, floats=True)
                made.append(self._make_after_run(module, flow.hidden if flow.floats is None else flow.floats))
            with torch.no_grad():
                return made[0](i)

        return run

    def _enter_blocks(self) -> None:
        """Find what every block is called with, the first time that it is needed."""
        flow = self.flow
        assert flow is not None
        if flow.hidden or not flow.batches:
            return
        self._fill_outside(self.module, late=False, views=True)
        flow.enter(self.module, self.names, self.blocks, self._run_block)
        if self.float_too and any(map(self.store.is_quantized, self._find_outside_layers())):
            self._fill_outside(self.module, late=False, views=True, floats=True)
            flow.enter_float(self.module, self.names, self.blocks)
        empty(self.module)

    def _run_block(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block's own forward, in a run in which all blocks are replaced by stubs."""
        block = self.blocks[number]
        self._fill_module(block, self.names[number], self.store.read)
        out = type(block).forward(block, *args, **kwargs)
        empty(block)
        return out

    def _make_part(
        self,
        entry: Planned,
        block: nn.Module,
        layers: dict[str, nn.Module],
        calls: Sequence[BlockCall],
        run: Callable[[int], Tensor],
    ) -> Part:
        floats = self._floats
        held = holders(block, self.store.tied, entry.name if entry.block is not None else "")
        filled: Holders = {
            name: places for name, places in held.items() if _is_real(places[0][0]._parameters[places[0][1]])
        }
        return Part(
            index=entry.index,
            name=entry.name,
            module=block,
            layers=layers,
            input_groups=entry.input_groups,
            holders=filled,
            run=run,
            calls=calls,
            store=self.store,
            float_outputs=None if floats is None else lambda i: floats[i].get(),
            runs_on=entry.feeds_more,
            compute=self.compute,
            device=self.device,
            together=self.together,
            lazy=self.lazy,
            tables=self.tables,
            experts=self.experts.get(entry.name, ()),
        )

    def _fill_module(self, module: nn.Module, name: str, read: Read) -> None:
        fill(module, self._place(read), self.store.tied, name)

    def _place(self, read: Read) -> Read:
        """Return the function that reads to the device what `read` reads to main memory."""
        return lambda name: read(name).to(self.device)

    def _iter_outside(self, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        """Yield the modules outside the blocks: (plain path, module)."""
        for path, part in module.named_modules():
            if path if self.whole else self.structure.find_block(plain(path)) is None:
                yield plain(path) if path != "wrapped" else "", part

    def _find_outside_layers(self) -> dict[str, nn.Module]:
        return {path: part for path, part in self._iter_outside(self.module) if is_layer(part)}

    def _fill_outside(self, module: nn.Module, late: bool, views: bool, floats: bool = False) -> None:
        """Fill the weights outside the blocks; without `late`, not those of the layers that read what the blocks give.

        With `views`, tables of embeddings stay in their files: only the rows that are looked up are ever read, or, of a
        table in few bits, dequantized.
        """
        parts = {path: part for path, part in self._iter_outside(module) if late or path not in self.late}
        tables = self._find_tables(parts) if views else {}
        for part in parts.values():
            vars(part).pop("forward", None)  # a look-up in few bits, of the last time
        for path, part in tables.items():
            if not floats and self.store.is_quantized(path):
                part.forward = row_reader(self.store, path)
                continue
            view = self.store.view(f"{path}.weight", floats)
            if view is None:
                view = self.store.read(f"{path}.weight")
            part._parameters["weight"] = nn.Parameter(view, requires_grad=False)
        only = {id(part) for path, part in parts.items() if path not in tables}
        read = self.store.read_float if floats else self.store.read
        fill(module, self._place(read), self.store.tied, only=only)

    def _find_tables(self, parts: dict[str, nn.Module]) -> dict[str, nn.Module]:
        """Return the embeddings among `parts` whose weight no other of them shares."""
        tied = self.store.tied
        owners = [tied.get(name, name) for path, part in parts.items() for name in _own_names(path, part)]
        return {
            path: part
            for path, part in parts.items()
            if _is_table(part) and owners.count(tied.get(f"{path}.weight", f"{path}.weight")) == 1
        }


class BatchFlow:
    """The activations of one process's micro-batches. `hidden` and `floats`: what the next block reads on each path.

    `floats` is None as long as both paths are one. `beside` and `floats_beside`: what it reads of the block before
    beside the hidden state, by element.
    """

    def __init__(self, batches: Sequence[MicroBatch], holder: Holder, device: torch.device = CPU) -> None:
        self.batches = batches
        self.holder = holder
        self.device = device
        self.forms: tuple[Form, ...] = ()
        self.templates: list[tuple[Template, ...]] = []
        self.hidden: list[HeldTensor] = []
        self.floats: list[HeldTensor] | None = None
        self.beside: list[dict[int, Any]] = [{} for _ in batches]
        self.floats_beside: list[dict[int, Any]] = list(self.beside)
        self._given = list(self.beside)
        """As the block gave it that ran last."""
        self.hands_on_floats = False
        """Whether numbers go from block to block beside the hidden state."""

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
                batch = batch.on(self.device)
                self.forms = self.forms or forms_of(_bind_forward(module, batch.first), names, blocks, real)
                entered = passage(_bind_forward(module, batch.feeds), names, blocks, self.forms, intern)
                self.templates.append(entered.templates)
                self.hidden.append(self.holder.hold(entered.hidden))

    def enter_float(self, module: nn.Module, names: Sequence[str], blocks: Sequence[nn.Module]) -> None:
        """Run everything up to the first block for the float path, where what is before the blocks is not float."""
        with torch.no_grad():
            passages = [
                passage(_bind_forward(module, batch.on(self.device).feeds), names, blocks, self.forms, Interned())
                for batch in self.batches
            ]
        self.floats = [self.holder.hold(entered.hidden) for entered in passages]

    def calls(self, block: int) -> list[BlockCall]:
        """Return the calls of the k-th block on the compressed path, one for each micro-batch."""
        return [self._make_call(i, self._bind_arguments(i, self.templates[i][block])) for i in range(len(self.batches))]

    def feeds_calls(self) -> list[BlockCall]:
        """Return the calls of the whole model, one for each micro-batch."""
        return [self._make_call(i, self._bind_feeds(batch)) for i, batch in enumerate(self.batches)]

    def _make_call(self, i: int, arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]) -> BlockCall:
        rows = self.batches[i].rows
        return BlockCall(arguments, None if rows is None else rows.to(self.device), self.batches[i].n_rows)

    def _bind_feeds(self, batch: MicroBatch) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
        return lambda: ((), batch.on(self.device).feeds)

    def _bind_arguments(self, i: int, template: Template) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return a function that gives the i-th micro-batch's arguments when called: a call holds no activations."""
        return lambda: template.fill(self.hidden[i].get(), self.beside[i])

    def take(self, block: int, i: int, out: Any) -> Tensor:
        """Return the hidden state of what the k-th block gave; what the next one reads beside it is kept."""
        self._given[i] = self._hold_beside(block, i, out)
        return self.forms[block].take_hidden(out)

    def _hold_beside(self, block: int, i: int, out: Any) -> dict[int, Any]:
        following = self.templates[i][block + 1 : block + 2]

        def hold(tensor: Tensor) -> HeldTensor:
            self.hands_on_floats |= tensor.is_floating_point()
            return self.holder.hold(tensor.detach())

        return {k: map_tensors(out[k], hold) for template in following for k in template.beside}

    def advance(self, outputs: Iterator[Tensor]) -> None:
        """Take a block's outputs as the next block's inputs; an input is dropped when its output is there."""
        for i, out in enumerate(outputs):
            self.hidden[i] = self.holder.hold(out)
            self.beside[i] = self._given[i]

    def float_forward(self, block: int, forward: Callable[..., Any]) -> list[HeldTensor]:
        """Run the k-th block with float weights on the float path and return what the next block reads there."""
        given, beside = self.floats, self.floats_beside
        if given is None:
            given, beside = list(self.hidden), list(self.beside)
        with torch.no_grad():
            for i, call in enumerate(self.calls(block)):
                args, kwargs = self.templates[i][block].fill(given[i].get(), beside[i])
                with running(call.rows):
                    out = forward(*args, **kwargs)
                given[i] = self.holder.hold(self.forms[block].take_hidden(out).float())
                beside[i] = self._hold_beside(block, i, out)
        self.floats, self.floats_beside = given, beside
        return given


def _bind_forward(module: nn.Module, feeds: Mapping[str, Tensor]) -> Callable[[], Any]:
    return lambda: module(**feeds)


def layers_of(block: nn.Module, name: str = "") -> dict[str, nn.Module]:
    """Return the layers of a block by full plain name. `name`: the block's path in the model."""
    modules = {plain(".".join(part for part in (name, path) if part)): layer for path, layer in block.named_modules()}
    return {path: layer for path, layer in modules.items() if is_layer(layer)}


def _own_names(path: str, part: nn.Module) -> list[str]:
    """Return the full names of a module's own parameters, those of its children left out."""
    return [f"{path}.{key}" if path else key for key, value in part._parameters.items() if value is not None]


def _is_table(part: nn.Module) -> bool:
    """Return whether a module is an embedding that only looks rows up, in torch's own way."""
    return type(part) is nn.Embedding and part.max_norm is None


def _is_real(parameter: nn.Parameter | None) -> bool:
    """Return whether a parameter is there and has values."""
    return parameter is not None and parameter.device.type != "meta"


def _move_indices(table: nn.Module, args: Any, kwargs: Any) -> Any:
    """Bring what a table is called with to where its rows lie: in a file, or on the device; a forward pre-hook.

    The rows of one in few bits are made by a look-up of its own (`row_reader`), and its weight stays on meta.
    """
    weight: Any = table.weight
    place = CPU if weight.device.type == "meta" else weight.device
    return map_tensors((args, kwargs), lambda index: index.to(place))


def _no_data(i: int) -> Tensor:
    """Raise IndexError: the forward of a block without data."""
    raise IndexError("this stream has no data")
