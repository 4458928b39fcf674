"""The lock: every version, seed, digest and host fact that went into a bundle."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

from compress import __version__
from compress.cache import code_version, library_versions
from compress.data.samples import Samples
from compress.inputs import Inputs
from compress.steps import StepKeys
from runtime.environment import cpu_info


def make_lock(inputs: Inputs, keys: StepKeys, sets: Mapping[str, Samples], parity: float | None) -> dict[str, Any]:
    """JSON values that are the same for the same recipe, inputs and machine."""
    recipe = inputs.recipe
    return {
        "compress": {"version": __version__, "code": code_version()},
        "versions": {"python": platform.python_version(), **library_versions()},
        "seed": recipe.seed,
        "model": {
            "source": recipe.model.source,
            "digest": inputs.digest,
            "architecture": inputs.facts.architecture,
            "parity_torch_onnx": parity,
        },
        "data": {name: _data(inputs, name, samples) for name, samples in sets.items()},
        "steps": {"float": keys.float_graph, "passes": list(keys.passes), "baseline": keys.baseline},
        "host": {
            "system": platform.system(),
            "machine": platform.machine(),
            "cpu": cpu_info()[0],
            "cores": os.cpu_count(),
        },
    }


def _data(inputs: Inputs, name: str, samples: Samples) -> dict[str, Any]:
    facts = inputs.data[name]
    return {"source": facts.source, "file_digest": facts.digest, "samples": samples.n, "digest": samples.digest}
