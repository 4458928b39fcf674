"""How long each layer takes by its widths, measured on the runtime that will run the model.

A layer is not timed alone: at its borders a runtime may reorder what it keeps in blocks of channels, which it does not
do in the middle of a network. It is timed inside a chain of itself and its mirror (outputs to inputs), repeated, of
which it gets half a link's time: what writes a dimension and what reads it are often just such a pair. A strided layer
is timed as one of stride 1 that gives as many places, which multiplies as much.

The model's time is that of the whole float model plus the differences of its layers, so that all that no width changes
cancels out. Products of two activations (attention scores) are in that rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn

from compress.blocks.forward import remove_hooks_on_exit
from compress.blocks.layers import TRANSPOSED, in_axis
from compress.pruning.costs import AxisSize, Cost, Term, sizes_of
from compress.pruning.dimensions import Dimension
from compress.pruning.layers import channel_axis, layers_of, n_groups, weight_names
from compress.timing.clock import Clock
from runtime.clock.graphs import Attribute, Node, write_model

OPSET = 20
BUDGET_S = 20.0
"""Seconds for the calls of one layer at all its sizes."""
GRID = 8
"""Sizes of an axis that are measured where both axes vary, or several dimensions lie on it; others lie between."""


@dataclass(frozen=True)
class LayerShape:
    """What a layer multiplies, but for its widths. `kernel` (): a matrix. `places`: of its output, tokens or pixels; of
    a transposed convolution those of its input, each of which it multiplies with all taps."""

    kernel: tuple[int, ...]
    dilation: tuple[int, ...]
    places: tuple[int, ...]
    per_group: int
    """Outputs of each group where the number of groups follows the outputs; 0 where there is one group, or it stays."""
    groups: int
    transposed: bool = False


@dataclass(frozen=True)
class Wanted:
    """A layer to know the times of: `sizes`, of its outputs and of a group's inputs; and which of them to measure."""

    layer: str
    shape: LayerShape
    sizes: tuple[AxisSize, AxisSize]
    outs: tuple[int, ...]
    ins: tuple[int, ...]


@dataclass(frozen=True)
class LatencyTable:
    """Milliseconds of a layer, float [outs, ins]; sizes rise, the last of each is the full one."""

    shape: LayerShape
    outs: tuple[int, ...]
    ins: tuple[int, ...]
    ms: tuple[tuple[float, ...], ...]

    def at(self, sizes: tuple[int, ...]) -> float:
        """Return the milliseconds at these sizes; between measured ones along a straight line."""
        by_out = [float(np.interp(sizes[1], self.ins, row)) for row in self.ms]
        return float(np.interp(sizes[0], self.outs, by_out))


def grid(size: AxisSize, widths: Sequence[Sequence[int]], n_units: Sequence[int], both: bool) -> tuple[int, ...]:
    """Return the sizes of an axis to measure: all that the allowed `widths` of its dimensions give, or GRID of them.

    `both`: the layer's other axis varies too.
    """
    sizes = np.array([size.full])
    for d, k in size.per_unit.items():
        lost = k * (n_units[d] - np.asarray(widths[d]))
        sizes = np.unique(sizes[:, None] - lost)
    if len(sizes) > GRID and (both or len(size.per_unit) > 1):
        sizes = sizes[np.unique(np.linspace(0, len(sizes) - 1, GRID).round().astype(int))]
    return tuple(int(value) for value in sizes)


