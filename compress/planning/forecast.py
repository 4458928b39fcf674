"""How long a recipe will take, and how much memory and disk: estimates whose terms are stated."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from compress.blocks.stream_memory import Shapes, StreamUse, head_memory, stream_memory
from compress.facts import LayerDecision, ModelFacts
from compress.planning.in_files import FLOAT_COPIES, runs_float, stays_in_files
from compress.planning.inputs import Inputs, text_fill
from compress.planning.measurements import n_between
from compress.recipe.schema import Recipe
from runtime.bundle.manifest import fixed_batch
from runtime.decode.scoring import LOGITS_BYTES
from runtime.measure.benchmark import choose_backend

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
THROUGHPUT_CALLS, THROUGHPUT_SECONDS = 40, 60.0
"""Timed calls of the large batch, and the most that they are given."""
COPIES = 4
"""Float copies of the weights alive at once: the source's, the graph's, the rewritten graph's, a session's."""
FLOAT_BYTES = 4
ON_CPU = ("onnxruntime-cpu", "openvino")
"""Backends whose activations lie in this machine's own memory."""


@dataclass(frozen=True)
class Forecast:
    """`memory_bytes` is the peak of the process, `disk_bytes` what the cache and the bundle take.

    `bundle_bytes`: the bundle's part of that.
    """

    seconds: float
    memory_bytes: int
    disk_bytes: int
    bundle_bytes: int = 0


