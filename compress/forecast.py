"""How long a recipe will take, and how much memory and disk: estimates whose terms are stated."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from compress.facts import ModelFacts
from compress.schema import Recipe

LIBRARIES_BYTES = 700 * 2**20
"""torch, transformers and ONNX Runtime once imported."""
EFFICIENCY = 0.35
"""What convolutions and small products reach of a large matrix product's rate."""
CALIBRATION_PASSES = {"int8": 1.6, "smoothquant": 2.2, "autocast": 1.3, "equalize": 1.3}
"""Forward passes over the calibration data that a pass costs, its own arithmetic counted in."""
COPIES = 4
"""Float copies of the weights alive at once: the source's, the graph's, the rewritten graph's, a session's."""


@dataclass(frozen=True)
class Forecast:
    """`memory_bytes` is the peak of the process, `disk_bytes` what the cache and the bundle take."""

    seconds: float
    memory_bytes: int
    disk_bytes: int


def forecast(recipe: Recipe, before: ModelFacts, after: ModelFacts, samples: dict[str, int], batch: int) -> Forecast:
    """Add up what each step needs. `samples`: set name -> number; `batch`: samples in the graph together."""
    flops = 2 * before.macs
    per_second = matrix_rate() * EFFICIENCY
    forward = flops / per_second
    calibration, evaluation = samples.get("calibration", 0), samples.get("evaluation", 0)
    seconds = 8.0 + before.n_bytes / 20e6  # imports, export, checks
    seconds += sum(CALIBRATION_PASSES.get(p.kind, 0.0) for p in recipe.passes) * calibration * forward
    seconds += 3 * evaluation * forward
    speed = recipe.validate_.benchmark
    single = flops / (per_second / max(os.cpu_count() or 1, 1) * speed.threads)
    seconds += 2 * single * (speed.warmup + 2 * speed.iterations) * speed.batch_size + min(
        60.0, 40 * single * speed.throughput_batch_size
    )
    memory = LIBRARIES_BYTES + COPIES * before.n_bytes + 2 * batch * before.peak_activation_bytes
    disk = 2 * before.n_bytes + (len(recipe.passes) + 2) * before.n_bytes + after.n_bytes
    return Forecast(seconds, memory, disk)


def matrix_rate() -> float:
    """FLOP/s of a float32 matrix product on this machine: the best of a few, each of milliseconds."""
    a = np.ones((512, 512), np.float32)
    return max(2 * 512**3 / _seconds(lambda: a @ a) for _ in range(8))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-6)
