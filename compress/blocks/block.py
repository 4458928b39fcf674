"""One block of a stream with its weights, the calls that reach it, and what is done to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from compress.blocks import heap
from compress.blocks.activations import running
from compress.blocks.blockfiles import BlockChanges
from compress.blocks.device import CPU
from compress.blocks.layers import is_hf_conv1d
from compress.blocks.lockstep import Tap, run_in_lockstep, tap_inputs
from compress.blocks.skeleton import StopForward
from compress.blocks.store import WeightStore
from compress.blocks.tables import Tables
from compress.errors import PassError
from compress.facts import InputGroup, LayerDecision, Note
from compress.formats.schemes import Scheme
from compress.rounding.layer_products import layers_in
from compress.rounding.products import Compute
from compress.rounding.quantized_weight import QuantizedWeight

Visit = Callable[[InputGroup, Tensor], None]


@dataclass(frozen=True)
class BlockCall:
    """One micro-batch's call of the block. `rows`: [B, T], False where padding is; None: there is none."""

    arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    rows: Tensor | None
    n_rows: int

    @property
    def args(self) -> tuple[Any, ...]:
        return self.arguments()[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        return self.arguments()[1]


@dataclass(frozen=True)
class Part:
    """What a `BlockWork` is made of. `run`: the forward of one micro-batch, giving the hidden state.

    `names`: parameter's plain name -> the modules and names under which it is held, for all that may be changed.
    `runs_on`: something reads the outputs. `device`: where the weights lie, and what the forward reads and gives.
    `together`: all micro-batches may be on their way at once. `lazy`: the modules hold no weights, which are read as
    they are asked for. `tables`: of the whole model.
    """

    index: int
    name: str
    module: nn.Module
    layers: dict[str, nn.Module]
    input_groups: tuple[InputGroup, ...]
    holders: Mapping[str, list[tuple[nn.Module, str]]]
    run: Callable[[int], Tensor]
    calls: Sequence[BlockCall]
    store: WeightStore
    float_outputs: Callable[[int], Tensor] | None = None
    runs_on: bool = True
    compute: Compute = "float32"
    device: torch.device = CPU
    together: bool = True
    lazy: bool = False
    tables: Tables = field(default_factory=Tables)
    experts: tuple[tuple[str, ...], ...] = ()


@dataclass
class BlockWork:
    """What a pass over blocks works on: see the attributes of `Part`, which are those of the block."""

    part: Part
    changes: BlockChanges = field(default_factory=BlockChanges)
    _outputs: list[Tensor] | None = None
    _paused: InputGroup | None = None

    @property
    def index(self) -> int:
        return self.part.index

    @property
    def name(self) -> str:
        """Return the module's path; "" for a model without blocks; "before" or "after" for one outside the blocks."""
        return self.part.name

    @property
    def module(self) -> nn.Module:
        """Return the module with its weights in float32, no gradients asked for."""
        return self.part.module

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Return the layers by full name: Linear, transformers' Conv1D, convolutions, embeddings."""
        return self.part.layers

    @property
    def input_groups(self) -> tuple[InputGroup, ...]:
        return self.part.input_groups

    @property
    def experts(self) -> tuple[tuple[str, ...], ...]:
        """Return the layers of each expert of the block's mixtures."""
        return self.part.experts

    @property
    def tables(self) -> Tables:
        """Return the embeddings and the output layer of the whole model."""
        return self.part.tables

    @property
    def calls(self) -> Sequence[BlockCall]:
        """Return the calls of this process's micro-batches."""
        return self.part.calls

    @property
    def quantized(self) -> Mapping[str, QuantizedWeight]:
        """Return the block's quantized layers, of earlier passes and of this one."""
        stored = {layer: self.part.store.quantized(layer) for layer in self.layers}
        earlier = {
            layer: weight
            for layer, weight in stored.items()
            if weight is not None and f"{layer}.weight" not in self.changes.replaced
        }
        return earlier | self.changes.quantized

    def forward(self, i: int) -> Tensor:
        """Return the hidden state that the block, as it is now, gives for micro-batch `i`; float32. Gradients flow."""
        with layers_in(self.part.compute, self.part.device.type):
            out = self._run(i)
        return out.float() if out.is_floating_point() else out

    def float_outputs(self, i: int) -> Tensor:
        """Return what the float block gives for micro-batch `i` where all blocks before are float, too."""
        if self.part.float_outputs is None:
            raise PassError(f"{self.name or 'the model'}: the float outputs were not asked for, or there are none here")
        return self.part.float_outputs(i)

    def weight(self, layer: str) -> Tensor:
        """Return a layer's weight as it is now, [out, in, ...], in the type in which it lies; not to be written to."""
        weight = self._read_weight(layer)
        return weight.t() if is_hf_conv1d(self.layers[layer]) else weight

    def matrix(self, layer: str) -> Tensor:
        """Return a copy of a layer's weight as it is now, [out, in, ...], float32; a Conv1D's is transposed."""
        return self._copy_as_matrix(layer, self._read_weight(layer))

    def float_matrix(self, layer: str) -> Tensor:
        """Return a copy of a layer's weight like `matrix`, or, of a quantized layer, of the values before rounding."""
        name = f"{layer}.weight"
        replaced = self.changes.replaced.get(name)
        weight = self.part.store.read_float(name) if replaced is None else replaced
        return self._copy_as_matrix(layer, weight.to(self.part.device))

    def collect(self, visit: Visit, input_groups: Sequence[InputGroup] | None = None) -> None:
        """Run all micro-batches as the block is now; `visit` gets an input group and rows [n, in] of it, padding left
        out.

        Rows have the type in which they are computed with: float32, or bfloat16 where the stream computes in that. A
        forward ends before the last of the wanted input groups is computed with.
        """
        wanted = self.input_groups if input_groups is None else sorted(input_groups, key=self.input_groups.index)
        taps = self._make_taps(wanted)
        for i in range(len(self.calls)):
            self._visit_inputs(i, taps, visit)

    def lockstep(self, visit: Visit, act: Callable[[InputGroup], None]) -> None:
        """Run one forward of all micro-batches, stopping before each input group: `visit` for each micro-batch, then
        `act`.

        `act` may `put` the input group's layers: the forward goes on through what it left. Once for each input group,
        in their order, also when no row reaches it. The outputs are kept, so that the block costs no second forward.
        Where not all micro-batches fit into a device's memory together, each input group costs a forward of its own.
        """
        if not self.part.together:
            for input_group in self.input_groups:
                self.collect(visit, [input_group])
                act(input_group)
            return

        def visit_rows(input_group: InputGroup, x: Tensor, i: int) -> None:
            visit(input_group, self.drop_padding(x, i))

        def advance(go: Callable[[], None]) -> None:
            with layers_in(self.part.compute, self.part.device.type):
                go()

        runs = [self._bind_run(i) for i in range(len(self.calls))]
        self._outputs = []
        outputs: list[Tensor] | None = [] if self.part.runs_on else None
        stops = run_in_lockstep(runs, self._make_taps(self.input_groups), visit_rows, advance, outputs)
        with torch.no_grad(), contextlib.closing(stops):
            for self._paused in stops:
                heap.return_all()
                act(self._paused)
                heap.return_all()
        self._paused = None
        if self._outputs is not None and outputs is not None:
            self._outputs = [out.float() for out in outputs]

    def put(
        self,
        layer: str,
        weight: QuantizedWeight,
        scheme: Scheme,
        activation_scale: float | None = None,
        sharers: Sequence[str] = (),
    ) -> None:
        """Record a quantized weight ([out, in] `values`) and put its dequantized values into the module.

        A tied weight gets values of its own, but for `sharers`: layers, here or in other blocks, that go on holding the
        same one. ValueError if the shape differs.
        """
        module, shape = self.layers[layer], tuple(weight.values.shape)
        if is_hf_conv1d(module):
            shape = shape[::-1]
            self.changes.transposed.add(layer)
        if shape != module.weight.shape:
            raise ValueError(f"{layer}: is {list(module.weight.shape)}, what was put is {list(shape)}")  # type: ignore[arg-type]
        if not self.part.lazy:
            values = torch.from_numpy(weight.dequantize()).to(self.part.device)
            module.weight = nn.Parameter(values.t().contiguous() if is_hf_conv1d(module) else values, False)
        owner = layer
        for sharer in sharers:
            if f"{sharer}.weight" not in self.part.store.tied:
                owner = sharer
            if sharer in self.layers:
                self.layers[sharer].weight = module.weight
            self.changes.schemes[sharer] = scheme
        self.changes.quantized[owner] = weight
        self.changes.schemes[layer] = scheme
        if activation_scale is not None:
            self.changes.activation_scales[layer] = float(activation_scale)
        self._discard_outputs(layer)

    def replace(self, name: str, tensor: Tensor) -> None:
        """Record new float values of a parameter (its full plain name) and go on with them.

        Parameters that are tied to it change with it; a tied one that is named itself gets values of its own. KeyError
        if the block has no such parameter, ValueError if the shape differs.
        """
        if name not in self.part.holders:
            raise KeyError(f"block {self.name!r} has no parameter {name!r}")
        values = tensor.detach().to(self.part.device, torch.float32, copy=True).contiguous()
        for module, key in self.part.holders[name]:
            old = module._parameters[key]
            assert old is not None
            if old.shape != values.shape:
                raise ValueError(f"{name}: is {list(old.shape)}, its replacement is {list(values.shape)}")
            module._parameters[key] = nn.Parameter(values, requires_grad=False)
        self.changes.replaced[name] = values.cpu()
        layer = name.removesuffix(".weight")
        for decided in (self.changes.quantized, self.changes.schemes, self.changes.activation_scales):
            decided.pop(layer, None)
        self._discard_outputs(layer)

    def put_kv(self, attention: str, key_scale: float, value_scale: float) -> None:
        """Record the scales of an attention module's cached keys and values."""
        self.changes.kv_scales[attention] = (float(key_scale), float(value_scale))

    def say(
        self,
        decisions: Sequence[LayerDecision] = (),
        notes: Sequence[Note] = (),
        measured: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Record what the report will tell of this block; calls add up."""
        self.changes.decisions += decisions
        self.changes.notes += notes
        for layer, numbers in (measured or {}).items():
            self.changes.measured.setdefault(layer, {}).update({k: float(v) for k, v in numbers.items()})

    def outputs(self) -> Iterator[Tensor]:
        """Yield the hidden states that the block leaves: those of `lockstep` where they still hold, or a forward's."""
        if self._outputs is not None and self.part.runs_on:
            yield from self._outputs
            return
        with torch.no_grad():
            for i in range(len(self.calls)):
                yield self.forward(i)

    def close(self) -> None:
        """Drop everything large: whoever still holds the block holds little."""
        self.changes, self._outputs = BlockChanges(), None
        self.part = replace(self.part, layers={}, holders={}, calls=(), run=_refuse_closed_block, float_outputs=None)

    def _visit_inputs(self, i: int, taps: Sequence[Tap], visit: Visit) -> None:
        last = len(taps) - 1

        def visit_input(number: int, x: Tensor) -> None:
            with torch.autocast(self.part.device.type, enabled=False):
                visit(taps[number][0], self.drop_padding(x, i))
            if number == last:
                raise StopForward

        with torch.no_grad(), tap_inputs(taps, visit_input), contextlib.suppress(StopForward):
            self.forward(i)

    def _make_taps(self, input_groups: Sequence[InputGroup]) -> list[Tap]:
        return [(input_group, self.layers[input_group.layers[0]]) for input_group in input_groups]

    def _bind_run(self, i: int) -> Callable[[], Tensor]:
        return lambda: self._run(i)

    def _run(self, i: int) -> Tensor:
        with running(self.calls[i].rows if self.calls else None):  # a closed block has none, and refuses
            return self.part.run(i)

    def drop_padding(self, x: Tensor, i: int) -> Tensor:
        """Return what a layer reads of micro-batch `i` as rows [n, in].

        Those of padding are left out where `x` still has the samples' shape.
        """
        rows, flat = self.calls[i].rows, x.reshape(-1, x.shape[-1])
        if rows is not None and len(flat) == rows.numel():
            flat = flat[rows.reshape(-1)]
        return flat

    def _read_weight(self, layer: str) -> Tensor:
        if self.part.lazy:
            rounded = self.changes.quantized.get(layer)
            if rounded is None:
                return self.part.store.read(f"{layer}.weight").to(self.part.device)
            values = torch.from_numpy(rounded.dequantize()).to(self.part.device)
            return values.t() if is_hf_conv1d(self.layers[layer]) else values
        weight: Any = self.layers[layer].weight
        return weight.detach()

    def _copy_as_matrix(self, layer: str, weight: Tensor) -> Tensor:
        return (weight.t() if is_hf_conv1d(self.layers[layer]) else weight).clone(memory_format=torch.contiguous_format)

    def _discard_outputs(self, layer: str) -> None:
        """Discard the outputs of a lockstep where a layer changed that it had already run through."""
        if self._paused is None or layer not in self._paused.layers:
            self._outputs = None


def _refuse_closed_block(i: int) -> Tensor:
    raise RuntimeError("the block is closed: the stream has gone on")
