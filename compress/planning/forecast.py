"""How much memory and disk a recipe will take, and about how long: estimates whose terms are stated."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from compress.blocks.stream import rss_mib
from compress.blocks.stream_memory import FIXED_BYTES, Shapes, StreamUse, backward_memory, head_memory, stream_memory
from compress.export.loading_back import HEADROOM
from compress.facts import FLOAT_BYTES, LayerDecision, ModelFacts, sample_bytes
from compress.graph.run import OUTPUT_BYTES
from compress.passes.base import DataSize, PassCost
from compress.planning.durations import Duration, Durations
from compress.planning.in_files import FLOAT_COPIES, allowed_bytes, runs_float, stays_in_files
from compress.planning.inputs import Inputs
from compress.planning.judging import is_scored_by_torch, runs_once
from compress.planning.measured_speed import LatencyForecast
from compress.planning.measurements import n_between, pass_names
from compress.planning.sets import text_fill
from compress.recipe.exports import CheckpointExport
from compress.recipe.schema import Recipe
from runtime.backends import BACKENDS, find_backend
from runtime.bundle.manifest import fixed_batch
from runtime.clock.machine import count_cores
from runtime.decode.scoring import LOGITS_BYTES, REDUCED_AT_ONCE
from runtime.measure.benchmark import choose_backend
from runtime.processes.memory import available_bytes

START, EXPORT, BASELINE = "start", "export to float ONNX", "baseline outputs"
SCORING, READING = "scoring the model in torch", "reading the samples with the float model"
RUNNING = "running the candidate on the samples"
WRITING, JUDGING = "writing the bundle", "judging"
"""Names of the stages before and after the passes, in the plan and in the log."""
LIBRARIES_BYTES = 460 * 2**20
"""torch and transformers once imported, and the data read: the least, where this process does not hold more already."""
ONNX_BYTES = 240 * 2**20
"""What exporting a graph and ONNX Runtime's sessions take beside that."""
PROCESS_BYTES = 50 * 2**20
"""What a fresh process holds that has imported a backend and no model: 47 MiB with ONNX Runtime, 53 with OpenVINO."""
ELSEWHERE = {"openvino": 3}
"""Backend -> ways in which it is timed beside the one that is judged: both files, OpenVINO's float one in two types."""
COPIES = 4
"""Float copies of the weights alive at once: the source's, the graph's, the rewritten graph's, a session's."""
ARENA = 2
"""Times the activations that ONNX Runtime holds, whose arena doubles as it grows. Set on one model, 12 convolutions of
8 x 320 x 320 in batches of 32 (1.9 GiB to calibrate, 2.35 in all; foretold 1.7 and 2.5, without it 1.6 in all)."""
ON_CPU = ("onnxruntime-cpu", "openvino")
"""Backends whose activations lie in this machine's own memory."""
EFFICIENCY = 0.8
"""Part of a large matrix product's rate that a model reaches: ResNet-56 takes 2.4 ms for 0.25 GFLOP where that rate is
100 GFLOP/s; smaller ones reach less."""
START_S, LAYER_S, CLOCK_S = 5.0, 0.1, 15.0
"""Seconds until work begins; of exporting a layer of torch; of timing, where a choice or a verdict rests on it: of the
quickstart, of ResNet-56 with 57 layers, and of the quickstart's choice of placement."""
TIMED_CALLS, TIMED_S = 12, 60.0
"""Times `iterations` that judging calls a model, all ways to run it together, and the seconds that it takes at most."""
DISK_BYTES_S = 3e8
"""Bytes that are read and hashed, or written, in a second: of a cloud disk sha256 reads 1.6e9, and 1.9e8 written."""


@dataclass(frozen=True)
class StageForecast:
    """One stage of a run: `name` as the log and the plan have it, the most memory that it takes, how long.

    `work`: how much it is, in a unit of the stage's own. `share`: the part of its work that is guessed to fit into the
    seconds that it may take.
    """

    name: str
    memory_bytes: int
    duration: Duration
    work: float = 0.0
    share: float = 1.0


