"""How fast torch modules are once exported, timed against each other on the runtime that will run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
from torch import nn

from compress.execution.cached import example_batch
from compress.export.onnx import export_float, float_graph, save_graph
from compress.models.load import LoadedModel
from compress.planning.inputs import Batches
from compress.recipe.schema import Recipe
from compress.store.durable import temporary_folder
from runtime.backends import find_backend
from runtime.bundle.engine import ENGINES
from runtime.measure.benchmark import choose_backend
from runtime.measure.timing import time_rounds

ROUNDS, WARMUP = 400, 10
BUDGET_S = 30.0
TimeModules = Callable[[Sequence[nn.Module]], list[float]]


def module_timer(recipe: Recipe, loaded: LoadedModel, batches: Batches) -> TimeModules | None:
    """Return a function: modules with the inputs of `loaded` -> milliseconds of one sample, from calls made in turn.

    The first's is its median; each other's is that times the median of the rounds' own ratios to the first. Other work
    that slows some rounds down then falls on both; on a busy machine ratios of medians of 5 were seen where 1.5 is so.

    None for language models, where the target runs engines, and where it does not run here: another runtime's times
    would be no answer.
    """
    name, elsewhere = choose_backend(recipe.target, None, recipe.model.generates)
    if elsewhere is not None or recipe.model.generates or name in ENGINES:
        return None
    example = example_batch(batches, loaded.inputs)
    sample = {key: np.ascontiguousarray(values[:1]) for key, values in example.items()}
    threads, seed = recipe.validate_.benchmark.threads, recipe.seed

    def time_modules(modules: Sequence[nn.Module]) -> list[float]:
        with temporary_folder() as folder, ExitStack() as held:
            sessions = []
            for number, module in enumerate(modules):
                path = folder / f"{number}.onnx"
                save_graph(float_graph(export_float(replace(loaded, module=module), example, recipe.opset)), path)
                sessions.append(find_backend(name).open(path, threads, {}))
                held.callback(sessions[-1].close)
            feeds = [[sample]] * len(sessions)
            seconds = time_rounds(sessions, feeds, ROUNDS, WARMUP, seed, BUDGET_S)
            relative = np.median(seconds / seconds[0], axis=1)
            return [1000 * float(np.median(seconds[0]) * ratio) for ratio in relative]

    return time_modules
