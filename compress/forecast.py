"""How long a recipe will take, and how much memory and disk: estimates whose terms are stated."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from compress.blocks.stream_memory import Shapes, StreamUse, head_memory, stream_memory
from compress.facts import LayerDecision, ModelFacts
from compress.passes import Pass, Tune
from compress.passes.training import TrainingPass
from compress.schema import Recipe
from compress.step_rules import n_between

LIBRARIES_BYTES = 460 * 2**20
"""torch and transformers once imported, and the data read."""
ONNX_BYTES = 240 * 2**20
"""What exporting a graph and ONNX Runtime's sessions take beside that."""
EFFICIENCY = 0.35
"""What convolutions and small products reach of a large matrix product's rate."""
START_SECONDS = 8.0
"""Importing the libraries."""
EXPORT_BYTES_PER_S = 20e6
"""Weights that are exported, written and checked in a second."""
EVALUATION_RUNS = 3
"""Forward passes over the evaluation set: the baseline's, the candidate's, one for the gates."""
BFLOAT16 = 0.65
"""Part of float32's time that a training step takes in bfloat16, where the processor has it."""
THROUGHPUT_CALLS, THROUGHPUT_SECONDS = 40, 60.0
"""Timed calls of the large batch, and the most that they are given."""
FLOAT_TOO = ("autoround", "tune")
"""Passes that also keep what the float model's blocks give."""
COPIES = 4
"""Float copies of the weights alive at once: the source's, the graph's, the rewritten graph's, a session's."""

TRAINED_COPIES = 9
"""Float copies while a model is trained: its own, the teacher's, gradients, two moments, the best, a state as saved."""
STATE_COPIES = 4
"""In a training run's saved state: the weights, two moments, the best."""


@dataclass(frozen=True)
class Forecast:
    """`memory_bytes` is the peak of the process, `disk_bytes` what the cache and the bundle take."""

    seconds: float
    memory_bytes: int
    disk_bytes: int


def forecast(
    recipe: Recipe,
    before: ModelFacts,
    after: ModelFacts,
    samples: dict[str, int],
    batch: int,
    tokens: int = 0,
    filled: float = 1.0,
    decisions: Sequence[Sequence[LayerDecision]] = (),
) -> Forecast:
    """Add up what each step needs.

    `samples`: set name -> number; `batch`: samples in the graph together; `tokens`: of a language model's calibration
    set; `filled`: how long a text of the training set is, as a part of the longest. `decisions`: what each pass will do
    to the layers; not given, it is taken to work on all.
    """
    flops = 2 * before.macs
    per_second = matrix_rate() * EFFICIENCY
    forward = flops / per_second
    calibration, evaluation = samples.get("calibration", 0), samples.get("evaluation", 0)
    seconds = START_SECONDS + before.n_bytes / EXPORT_BYTES_PER_S
    seconds += sum(one.calibration_runs for one in recipe.passes) * calibration * forward
    between = n_between(recipe, before)  # as slow as the float model at most
    seconds += (EVALUATION_RUNS + between) * evaluation * forward + between * before.n_bytes / EXPORT_BYTES_PER_S
    trained = [one for one in recipe.passes if isinstance(one, TrainingPass)]
    seconds += sum(_training_seconds(one, samples.get("train", 0), forward * filled) for one in trained)
    speed = recipe.validate_.benchmark
    single = flops / (per_second / max(os.cpu_count() or 1, 1) * speed.threads)  # one sample on the timed threads
    seconds += (2 + between) * single * (speed.warmup + 2 * speed.iterations) * speed.batch_size
    seconds += min(THROUGHPUT_SECONDS, THROUGHPUT_CALLS * single * speed.throughput_batch_size)
    streams = _streams(recipe, before, tokens or calibration * _rows(before), decisions)
    memory, disk = LIBRARIES_BYTES + max(streams, default=0), after.n_bytes + len(streams) * after.n_bytes
    memory = max([memory, *(LIBRARIES_BYTES + _training_bytes(one, before) for one in trained)])
    disk += STATE_COPIES * before.n_bytes * bool(trained)
    if before.structure is not None and not recipe.has_onnx:
        memory = max(memory, LIBRARIES_BYTES + head_memory(before.structure, _shapes(before)))
    if recipe.has_onnx:
        whole = max(COPIES, 2 + between) * before.n_bytes + 2 * batch * before.peak_activation_bytes
        memory = max(memory, LIBRARIES_BYTES + ONNX_BYTES + whole)
        disk += 2 * before.n_bytes + (len(recipe.passes) - len(streams) + 2 + between) * before.n_bytes
    return Forecast(seconds, memory, disk)


def _training_seconds(one: TrainingPass, n_samples: int, forward: float) -> float:
    """`forward`: seconds of one sample through the model."""
    wanted = one.train_runs(n_samples) * forward * (BFLOAT16 if one.precision == "bfloat16" else 1)
    return wanted if one.max_seconds is None else min(wanted, one.max_seconds)


def _training_bytes(one: TrainingPass, facts: ModelFacts) -> int:
    """Weights with what belongs to them, and every layer's activations: half the peak of a forward pass each."""
    return TRAINED_COPIES * facts.n_bytes + one.batch_size * facts.peak_activation_bytes * len(facts.layers) // 2


def _streams(recipe: Recipe, facts: ModelFacts, n_rows: int, decisions: Sequence[Sequence[LayerDecision]]) -> list[int]:
    """Bytes that each pass over blocks takes at its peak."""
    structure = facts.structure
    found = []
    for number, one in enumerate(recipe.passes):
        if structure is not None and one.stage_on(facts) == "blocks":
            use = StreamUse(
                lockstep=getattr(one, "sequential", True),
                float_too=one.kind in FLOAT_TOO,
                compute=getattr(one, "compute", "float32"),
                rounded={d.layer for d in decisions[number] if d.action != "kept"} if decisions else None,
            )
            rows = n_rows if one.needs_calibration else 0
            found.append(stream_memory(structure, _shapes(facts), rows, _width(facts), use) + _learned(one, facts))
    return found


def _shapes(facts: ModelFacts) -> Shapes:
    """Of the layers' weights, under all their names."""
    own = {f"{layer.name}.weight": layer.shape for layer in facts.layers}
    return own | {layer.weight: layer.shape for layer in facts.layers}


def _learned(one: Pass, facts: ModelFacts) -> int:
    """What `tune` takes beside a stream where it learns the whole model at once."""
    if not isinstance(one, Tune):
        return 0
    n_weights = sum(layer.n_weights for layer in facts.distinct_layers())
    return one.n_bytes(n_weights)


def _width(facts: ModelFacts) -> int:
    """Of what a block hands on."""
    structure = facts.structure
    assert structure is not None
    if structure.residual is not None:
        return structure.residual.width
    first = next((reading.layers[0] for reading in structure.readings if reading.layers), "")
    return next((layer.shape[1] for layer in facts.layers if layer.name == first), 0)


def _rows(facts: ModelFacts) -> int:
    """Rows that one sample gives a matrix product, at most: the work of the product over its weights."""
    return max((layer.macs // layer.n_weights for layer in facts.layers if layer.op == "MatMul"), default=1)


def matrix_rate() -> float:
    """FLOP/s of a float32 matrix product on this machine: the best of a few, each of milliseconds."""
    a = np.ones((512, 512), np.float32)
    return max(2 * 512**3 / _seconds(lambda: a @ a) for _ in range(8))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-6)