@dataclass(frozen=True)
class Forecast:
    """What a run takes.

    `memory_bytes`: the peak of the processes together; `disk_bytes`: what the cache and the bundle take, `bundle_bytes`
    the bundle's part of that; `stages`: in order, nothing of them done yet.
    """

    memory_bytes: int
    disk_bytes: int
    bundle_bytes: int = 0
    stages: tuple[StageForecast, ...] = ()


@dataclass(frozen=True)
class Volumes:
    """How much data goes through a model.

    `samples`: set name -> number; `batch`: samples in the graph together; `tokens`: of a language model's calibration
    set, `scored`: of its evaluation set, `longest`: of a text of that; `filled`: how long a text of the training set
    is, as a part of the longest; `unread_bytes`: of weight files whose digest is not known; `sample_bytes`: of all sets
    as they are loaded.
    """

    samples: Mapping[str, int]
    batch: int
    tokens: int = 0
    scored: int = 0
    longest: int = 0
    filled: float = 1.0
    unread_bytes: int = 0
    sample_bytes: int = 0


@dataclass(frozen=True)
class TokenCount:
    """Rows that go through a model. `n`: all; `a_sample`: of one text, which attention sees together."""

    n: int
    a_sample: int = 1


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
    if not recipe.has_onnx or recipe.unit == "token":
        return None
    key = "throughput_batch_size" if speed.throughput_batch_size >= speed.batch_size else "batch_size"
    n_samples = fixed_batch(inputs.facts.inputs) or getattr(speed, key)
    longest = getattr(inputs.preprocess, "max_length", None)
    filled = speed.sequence_length / longest if speed.sequence_length and longest else text_fill(inputs, "evaluation")
    sample = sample_bytes(inputs.feeds)
    on_cpu = not find_backend(choose_backend(recipe)[0]).on_gpu
    activations = inputs.facts.peak_activation_bytes if on_cpu else 0
    return TimedBatch(key, n_samples, int(n_samples * sample * filled), int(n_samples * activations * filled))


def forecast(
    recipe: Recipe,
    before: ModelFacts,
    after: ModelFacts,
    volumes: Volumes,
    decisions: Sequence[Sequence[LayerDecision]] = (),
    timed: TimedBatch | None = None,
    durations: Durations | None = None,
    latency: LatencyForecast | None = None,
    found: Sequence[ModelFacts] = (),
) -> Forecast:
    """Estimate the memory, disk and time that a recipe takes, as the sum of what each piece of work needs.

    `decisions`: what each pass will do to the layers; not given, it is taken to work on all. `timed`: the largest batch
    that judging times. `durations`: what stages took on this machine. `latency`: what was measured of models that were
    made like the recipe's. `found`: the model as each pass finds it; not given, as it came.
    """
    run = _Run(recipe, before, after, volumes, decisions, timed, durations or Durations(), latency, found)
    stages = run.list_stages()
    return Forecast(max(stage.memory_bytes for stage in stages), *run.disk_bytes(), tuple(stages))


