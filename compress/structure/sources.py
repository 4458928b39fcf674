"""Where a scale on what layers read can be folded: found by sending a factor through the recorded run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from compress.blocks.folding import norm_weight_offset
from compress.blocks.layers import is_hf_conv1d
from compress.facts import InputGroup
from compress.structure.channels import Layout, ScaledOp, Stop, last_dim, pass_through
from compress.structure.dataflow import DataFlow, Op, Ref

SAME_ROWS = ("view", "_unsafe_view", "reshape", "_reshape_alias", "clone", "contiguous", "unsqueeze", "squeeze")


def is_matrix(module: nn.Module) -> bool:
    """Return whether a layer multiplies its input with a matrix: Linear, Hugging Face's Conv1D."""
    return isinstance(module, nn.Linear) or is_hf_conv1d(module)


def n_outputs(module: nn.Module) -> int:
    """Return the number of outputs of a Linear or Conv1D."""
    shape: tuple[int, ...] = tuple(module.weight.shape)  # type: ignore[arg-type]
    return shape[1] if is_hf_conv1d(module) else shape[0]


def n_inputs(module: nn.Module) -> int:
    """Return the number of inputs of a Linear or Conv1D."""
    shape: tuple[int, ...] = tuple(module.weight.shape)  # type: ignore[arg-type]
    return shape[0] if is_hf_conv1d(module) else shape[1]


@dataclass(frozen=True)
class ReachedLayers:
    """Where a factor on a module's outputs arrives: layer -> the layout of its input at each call."""

    layers: dict[str, list[Layout]]


