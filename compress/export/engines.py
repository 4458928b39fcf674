"""The engines of a bundle that is being written: compiled where this machine can, else left as orders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from compress.engine.compile import compile_order, why_not_here
from compress.engine.orders import orders_of, ranges_of
from compress.facts import Note
from compress.recipe.exports import Engine
from compress.recipe.schema import Recipe
from runtime.bundle.engine import EngineOrder
from runtime.bundle.format import Artifact, Generation
from runtime.encode.preprocess import PreprocessSpec


@dataclass(frozen=True)
class Engines:
    """`artifacts`: of the orders that were compiled."""

    orders: tuple[EngineOrder, ...]
    artifacts: tuple[Artifact, ...]
    notes: tuple[Note, ...]


def write_engines(
    root: Path,
    export: Engine,
    recipe: Recipe,
    preprocess: PreprocessSpec,
    generation: Generation | None,
    graphs: tuple[Artifact, Artifact],
    cache: Path | None,
) -> Engines:
    """Write engines of `graphs` (candidate, baseline) under `root`. `cache`: holds the timing cache. ExportError."""
    graph, baseline = graphs
    ranges = ranges_of(export, recipe, preprocess, generation, graph.inputs)
    orders = orders_of(export, ranges, graph, baseline)
    made: list[Artifact] = []
    notes: list[Note] = []
    for order, source in zip(orders, graphs, strict=True):
        if text := why_not_here(order):
            notes.append(Note("warning", f"{order.name}: left for `compress compile` on the target machine: {text}"))
            continue
        artifact, compile_notes = compile_order(root, order, source, cache)
        made.append(artifact)
        notes += compile_notes
    return Engines(tuple(orders), tuple(made), tuple(notes))