@dataclass(frozen=True)
class _Run:
    """What a forecast is of: see `forecast`."""

    recipe: Recipe
    before: ModelFacts
    after: ModelFacts
    volumes: Volumes
    decisions: Sequence[Sequence[LayerDecision]]
    timed: TimedBatch | None
    durations: Durations
    latency: LatencyForecast | None
    found: Sequence[ModelFacts]

    def list_stages(self) -> list[StageForecast]:
        """Return the stages of the run, in order."""
        evaluated = self.forward_work("evaluation")
        onnx = self.recipe.has_onnx
        stages = [self._stage(START, self.base_bytes, self.volumes.unread_bytes, START_S, DISK_BYTES_S)]
        written_s = 0.0 if self.in_files else 2 * self.before.n_bytes / DISK_BYTES_S  # and read, to be run
        if onnx:
            layers = 1 if self.before.source == "onnx" else len(self.before.layers)
            stages.append(self._stage(EXPORT, self.export_bytes(), layers, written_s, 1 / LAYER_S))
        if onnx and not self.in_files:
            stages.append(self._stage(BASELINE, self.graph_bytes() + self.evaluation_bytes(1), evaluated, written_s))
        stages += [self._pass_stage(number, name) for number, name in enumerate(pass_names(self.recipe.passes))]
        once = runs_once(self.recipe, self.before)
        in_torch = not onnx or self.in_files or is_scored_by_torch(self.recipe, self.before)
        if self.before.structure is not None and in_torch and not once and not self.before.classless:
            stages.append(self._stage(SCORING, self.scoring_bytes(), 2 * evaluated))
        if self.n_checkpoints:
            n_bytes = self.n_checkpoints * (self.after.n_bytes + self.before.n_bytes)
            stages.append(self._stage(WRITING, self.writing_bytes(), n_bytes, START_S, DISK_BYTES_S))
        if once:
            stages.append(self._stage(READING, self.scoring_bytes(), evaluated))
            stages.append(self._stage(RUNNING, self.running_bytes(), evaluated))
        if onnx:
            # each model between the passes; and the candidate, once for the gates and once for its outputs
            work = (self.between + (0 if once else 2)) * evaluated
            call_s = self.before.macs / find_pace()
            timed_s = min(TIMED_CALLS * self.recipe.validate_.benchmark.iterations * call_s, TIMED_S)
            stages.append(self._stage(JUDGING, self.judging_bytes(), work, CLOCK_S + timed_s))
        return stages

    def _stage(
        self, name: str, memory_bytes: int, work: float, least_s: float = 0.0, rate: float | None = None
    ) -> StageForecast:
        """Return a stage of so much work: multiply-adds, or what is done at a `rate` of so many a second."""
        guess_s = least_s + work / (rate or find_pace())
        return StageForecast(name, memory_bytes, self.durations.find(name, work, guess_s), work)

    def _pass_stage(self, number: int, name: str) -> StageForecast:
        """Return a pass's stage: forwards of samples, and work on each weight."""
        pass_ = self.recipe.passes[number]
        filled = 1.0 if pass_.needs_train else self._fill("calibration")
        work = self.cost(number).forwards * filled * self.before.macs
        # Multiply-adds in whose time a weight of a block is read, rounded and written, beside the forwards: gptq of
        # all-MiniLM-L6-v2 on 64 texts took 14 s beside other programs, and 9 are guessed with this.
        work += 6000 * self.before.n_bytes / FLOAT_BYTES if self.on_blocks(number) else 0
        timed = pass_.measures_time and self.recipe.unit == "call"
        longest = getattr(pass_, "max_seconds", None) or math.inf  # it ends by then, and does as much less
        share = min(longest * find_pace() / max(work, 1.0), 1.0)
        stage = self._stage(name, self.pass_bytes(number), share * work, CLOCK_S if timed else 0.0)
        return replace(stage, share=share)

    def forward_work(self, name: str) -> float:
        """Return the multiply-adds of sending a set's samples through the model once."""
        return self.volumes.samples.get(name, 0) * self._fill(name) * self.before.macs

    def _fill(self, name: str) -> float:
        """Return how long a text of the set is, as a part of the longest that the model reads; else 1."""
        tokens = self.volumes.scored if name == "evaluation" else self.volumes.tokens
        rows = self._rows(name)
        return tokens / rows if tokens and rows else 1.0

    @property
    def library_bytes(self) -> int:
        """Return what the libraries take, as they lie in this process."""
        return max(LIBRARIES_BYTES, measure_held_bytes())

    @property
    def base_bytes(self) -> int:
        """Return what the process holds beside the work: the libraries, and the samples of all sets."""
        return self.library_bytes + self.volumes.sample_bytes

    @property
    def in_files(self) -> bool:
        """Return whether weights stay in their files from the graph's export to the verdict."""
        return stays_in_files(self.recipe, self.before)

    @property
    def runs_float(self) -> bool:
        """Return whether the float graph is in the bundle, and is run beside the candidate."""
        return self.recipe.has_onnx and runs_float(self.recipe, self.before)

    @property
    def largest_bytes(self) -> int:
        """Return the float32 bytes of the largest weight."""
        return FLOAT_BYTES * max((layer.n_weights for layer in self.before.layers), default=0)

    @property
    def n_checkpoints(self) -> int:
        return sum(isinstance(export, CheckpointExport) for export in self.recipe.export)

    @property
    def between(self) -> int:
        return n_between(self.recipe, self.before)

    def export_bytes(self) -> int:
        """Return the memory of exporting: copies of the float weights, and the activations of a batch.

        Where weights stay in files, a piece of the graph is run with its largest weight and that one's transpose.
        """
        if self.in_files:
            return self.base_bytes + ONNX_BYTES + 2 * self.largest_bytes
        return self.graph_bytes() + 2 * self.volumes.batch * self.before.peak_activation_bytes

    def graph_bytes(self) -> int:
        """Return the memory of a process that has made the float graph and run it: as the plan's own, or by copies."""
        if self.latency is not None and self.latency.held_bytes:
            held = max(self.library_bytes, self.latency.held_bytes) + self.volumes.sample_bytes
            return held + self.between * self.before.n_bytes
        return self.base_bytes + ONNX_BYTES + max(COPIES, 2 + self.between) * self.before.n_bytes

    def pass_bytes(self, number: int) -> int:
        """Return the memory of a pass: its stream of blocks, its training, or the graph that it works on."""
        pass_ = self.recipe.passes[number]
        if self.on_blocks(number):
            return self.base_bytes + self.stream_bytes(number)
        calibrated = self.volumes.batch * self.before.peak_activation_bytes if pass_.needs_calibration else 0
        if calibrated and pass_.stage_on(self.before) == "graph":
            # all layers' outputs, float and rounded, are compared, piece by piece
            taps = FLOAT_BYTES * sum(layer.n_outputs for layer in self.before.layers)
            calibrated += 2 * ARENA * min(self.volumes.batch * taps, max(OUTPUT_BYTES, taps))
        held = self.graph_bytes() if self.recipe.has_onnx else self.base_bytes
        return held + max(self.cost(number).memory_bytes, calibrated)

    def stream_bytes(self, number: int) -> int:
        """Return the bytes that a pass over blocks takes at its peak, above what the process holds."""
        pass_, cost, structure = self.recipe.passes[number], self.cost(number), self.before.structure
        assert structure is not None
        use = StreamUse(
            float_too=cost.float_blocks,
            rounded=self.find_rounded(number),
            lazy=not pass_.needs_forward,
            copies=StreamUse.copies if pass_.needs_forward else 1,
        )
        rows = self.calibration.n if pass_.needs_calibration else 0
        peak = stream_memory(structure, _collect_shapes(self.before), rows, _find_width(self.before), use)
        # without data the parts outside are opened as a block is, tables of embeddings and all
        if not rows and not use.lazy:
            peak = max(peak, FIXED_BYTES + self.outside_bytes())
        if sent := min(cost.gradient_tokens, rows):
            shapes = _collect_shapes(self.before)
            peak = max(peak, backward_memory(structure, shapes, sent, _find_width(self.before)))
        calibration = self.recipe.data.calibration
        if self.before.reads_apart and rows and calibration is not None and calibration.packing:
            # a mask [T, T] of each row, which no other row has
            peak += FLOAT_BYTES * rows * self.calibration.a_sample
        return peak + cost.memory_bytes

    def outside_bytes(self) -> int:
        """Return the float32 bytes of the layers outside the blocks, tied ones once."""
        structure = self.before.structure
        assert structure is not None
        inside = {layer for block in structure.blocks for layer in block.layers}
        outside = {layer.weight: layer.n_weights for layer in self.before.layers if layer.name not in inside}
        return FLOAT_BYTES * sum(outside.values())

    def find_others(self) -> list[str]:
        """Return the backends on which the files are run, too, in the process that judges: no decoder's."""
        if self.recipe.generates:
            return []
        main = choose_backend(self.recipe)[0]
        return [name for name in ON_CPU if name != main and BACKENDS[name].available() is None]

    def judging_bytes(self) -> int:
        """Return the memory of two sessions, the float model's and the candidate's, and of the largest timed batch.

        Where weights stay in files, a session maps its file, and packs the integers, and the table of a tied head, for
        its kernels; then come a batch's logits.
        """
        if self.in_files:
            alone = 2 * self.after.n_bytes + self.largest_bytes
            return (
                self.base_bytes
                + self.library_bytes  # what torch has left behind counts, too
                + ONNX_BYTES
                + LOGITS_BYTES
                + int(FLOAT_COPIES * self.before.n_bytes if self.runs_float else alone)
            )
        timed = 0 if self.timed is None else self.timed.n_bytes
        fresh = PROCESS_BYTES + 2 * self.before.n_bytes  # the processes in which both models are timed, beside this one
        compared = self.evaluation_bytes(2) + PROCESS_BYTES * len(self.find_others())
        return self.graph_bytes() + max(timed, compared) + fresh

    def running_bytes(self) -> int:
        """Return the memory of a candidate's session beside the float model's head: their logits in pieces."""
        head = self.scoring_bytes() - self.base_bytes
        return self.base_bytes + self.library_bytes + ONNX_BYTES + head + 2 * self.after.n_bytes + LOGITS_BYTES

    def evaluation_bytes(self, models: int) -> int:
        """Return the memory of a batch of the evaluation set: activations of one model, and the logits of all."""
        size = fixed_batch(self.before.inputs) or self.recipe.validate_.batch_size
        size = min(size, max(self.volumes.samples.get("evaluation", 0), 1))
        if not self.recipe.generates:  # all sessions that are compared keep what a batch took
            ways = 1 if models == 1 else 2 + sum(ELSEWHERE.get(name, 2) for name in self.find_others())
            return ARENA * ways * size * self.before.peak_activation_bytes
        rows = _count_rows(self.before)
        longest = min(self.volumes.longest or rows, rows)
        logits = FLOAT_BYTES * longest * self._vocabulary
        size = max(1, min(size, LOGITS_BYTES // max(logits, 1)))
        return size * (self.before.peak_activation_bytes * longest // rows + models * logits)

    def scoring_bytes(self) -> int:
        """Return the memory of scoring: heads and logits of two models side by side, and what their blocks hand on."""
        structure = self.before.structure
        assert structure is not None
        n_scored = self.volumes.scored or self._rows("evaluation")
        handed_on = 2 * FLOAT_BYTES * n_scored * _find_width(self.before)
        # both models' exponentials, and what divergence needs
        compared = 7 * FLOAT_BYTES * min(REDUCED_AT_ONCE, _count_rows(self.before) * self._vocabulary)
        return self.base_bytes + head_memory(structure, _collect_shapes(self.before)) + handed_on + compared

    @property
    def _vocabulary(self) -> int:
        """Return how many logits a token has."""
        return max((layer.shape[0] for layer in self.before.layers), default=0)

    def loads_whole(self) -> bool:
        """Return whether a checkpoint is run when it is loaded back, or its tensors are only read."""
        return self.before.n_bytes * HEADROOM <= allowed_bytes(self.recipe, self.base_bytes + self.library_bytes)

    def writing_bytes(self) -> int:
        """Return the memory of this process and the one in which a checkpoint is loaded back, together."""
        if self.before.classless:  # nothing loads it back
            return self.base_bytes + self.largest_bytes * self.before.float_bytes // FLOAT_BYTES
        # float copies that the process holds in which a checkpoint is loaded back
        loaded = 1.5 * self.before.n_bytes if self.loads_whole() else 0
        return int(self.base_bytes + self.library_bytes + loaded)

    def disk_bytes(self) -> tuple[int, int]:
        """Return the bytes on the disk, and the bundle's part of them."""
        n_streams = sum(map(self.on_blocks, range(len(self.recipe.passes))))
        disk = self.after.n_bytes + sum(map(self.finished_bytes, range(len(self.recipe.passes))))
        disk += max((self.cost(number).disk_bytes for number in range(len(self.recipe.passes))), default=0)
        if self.in_files:
            disk += self.after.n_bytes + self.runs_float * self.before.n_bytes
        elif self.recipe.has_onnx:
            kept = len(self.recipe.passes) - n_streams + 2 + self.between
            disk += 2 * self.before.n_bytes + kept * self.before.n_bytes
        bundle = len(self.recipe.export) * self.after.n_bytes + self.runs_float * self.before.n_bytes
        return disk, min(bundle, disk)

    def finished_bytes(self, number: int) -> int:
        """Return the bytes of a pass's finished blocks: floats that it may have changed, or integers, a byte each."""
        if not self.on_blocks(number) or self.recipe.passes[number].needs_forward:
            return self.after.n_bytes if self.on_blocks(number) else 0
        rounded = self.find_rounded(number)
        layers = (layer for layer in self.before.distinct_layers() if rounded is None or layer.name in rounded)
        # an integer, and its share of a float32 scale of 32 weights: 1 + 4 / 32 bytes
        return math.ceil(1.125 * sum(layer.n_weights for layer in layers))

    def on_blocks(self, number: int) -> bool:
        return self.before.structure is not None and self.recipe.passes[number].stage_on(self.before) == "blocks"

    def find_rounded(self, number: int) -> set[str] | None:
        """Return the layers that a pass works on; None: all."""
        return {d.layer for d in self.decisions[number] if d.action != "kept"} if self.decisions else None

    @property
    def calibration(self) -> TokenCount:
        """Return the rows of the calibration set, and of one sample."""
        n = self.volumes.tokens or self._rows("calibration")
        return TokenCount(n, max(n // max(self.volumes.samples.get("calibration", 0), 1), 1))

    def _rows(self, name: str) -> int:
        return self.volumes.samples.get(name, 0) * _count_rows(self.before)

    def cost(self, number: int) -> PassCost:
        """Return what a pass estimates of itself."""
        calibration, train = (self.volumes.samples.get(name, 0) for name in ("calibration", "train"))
        found = self.found[number] if self.found else None
        rows = self.calibration.a_sample
        size = DataSize(calibration, train, rows, self.volumes.filled, found, available_bytes())
        return self.recipe.passes[number].estimate_cost(self.before, size)


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
    first = next((input_group.layers[0] for input_group in structure.input_groups if input_group.layers), "")
    return next((layer.shape[1] for layer in facts.layers if layer.name == first), 0)


def _count_rows(facts: ModelFacts) -> int:
    """Return the most rows that one sample gives a matrix product: the work of the product over its weights."""
    return max((layer.macs // layer.n_weights for layer in facts.layers if layer.op == "MatMul"), default=1)


def find_pace() -> float:
    """Return the multiply-adds that a model's forwards make here in a second, about."""
    return matrix_rate() * EFFICIENCY / 2


@cache
def matrix_rate() -> float:
    """Measure the FLOP/s of float32 matrix products on all cores of this machine: the best of many on one, times those.

    They are too small to be spread over threads, which beside other work would wait for each other: one of 512 rows
    then told a 50th of what it told alone, these told the same.
    """
    a = np.ones((64, 64), np.float32)

    def time_product() -> float:
        start = time.perf_counter()
        _ = a @ a
        return max(time.perf_counter() - start, 1e-6)

    return count_cores() * max(2 * 64**3 / time_product() for _ in range(400))


def measure_held_bytes() -> int:
    """Return the memory that this process holds now: what a run in one like it begins with."""
    return int(rss_mib() * 2**20)