def find_wanted_layers(
    module: nn.Module, dimensions: Sequence[Dimension], widths: Sequence[Sequence[int]], sample: Mapping[str, Tensor]
) -> list[Wanted]:
    """Return the layers whose time some width changes, in the order of their first call.

    `widths`: allowed, by dimension; `sample`: what the model is timed on, by parameter of forward.
    """
    layers = layers_of(module)
    places: dict[str, tuple[int, ...]] = {}
    n_units = [dimension.n_units for dimension in dimensions]

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            seen = args[0] if isinstance(layer, TRANSPOSED) else out
            places[name] = tuple(seen.shape[2:] if channel_axis(layer) == 1 else seen.shape[1:-1])

        return hook

    handles = [layer.register_forward_hook(watch(name)) for name, layer in layers.items()]
    with remove_hooks_on_exit(handles), torch.no_grad():
        module(**sample)
    wanted, weights = [], weight_names(module)
    for name, where in places.items():
        layer = layers[name]
        axes = sizes_of(weights[name], layer.weight.shape, dimensions)  # type: ignore[arg-type]
        out, into = axes[1 - in_axis(layer)], axes[in_axis(layer)]
        if isinstance(layer, TRANSPOSED):  # its weight has the outputs of one group and the inputs of all
            groups = layer.groups
            out = AxisSize(out.full * groups, {d: k * groups for d, k in out.per_unit.items()})
            into = AxisSize(into.full // groups, {d: k // groups for d, k in into.per_unit.items()})
        if out.per_unit or into.per_unit:
            both = bool(out.per_unit and into.per_unit)
            grids = (grid(size, widths, n_units, both) for size in (out, into))
            wanted.append(Wanted(name, _find_layer_shape(layer, where, into), (out, into), *grids))
    return wanted


def _find_layer_shape(layer: Any, places: tuple[int, ...], into: AxisSize) -> LayerShape:
    groups = n_groups(layer)
    follows = groups > 1 and not into.per_unit and not isinstance(layer, TRANSPOSED)
    per_group = layer.out_channels // groups if follows else 0
    return LayerShape(
        tuple(getattr(layer, "kernel_size", ())),
        tuple(getattr(layer, "dilation", ())),
        places,
        per_group,
        groups,
        isinstance(layer, TRANSPOSED),
    )


def keep_form(model: ir.Model) -> ir.Model:
    """Return a graph as it is: layers are timed in float."""
    return model


def measure(
    wanted: Sequence[Wanted], clock: Clock, form: Callable[[ir.Model], ir.Model], numbers: str
) -> list[LatencyTable]:
    """Return one table for each different layer, kept for this machine; its sizes are timed in turn with each other.

    `form`: writes a float graph in the numbers that layers are timed in, named by `numbers`. Raises what the backend
    raises.
    """
    tables = []
    for layer in {(case.shape, case.outs, case.ins): case for case in wanted}.values():
        key = [clock.backend, clock.threads, numbers, layer.shape, layer.outs, layer.ins]
        kept = clock.kept.read("widths", key)
        if kept is None:
            graphs, feeds, links = [], [], []
            for n_out, n_in in ((o, i) for o in layer.outs for i in layer.ins):
                graph, size, n_links = chain(layer.shape, n_out, n_in)
                graphs.append(form(graph))
                feeds.append([{"x": np.random.default_rng(clock.seed).standard_normal(size).astype(np.float32)}])
                links.append(n_links)
            each = np.array(clock.time_each(graphs, feeds, BUDGET_S)) / (2 * np.array(links))
            rows = each.reshape(len(layer.outs), len(layer.ins))
            table = LatencyTable(layer.shape, layer.outs, layer.ins, tuple(tuple(map(float, row)) for row in rows))
            clock.kept.write("widths", key, {"ms": table.ms})
            tables.append(table)
        else:
            tables.append(LatencyTable(layer.shape, layer.outs, layer.ins, tuple(map(tuple, kept["ms"]))))
    return tables


def latency_cost(
    whole_ms: float,
    wanted: Sequence[Wanted],
    tables: Sequence[LatencyTable],
    n_units: Sequence[int],
    scale: float = 1.0,
) -> Cost:
    """Return the model's milliseconds: what the float model takes, and `scale` times what each layer takes less.

    In a model a layer also fills what is fused into it and finds colder caches, so that it saves somewhat more than in
    the table: once a model of some widths has been measured, `measure_scale` tells how much.
    """
    known = {(table.shape, table.outs, table.ins): table for table in tables}
    terms = [Term((), lambda sizes: whole_ms)]
    for layer in wanted:
        table = known[layer.shape, layer.outs, layer.ins]
        terms.append(Term(layer.sizes, _make_price(table, scale)))
    return Cost("ms", tuple(n_units), tuple(terms))


def measure_scale(whole_ms: float, predicted_ms: float, measured_ms: float) -> float:
    """Return the `scale` with which a prediction made with scale 1 would have been what was measured.

    Between a half and two: beyond that a measurement went wrong, or the time is not in the layers.
    """
    saved = whole_ms - predicted_ms
    return float(np.clip((whole_ms - measured_ms) / saved, 0.5, 2.0)) if saved > 0 else 1.0


def _make_price(table: LatencyTable, scale: float) -> Callable[[tuple[int, ...]], float]:
    full = table.at((table.outs[-1], table.ins[-1]))
    return lambda sizes: scale * (table.at(sizes) - full)


def chain(shape: LayerShape, n_out: int, n_in: int) -> tuple[ir.Model, tuple[int, ...], int]:
    """Return a model of one input "x", its shape, and the number of links: two layers each, [n_out, n_in, *kernel].

    `n_in`: inputs of one group.
    """
    groups = n_out // shape.per_group if shape.per_group else shape.groups
    width = n_in * groups
    weight_bytes = 8 * n_out * n_in * int(np.prod(shape.kernel))
    # as many links as 8 MiB hold weights of
    links = int(np.clip(2**23 // weight_bytes, 1, 4))
    rng = np.random.default_rng(0)
    nodes: list[Node] = []
    names, weights, current = [], {}, "x"
    for number, (into, out) in enumerate([(width, n_out), (n_out, width)] * links):
        size = (out, into // groups, *shape.kernel) if shape.kernel else (into, out)
        if shape.transposed:
            size = (into, out // groups, *shape.kernel)
        values = rng.standard_normal(size).astype(np.float32) / np.float32(np.sqrt(np.prod(size) / out))
        weights[f"w{number}"] = values
        operator, attributes = _describe_node(shape, groups)
        nodes += [
            (operator, [current, f"w{number}"], [f"y{number}"], attributes),
            ("Relu", [f"y{number}"], [f"r{number}"], {}),
        ]
        names += [f"layer{number}", f"relu{number}"]  # forms of the graph name what they add after its nodes
        current = f"r{number}"
    io = (1, width, *shape.places) if shape.kernel else (1, *shape.places, width)
    content = write_model(nodes, weights, {"x": ("float32", io)}, {current: ("float32", io)}, OPSET, names)
    return ir.from_proto(onnx.load_from_string(content)), io, links


def _describe_node(shape: LayerShape, groups: int) -> tuple[str, dict[str, Attribute]]:
    """Return the operator and attributes of one layer, padded so that it gives as many places as it takes."""
    if not shape.kernel:
        return "MatMul", {}
    reach = [d * (k - 1) for d, k in zip(shape.dilation, shape.kernel, strict=True)]
    pads = [r // 2 for r in reach] + [r - r // 2 for r in reach]
    kernel: dict[str, Attribute] = {"kernel_shape": shape.kernel, "dilations": shape.dilation}
    return "ConvTranspose" if shape.transposed else "Conv", {**kernel, "pads": pads, "group": groups}