@dataclass(eq=False)
class Sources:
    """The search, over one recorded run."""

    flow: DataFlow

    def __post_init__(self) -> None:
        names = self.flow.module.named_parameters(remove_duplicate=False)
        self._owners = Counter(id(parameter) for _, parameter in names)
        self._values = {parameter: value for value, parameter in self.flow.parameters.items()}
        self._offsets: dict[str, float | None] = {}
        self._made = {
            call.outputs[0]: name  # where the module itself made it, not one that it calls or that came before
            for name, calls in self.flow.calls.items()
            for call in calls
            if call.outputs and getattr(self.flow.producers.get(call.outputs[0]), "module", None) == name
        }

    def resolve(self, layers: tuple[str, ...]) -> InputGroup:
        """Return the input group of `layers`, which read one tensor, with its source where there is one."""
        for source in self._iterate_candidates(layers):
            if (input_group := self._try_source(source, layers)) is not None:
                return input_group
        return InputGroup(layers)

    def canonical(self, value: int) -> int:
        """Return the value whose rows, in the same order, `value` holds."""
        op = self.flow.producers.get(value)
        while op is not None and op.name in SAME_ROWS and op.inputs:
            before = op.inputs[0]
            if self.flow.shapes[before][-1:] != self.flow.shapes[value][-1:]:
                break
            value, op = before, self.flow.producers.get(before)
        return value

    def offset(self, norm: str) -> float | None:
        """Return `norm_weight_offset` of a module by name."""
        if norm not in self._offsets:
            self._offsets[norm] = norm_weight_offset(self.flow.modules[norm])
        return self._offsets[norm]

    def _iterate_candidates(self, layers: tuple[str, ...]) -> Iterator[str]:
        """Yield the norms and matrices before the input group, the nearest first."""
        first = self.flow.calls[layers[0]][0].inputs[:1]
        seen, queue, makers = set(first), list(first), dict[str, None]()
        for value in queue:
            maker = self._made.get(value, "")
            module = self.flow.modules.get(maker) if maker else None
            if module is not None and (is_matrix(module) or self._is_norm(module)):
                makers[maker] = None
                continue
            op = self.flow.producers.get(value)
            # operators to look back over; attention takes about 40
            if op is not None and len(seen) < 400:
                fresh = [v for v in reversed(op.inputs) if v not in seen and v not in self.flow.parameters]
                queue.extend(fresh)
                seen.update(fresh)
        yield from sorted(makers, key=lambda name: -self.flow.calls[name][0].start)

    def _is_norm(self, module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        return weight is not None and weight.dim() == 1 and not list(module.children())

    def _try_source(self, source: str, layers: tuple[str, ...]) -> InputGroup | None:
        """Return the input group if a factor on `source`'s outputs arrives at these layers, whole, and nowhere else."""
        module = self.flow.modules[source]
        norm = not is_matrix(module)
        if source in layers or not self._is_alone(source) or not all(map(self._is_alone, layers)):
            return None
        if norm and self.offset(source) is None:
            return None
        columns = n_inputs(self.flow.modules[layers[0]])
        n_out = len(module.weight) if norm else n_outputs(module)  # type: ignore[arg-type]
        for scaled in dict.fromkeys((n_out, *self._iterate_widths(columns, n_out))):
            try:
                reached = self.reach(source, (n_out - scaled, n_out))
            except Stop:
                continue
            if set(reached.layers) == set(layers) and (
                match := self._match_order(reached, layers, n_out - scaled, columns)
            ):
                repeat, layout = match
                how = "norm" if norm else "value" if layout.mixes and layout.plain else "linear"
                return InputGroup(layers, source, how, repeat, layout.head_size if layout.mixes else 0)  # type: ignore[arg-type]
        return None

    def _iterate_widths(self, columns: int, n_out: int) -> Iterator[int]:
        """Yield how many of a fused source's last outputs the tensor can be.

        These are the numbers that divide its columns into whole repeats.
        """
        return (columns // r for r in range(1, columns + 1) if columns % r == 0 and columns // r < n_out)

    def _match_order(
        self, reached: ReachedLayers, layers: tuple[str, ...], offset: int, columns: int
    ) -> tuple[int, Layout] | None:
        """Return (repeat, layout) if each call of each layer reads the channels in the order that `Reading` tells."""
        layouts = [layout for layer in layers for layout in reached.layers[layer]]
        calls = sum(len(self.flow.calls[layer]) for layer in layers)
        first = layouts[0]
        wanted = [layout.channels() for layout in layouts]
        if len(layouts) != calls or any(channels != wanted[0] for channels in wanted):
            return None
        if not all(all(layout.still[:-1]) for layout in layouts):
            return None
        n_channels = len(set(wanted[0]))
        repeat, head = columns // n_channels, first.head_size or n_channels
        if repeat > 1 and (n_channels % head or not first.mixes):
            return None
        expected = [
            offset + h * head + d for h in range(n_channels // head) for _ in range(repeat) for d in range(head)
        ]
        return (repeat, first) if expected == wanted[0] else None

    def _is_alone(self, name: str) -> bool:
        """Return whether the module's parameters are its own, used by nothing but its calls."""
        parameters = dict(self.flow.modules[name].named_parameters())
        if any(self._owners[id(parameter)] > 1 for parameter in parameters.values()):
            return False
        values = [self._values.get(f"{name}.{parameter}", -1) for parameter in parameters]
        return all(op.module == name for value in values for op in self.flow.consumers.get(value, ()))

    def reach(self, source: str, scaled: tuple[int, int], routers: bool = False) -> ReachedLayers:
        """Send a factor on the outputs [scaled[0], scaled[1]) of all calls of `source` on; Stop where it does not pass.

        `routers`: modules that multiply with a weight [out, in] of their own, without being a layer, count as layers.
        """
        flow = self.flow
        layouts = {call.outputs[0]: last_dim(flow.shapes[call.outputs[0]]) for call in flow.calls[source]}
        pending: dict[int, Op] = {op.index: op for value in layouts for op in flow.consumers.get(value, ())}
        arrived: dict[str, list[Layout]] = {}
        while pending:
            op = pending.pop(min(pending))
            here = {value: layouts[value] for value in op.inputs if value in layouts}
            if op.module in flow.calls and is_matrix(flow.modules[op.module]) and op.module != source:
                self._note_arrival(op, here, arrived, layouts, scaled)
                continue
            if routers and (router := self._find_router(op)) is not None:
                arrived.setdefault(router, []).extend(here.values())
                continue
            for value, layout in zip(op.outputs, pass_through(ScaledOp(op, here, flow.shapes, scaled)), strict=False):
                if layout is not None:
                    layouts[value] = layout
                    pending.update({later.index: later for later in flow.consumers.get(value, ())})
        for value in flow.outputs:
            if value in layouts:
                raise Stop("the model gives it out")
        return ReachedLayers(arrived)

    def _find_router(self, op: Op) -> str | None:
        """Return the module whose own `weight` [out, in] the operator multiplies rows with, or None."""
        weights = op.args[-1:] if op.name in ("mm", "addmm") else ()
        producer = self.flow.producers.get(weights[0].value) if weights and isinstance(weights[0], Ref) else None
        if (
            producer is None
            or producer.name != "t"
            or self.flow.parameters.get(producer.inputs[0]) != f"{op.module}.weight"
        ):
            return None
        return op.module if not list(self.flow.modules[op.module].children()) else None

    def is_shared(self, name: str) -> bool:
        """Return whether another module holds one of this one's parameters too."""
        return any(self._owners[id(parameter)] > 1 for parameter in self.flow.modules[name].parameters())

    def _note_arrival(
        self,
        op: Op,
        here: dict[int, Layout],
        arrived: dict[str, list[Layout]],
        layouts: dict[int, Layout],
        scaled: tuple[int, int],
    ) -> None:
        """Note the layout of a layer's input, once for each call, at an operator inside the layer."""
        reads = (c.inputs[0] for c in self.flow.calls[op.module] if c.inputs and c.start <= op.index < c.stop)
        read = next(reads, -1)
        layout = layouts.get(read)
        if layout is None or read not in here:
            raise Stop(f"{op.module} reads it in another way")
        low, high = layout.reach
        if low < scaled[0] or high >= scaled[1]:
            raise Stop(f"{op.module} reads a part that is not scaled")
        arrived.setdefault(op.module, []).append(layout)
