"""The lock: every version, seed and digest that went into a bundle; and, apart, what is of this machine alone."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as File
from typing import Any

from compress.blocks.device import choose_device, describe_device
from compress.context import PassResult
from compress.data.samples import Samples
from compress.execution.cached import FloatModel
from compress.planning.cache_keys import CacheKeys, list_plugins
from compress.planning.inputs import Inputs
from compress.planning.own_metrics import digest_own_metrics
from compress.recipe.places import Path
from compress.recipe.portable import Portable
from compress.recipe.schema import Recipe
from compress.store.cache import code_version, library_versions
from compress.version import __version__
from runtime.clock.machine import cpu_info


def make_lock(
    inputs: Inputs,
    keys: CacheKeys,
    sets: Mapping[str, Samples],
    exported: FloatModel | None,
    results: Sequence[PassResult[object]],
    portable: Portable,
) -> dict[str, Any]:
    """Return JSON values that are the same for the same recipe, inputs and versions, on any machine.

    But for `training` and `choices`: what a clock decided, which `compress reproduce` repeats.
    """
    recipe = inputs.recipe
    return {
        "compress": {"version": __version__, "code": code_version()},
        "versions": {"python": platform.python_version(), **library_versions()},
        "plugins": list_plugins(recipe),
        "metrics": digest_own_metrics(recipe),
        "seed": recipe.seed,
        "model": {
            "source": portable.texts["model", "source"],
            "digest": inputs.digest,
            "architecture": inputs.facts.architecture,
            "parity_torch_onnx": exported.parity if exported else None,
            "clean_up": dict(exported.clean_up) if exported else {},
        },
        "data": {name: _describe_data(inputs, name, samples, portable.texts) for name, samples in sets.items()},
        "steps": {
            "float": keys.float_graph,
            "passes": list(keys.passes),
            "graph": keys.passed_graph,
            "baseline": keys.baseline,
        },
        "training": dict(list_clocked(recipe, results)),
        "choices": {str(number): result.choice for number, result in enumerate(results) if result.choice},
    }


def describe_host(recipe: Recipe, portable: Portable) -> dict[str, Any]:
    """Return where the build runs and where its files lie, as JSON values: `compress reproduce` looks there first."""
    return {
        "recipe_folder": str(recipe.root.resolve()),
        "folders": {name: str(File(folder).expanduser()) for name, folder in portable.folders.items()},
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu": cpu_info()[0],
        "cores": os.cpu_count(),
        "device": describe_device(choose_device(recipe.device)),
    }


def _describe_data(inputs: Inputs, name: str, samples: Samples, texts: Mapping[Path, str]) -> dict[str, Any]:
    digest, sets = inputs.data[name].digest, inputs.recipe.data.evaluation_names
    source: str | dict[str, str] = texts.get(("data", name, "source"), "")
    if name == "evaluation" and sets:
        source = {part: texts["data", name, part, "source"] for part in sets}
    return {"source": source, "file_digest": digest, "samples": samples.n, "digest": samples.digest}


def list_clocked(recipe: Recipe, results: Sequence[PassResult[object]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (index of a pass, its fields): what it settled, and of training the steps that a clock left it."""
    for number, (config, result) in enumerate(zip(recipe.passes, results, strict=True)):
        steps = result.measured.get(config.kind, {}).get("steps")
        clocked = steps is not None and getattr(config, "max_seconds", None) is not None
        fields = ({"steps": int(steps or 0)} if clocked else {}) | dict(result.settled)
        if fields:
            yield str(number), fields
