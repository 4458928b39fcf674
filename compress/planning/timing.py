"""What can be timed on this machine, and how: the one answer for the plan, the passes and the cache's keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir

from compress.export.onnx import finish, float_graph
from compress.formats.targets import TARGETS, Target
from compress.recipe.exports import GraphExport
from compress.recipe.schema import Recipe
from compress.rounding.latency import StateTimer
from compress.rounding.state import GraphState
from compress.timing.clock import Clock
from compress.timing.kept import Kept
from runtime.backends import Feeds
from runtime.bundle.engine import COMPILED
from runtime.measure.benchmark import choose_backend, graph_backend

SWITCH = "COMPRESS_TIMING"
"""The environment variable that with "off" keeps the plan and the passes from timing anything."""


def is_timing_off() -> bool:
    return os.environ.get(SWITCH) == "off"


def explain_untimed(recipe: Recipe, layers: bool = True) -> str | None:
    """Return why nothing is timed for this recipe, or none of its `layers`; None where they are."""
    return f"{SWITCH} is off" if is_timing_off() else explain_no_clock(recipe, layers)


def explain_no_clock(recipe: Recipe, layers: bool = True) -> str | None:
    """Return why nothing can be timed as the result will be, or none of its `layers`; None where they can."""
    if layers and recipe.unit == "token":
        return "a decoder's layers meet another shape with every token"
    if not recipe.has_onnx:
        return f"{recipe.target} reads checkpoints, which nothing here runs"
    name, elsewhere = choose_backend(recipe)
    if elsewhere is not None:
        return f"{recipe.target} does not run here"
    return f"{name} runs what is compiled for it at the end" if name in COMPILED else None


def describe_call(recipe: Recipe) -> list[object]:
    """Return what a measured time depends on beside the graph and the machine, as JSON values."""
    speed = recipe.validate_.benchmark
    tokens = [speed.prompt_tokens, speed.new_tokens] if recipe.unit == "token" else []
    return [recipe.target, speed.threads, speed.batch_size, speed.sequence_length, *tokens]


def make_clock(recipe: Recipe, cache: Path) -> Clock:
    """Return what times graphs on the recipe's backend. `cache`: the folder that keeps what was measured."""
    backend = choose_backend(recipe)[0]
    return Clock(backend, recipe.validate_.benchmark.threads, recipe.seed, Kept(cache))


def make_timer(recipe: Recipe, cache: Path, feeds: Sequence[Feeds]) -> StateTimer:
    """Return what times states as the result will be timed: on these batches, in the form that is judged."""
    target = variant_of(recipe).name
    return StateTimer(make_clock(recipe, cache), make_writer(recipe), feeds, describe_call(recipe), target)


def make_writer(recipe: Recipe) -> Callable[[GraphState], ir.Model]:
    """Return what gives the graph of a state in the form that is judged; that of the float model as it is."""
    target = variant_of(recipe)

    def write(state: GraphState) -> ir.Model:
        decided = state.weights or state.half is not None or state.kv_cache is not None
        return finish(state, target)[0] if decided else float_graph(state.model)

    return write


def variant_of(recipe: Recipe) -> Target:
    """Return the target whose form of the graph is judged: the backend's own where a file is written for it."""
    backend = graph_backend(recipe)
    written = [recipe.target_of(export) for export in recipe.export if isinstance(export, GraphExport)]
    return TARGETS[next((name for name in written if name == backend), recipe.target)]