@dataclass(frozen=True)
class TimedBatch:
    """The largest batch whose speed is measured: the key that asks for it, its samples, its bytes in one model."""

    key: str
    n_samples: int
    feed_bytes: int
    activation_bytes: int = 0

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the baseline and the candidate, which are timed in turn and keep what they allocated."""
        return 2 * (self.feed_bytes + self.activation_bytes)


def find_timed_batch(inputs: Inputs) -> TimedBatch | None:
    """Return the largest batch that judging will time; None without a graph, and for decoders, timed by the request.

    Activations count where a CPU computes them. Texts count with the length that the evaluation set's file tells.
    """
    recipe, speed = inputs.recipe, inputs.recipe.validate_.benchmark
    if not recipe.has_onnx or recipe.model.generates:
        return None
    key = "throughput_batch_size" if speed.throughput_batch_size >= speed.batch_size else "batch_size"
    n_samples = fixed_batch(inputs.facts.inputs) or getattr(speed, key)
    longest = getattr(inputs.preprocess, "max_length", None)
    filled = speed.sequence_length / longest if speed.sequence_length and longest else text_fill(inputs, "evaluation")
    sample = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in inputs.feeds.values())
    on_cpu = choose_backend(recipe.target, None, recipe.model.generates)[0] in ON_CPU
    activations = inputs.facts.peak_activation_bytes if on_cpu else 0
    return TimedBatch(key, n_samples, int(n_samples * sample * filled), int(n_samples * activations * filled))


def forecast(
    recipe: Recipe,
    before: ModelFacts,
    after: ModelFacts,
    samples: dict[str, int],
    batch: int,
    tokens: int = 0,
    filled: float = 1.0,
    decisions: Sequence[Sequence[LayerDecision]] = (),
    timed: TimedBatch | None = None,
) -> Forecast:
    """Estimate the time, memory and disk that a recipe takes, as the sum of what each piece of work needs.

    `samples`: set name -> number; `batch`: samples in the graph together; `tokens`: of a language model's calibration
    set; `filled`: how long a text of the training set is, as a part of the longest. `decisions`: what each pass will do
    to the layers; not given, it is taken to work on all. `timed`: the largest batch that judging times.
    """
    flops = 2 * before.macs
    per_second = matrix_rate() * EFFICIENCY
    forward = flops / per_second
    calibration, evaluation = samples.get("calibration", 0), samples.get("evaluation", 0)
    seconds = START_SECONDS + before.n_bytes / EXPORT_BYTES_PER_S
    seconds += sum(pass_.calibration_runs for pass_ in recipe.passes) * calibration * forward
    between = n_between(recipe, before)  # as slow as the float model at most
    seconds += (EVALUATION_RUNS + between) * evaluation * forward + between * before.n_bytes / EXPORT_BYTES_PER_S
    n_train = samples.get("train", 0)
    trained = [pass_.estimate_training(before, n_train, forward * filled) for pass_ in recipe.passes]
    seconds += sum(cost.seconds for cost in trained)
    speed = recipe.validate_.benchmark
    single = flops / (per_second / max(os.cpu_count() or 1, 1) * speed.threads)  # one sample on the timed threads
    seconds += (2 + between) * single * (speed.warmup + 2 * speed.iterations) * speed.batch_size
    seconds += min(THROUGHPUT_SECONDS, THROUGHPUT_CALLS * single * speed.throughput_batch_size)
    streams = _estimate_streams(recipe, before, tokens or calibration * _count_rows(before), decisions)
    memory, disk = LIBRARIES_BYTES + max(streams, default=0), after.n_bytes + len(streams) * after.n_bytes
    memory = max([memory, *(LIBRARIES_BYTES + cost.memory_bytes for cost in trained)])
    disk += max((cost.disk_bytes for cost in trained), default=0)
    if before.structure is not None and (not recipe.has_onnx or stays_in_files(recipe, before)):
        memory = max(memory, LIBRARIES_BYTES + head_memory(before.structure, _collect_shapes(before)))
    if stays_in_files(recipe, before):
        memory = max(memory, LIBRARIES_BYTES + ONNX_BYTES + _estimate_in_files(recipe, before, after))
        disk += after.n_bytes + (before.n_bytes if runs_float(recipe, before) else 0)
    elif recipe.has_onnx:
        whole = max(COPIES, 2 + between) * before.n_bytes + 2 * batch * before.peak_activation_bytes
        judging = 2 * before.n_bytes + (0 if timed is None else timed.n_bytes)
        memory = max(memory, LIBRARIES_BYTES + ONNX_BYTES + max(whole, judging))
        disk += 2 * before.n_bytes + (len(recipe.passes) - len(streams) + 2 + between) * before.n_bytes
    bundle = len(recipe.export) * after.n_bytes
    bundle += before.n_bytes if recipe.has_onnx and runs_float(recipe, before) else 0
    return Forecast(seconds, memory, disk, min(bundle, disk))


def _estimate_in_files(recipe: Recipe, before: ModelFacts, after: ModelFacts) -> int:
    """Estimate the bytes that a graph takes whose weights stay in files, from its export to the verdict.

    A piece of the float graph is run with its largest weight and that one's transpose. A session of the candidate maps
    its file, and packs the integers, and the table of a tied head, for its kernels; then come a batch's logits.
    """
    largest = max((layer.n_weights * FLOAT_BYTES for layer in before.layers), default=0)
    judging = FLOAT_COPIES * before.n_bytes if runs_float(recipe, before) else 2 * after.n_bytes + largest
    return int(max(2 * largest, judging + LOGITS_BYTES))


def _estimate_streams(
    recipe: Recipe, facts: ModelFacts, n_rows: int, decisions: Sequence[Sequence[LayerDecision]]
) -> list[int]:
    """Estimate the bytes that each pass over blocks takes at its peak."""
    structure = facts.structure
    peaks = []
    for number, pass_ in enumerate(recipe.passes):
        if structure is not None and pass_.stage_on(facts) == "blocks":
            use = StreamUse(
                lockstep=getattr(pass_, "sequential", True),
                float_too=pass_.keeps_float_blocks,
                compute=getattr(pass_, "compute", "float32"),
                rounded={d.layer for d in decisions[number] if d.action != "kept"} if decisions else None,
            )
            rows = n_rows if pass_.needs_calibration else 0
            peaks.append(
                stream_memory(structure, _collect_shapes(facts), rows, _find_width(facts), use)
                + pass_.estimate_extra_bytes(facts)
            )
    return peaks


def _collect_shapes(facts: ModelFacts) -> Shapes:
    """Return the shapes of the layers' weights, under all their names."""
    by_layer = {f"{layer.name}.weight": layer.shape for layer in facts.layers}
    return by_layer | {layer.weight: layer.shape for layer in facts.layers}


def _find_width(facts: ModelFacts) -> int:
    """Return the width of what a block hands on."""
    structure = facts.structure
    assert structure is not None
    if structure.residual is not None:
        return structure.residual.width
    first = next((reading.layers[0] for reading in structure.readings if reading.layers), "")
    return next((layer.shape[1] for layer in facts.layers if layer.name == first), 0)


def _count_rows(facts: ModelFacts) -> int:
    """Return the most rows that one sample gives a matrix product: the work of the product over its weights."""
    return max((layer.macs // layer.n_weights for layer in facts.layers if layer.op == "MatMul"), default=1)


def matrix_rate() -> float:
    """Measure the FLOP/s of a float32 matrix product on this machine: the best of a few, each of milliseconds."""
    a = np.ones((512, 512), np.float32)
    return max(2 * 512**3 / _time_call(lambda: a @ a) for _ in range(8))


def _time_call(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-6)
