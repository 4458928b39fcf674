"""Running a graph piece after piece in ONNX Runtime, so that the weights of one piece alone are in memory.

A graph whose weights stay in files (`StoredTensor`) is cut where a piece's weights reach PIECE_BYTES. All batches pass
through a piece before the next one is read; what later pieces need is kept between them. A piece takes its large
weights as inputs: ONNX Runtime neither copies nor packs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compress.graph.edit import reroute, uses_of
from compress.graph.run import Feeds, open_session, run_batches, tap
from compress.graph.stored import StoredTensor, is_stored

PIECE_BYTES = 256 << 20
"""Weights of a piece; a single larger one is a piece of its own."""


@dataclass(frozen=True)
class Piece:
    """A run of nodes, by the names of values: what it reads of earlier ones, its weights, what it gives to later ones.

    `last`: of what it reads, what no later piece and no caller needs.
    """

    reads: tuple[str, ...]
    weights: tuple[str, ...]
    gives: tuple[str, ...]
    last: tuple[str, ...]


def run_in_pieces(
    model: ir.Model, batches: Sequence[Feeds], names: Sequence[str], piece_bytes: int | None = None
) -> list[Feeds]:
    """Return the named outputs of each batch. At any time the weights of one piece are held, and what passes between.

    Raises KeyError for a name that the graph does not have, and whatever ONNX Runtime raises.
    """
    whole = tap(model, names)
    inputs = {value.name or "" for value in whole.graph.inputs}
    known = [{name: array for name, array in feeds.items() if name in inputs} for feeds in batches]
    for piece in cut(whole, piece_bytes):
        graph = _take_piece(whole, piece, known[0])
        weights = {name: _read_straight(whole, name) for name in piece.weights}
        session = open_session(graph)
        given = ({**{name: values[name] for name in piece.reads}, **weights} for values in known)
        for values, outputs in zip(known, run_batches(session, given), strict=True):
            for name in piece.last:
                del values[name]
            values.update(outputs)
        del session, weights
    return [{name: values[name] for name in names} for values in known]


def cut(model: ir.Model, piece_bytes: int | None = None) -> list[Piece]:
    """Return the graph's pieces in order. What they hold of nodes that need no other is as the graph is sorted."""
    limit, outputs = PIECE_BYTES if piece_bytes is None else piece_bytes, {value.name for value in model.graph.outputs}
    runs: list[list[ir.Node]] = [[]]
    held: set[str] = set()
    n_bytes = 0
    for node in model.graph:
        fresh = {value.name: value for value in _read_values(node) if is_stored(value.const_value)}
        size = sum(value.const_value.nbytes for name, value in fresh.items() if name not in held and value.const_value)
        if runs[-1] and size and n_bytes + size > limit:
            runs.append([])
            held, n_bytes = set(), 0
            size = sum(value.const_value.nbytes for value in fresh.values() if value.const_value)
        runs[-1].append(node)
        held |= {name or "" for name in fresh}
        n_bytes += size
    return _find_borders(runs, outputs)


def _find_borders(runs: Sequence[Sequence[ir.Node]], outputs: set[str | None]) -> list[Piece]:
    reads, weights, makes = [], [], []
    for nodes in runs:
        made = {value.name or "" for node in nodes for value in node.outputs}
        values = {value.name or "": value for node in nodes for value in _read_values(node)}
        weights.append(tuple(name for name, value in values.items() if is_stored(value.const_value)))
        reads.append([n for n, value in values.items() if n not in made and value.const_value is None])
        makes.append(made)
    pieces = []
    for number in range(len(runs)):
        later = {name for names in reads[number + 1 :] for name in names} | outputs
        gives = tuple(sorted(name for name in makes[number] if name in later))
        last = tuple(name for name in reads[number] if name not in later)
        pieces.append(Piece(tuple(reads[number]), weights[number], gives, last))
    return pieces


def _read_values(node: ir.Node) -> Iterator[ir.Value]:
    """Yield what a node reads; of one with graphs inside, what these read of the graph around them, too."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            continue
        inner = [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else attribute.as_graphs()
        for graph in inner:
            for part in ir.traversal.RecursiveGraphIterator(graph):
                yield from (value for value in part.inputs if value is not None and value.graph is node.graph)


def _take_piece(whole: ir.Model, piece: Piece, values: Feeds) -> ir.Model:
    """Return a graph of the piece alone; `values`: one batch's, which tell the types of what it reads."""
    graph = ir.convenience.extract(whole.graph, [*piece.reads, *piece.weights], list(piece.gives))
    for value in graph.inputs:
        graph.initializers.pop(value.name or "", None)
        value.const_value = None
        if (array := values.get(value.name or "")) is not None:
            value.type = ir.TensorType(ir.tensor(array).dtype)
        if _is_turned(whole, value.name or ""):
            # The graph reads the transpose: ONNX Runtime multiplies by it as it lies in the file, in place of a copy.
            readers = uses_of(value)
            turn = ir.node("Transpose", [value], {"perm": [1, 0]})
            turn.outputs[0].name = f"{value.name}/turned"
            turn.outputs[0].type = value.type
            value.shape = None
            reroute(readers, turn.outputs[0])
            graph.insert_before(graph[0], turn)
    for value in graph.outputs:
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    return ir.Model(graph, ir_version=whole.ir_version)


def _is_turned(whole: ir.Model, name: str) -> bool:
    value = whole.graph.initializers.get(name)
    tensor = None if value is None else value.const_value
    return isinstance(tensor, StoredTensor) and tensor.straight is not None


def _read_straight(whole: ir.Model, name: str) -> np.ndarray:
    """Return the values of a stored weight; of a transposed one those as they lie in its file."""
    tensor = whole.graph.initializers[name].const_value
    if isinstance(tensor, StoredTensor) and tensor.straight is not None:
        return tensor.straight()
    assert tensor is not None
    return tensor.numpy()
