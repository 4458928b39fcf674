"""Which whole blocks a model would run without: those of its chain, and residual ones that give the shape they read."""

from __future__ import annotations

import itertools

from torch import nn

from compress.blocks.layers import is_layer
from compress.blocks.materialise import plain
from compress.facts import Removable, Structure
from compress.structure.dataflow import DataFlow, ModuleCall, within

PASSED = ("relu", "hardtanh", "clamp", "add", "clone", "alias", "contiguous", "dropout", "native_dropout")
"""Operators behind which what a block read is looked for: sums, and those that do nothing the second time."""


def find_removable(flow: DataFlow, structure: Structure) -> tuple[Removable, ...]:
    """Return the blocks that can go, in the order in which they run, of a recorded run and what it shows.

    A block of the chain gives the shape that it reads, where no next one reads more of it than that. Elsewhere it is a
    module that gives x + f(x), or relu(x + f(x)), for the x that it reads (He et al. 2016), the innermost such.
    """
    chain = [block.name for block in structure.blocks if block.name]
    calls = [flow.calls[name][0] for name in chain]
    # whether a block is given more of what the one before made than its first output
    given = {value for call in calls[:1] for value in call.inputs}
    pairs = itertools.pairwise(calls)
    takes_more = any(set(a.outputs[1:]) & set(b.inputs) - given - set(a.outputs[:1]) for a, b in pairs)
    chained = [] if takes_more else [name for name in chain if _keeps_shape(flow, name)]
    alone = [name for name in flow.modules if not any(within(name, b) or within(b, name) for b in chain)]
    residual = [name for name in alone if name and _is_residual(flow, name)]
    inner = [name for name in residual if not any(other != name and within(other, name) for other in residual)]
    names = sorted([*chained, *inner], key=lambda name: flow.calls[name][0].start)
    return tuple(Removable(name, _list_layers(flow, name), _is_listed(flow, name)) for name in names)


def _find_only_call(flow: DataFlow, name: str) -> ModuleCall | None:
    """Return the only call of a module that gives one tensor, or several of which the first counts; None for others."""
    calls = flow.calls.get(name, ())
    return calls[0] if len(calls) == 1 and calls[0].inputs and calls[0].outputs else None


def _keeps_shape(flow: DataFlow, name: str) -> bool:
    call = _find_only_call(flow, name)
    return call is not None and flow.shapes[call.outputs[0]] in {flow.shapes[value] for value in call.inputs}


def _is_residual(flow: DataFlow, name: str) -> bool:
    """Return whether a module only adds to the one tensor that it reads, and gives one of its shape.

    It must hold a layer.
    """
    call = _find_only_call(flow, name)
    if call is None or len(call.inputs) != 1 or len(call.outputs) != 1 or not _list_layers(flow, name):
        return False
    (read,), (given,) = call.inputs, call.outputs
    return flow.shapes[read] == flow.shapes[given] and read != given and _reaches(flow, call, given, read)


def _reaches(flow: DataFlow, call: ModuleCall, value: int, read: int) -> bool:
    """Return whether `read` is `value`, or what PASSED operators made it from inside the call."""
    if value == read:
        return True
    op = flow.producers.get(value)
    if op is None or not call.start <= op.index < call.stop or op.name not in PASSED:
        return False
    return any(_reaches(flow, call, source, read) for source in op.inputs)


def _list_layers(flow: DataFlow, name: str) -> tuple[str, ...]:
    parts = flow.modules[name].named_modules()
    return tuple(f"{name}.{path}" if path else name for path, part in parts if is_layer(part))


def _is_listed(flow: DataFlow, name: str) -> bool:
    parent = flow.modules[plain(name.rpartition(".")[0])]
    return isinstance(parent, nn.ModuleList)
