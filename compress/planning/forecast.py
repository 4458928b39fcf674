"""How long a recipe will take, and how much memory and disk: estimates whose terms are stated."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from compress.blocks.stream import rss_mib
from compress.blocks.stream_memory import (
    FIXED_BYTES,
    Shapes,
    StreamUse,
    backward_memory,
    head_memory,
    stream_memory,
)
from compress.export.loading_back import HEADROOM
from compress.facts import FLOAT_BYTES, LayerDecision, ModelFacts, sample_bytes
from compress.graph.run import OUTPUT_BYTES
from compress.passes.base import TrainingCost
from compress.planning.block_time import BlockTime, Tokens
from compress.planning.in_files import FLOAT_COPIES, allowed_bytes, runs_float, stays_in_files
from compress.planning.inputs import Inputs, text_fill
from compress.planning.judging import is_scored_by_torch
from compress.planning.judging_time import Calls, judging_seconds, requests_seconds, turns_seconds
from compress.planning.measured_speed import LatencyForecast
from compress.planning.measurements import n_between, pass_names
from compress.planning.pruning_time import PruningTime
from compress.planning.rates import SIDE, Rates, time_call
from compress.quantize.fastest import GRAPH_BUDGET_S, SCREEN_BUDGET_S
from compress.recipe.exports import CheckpointExport
from compress.recipe.schema import Recipe
from compress.timing.clock import CALLS, PROCESSES
from runtime.backends import BACKENDS
from runtime.bundle.manifest import fixed_batch
from runtime.decode.scoring import LOGITS_BYTES, REDUCED_AT_ONCE
from runtime.measure.benchmark import choose_backend

EXPORT, BASELINE, WRITING = "export to float ONNX", "baseline outputs", "writing the bundle"
"""Names of work before and after the passes, as the plan has it."""
LIBRARIES_BYTES = 460 * 2**20
"""torch and transformers once imported, and the data read: the least, where this process does not hold more already."""
ONNX_BYTES = 240 * 2**20
"""What exporting a graph and ONNX Runtime's sessions take beside that."""
EFFICIENCY = 0.35
"""What convolutions and small products reach of a large matrix product's rate."""
TRACED_A_LAYER = 4000
"""Operators on shapes alone in whose time a layer is exported, with all that is around it, and its graph rewritten: the
work of the libraries, in units of this machine's pace with them."""
AROUND = 1.25
"""What a run takes beside its work, in units of what its plan took to begin: it imports more, and has an end."""
STEPS = 2
PLACEMENTS = 10
"""Placements of int8 that are timed whole."""
JUDGING_RUNS = 2
"""Forward passes over the evaluation set beside the baseline's: the candidate's, one for the gates."""
COPIES = 4
"""Float copies of the weights alive at once: the source's, the graph's, the rewritten graph's, a session's."""
LOADED_COPIES = 1.5
"""Float copies of the weights that the process holds in which a checkpoint is loaded back."""
REDUCED_COPIES = 7
"""Copies in float64 of the logits that are compared at once: both models' logarithms, and what divergence needs."""
ARENA = 2
"""Times the activations that ONNX Runtime holds, whose arena doubles as it grows. Set on one model, 12 convolutions of
8 x 320 x 320 in batches of 32 (1.9 GiB to calibrate, 2.35 in all; foretold 1.7 and 2.5, without it 1.6 in all)."""
ON_CPU = ("onnxruntime-cpu", "openvino")
"""Backends whose activations lie in this machine's own memory."""


@dataclass(frozen=True)
class StageForecast:
    """One stage of a run: `name` as the log and the plan have it, the most memory that it takes, its seconds.

    Seconds are found when they are asked for, because rates of this machine are measured for them: `apply` asks for
    memory and disk alone.
    """

    name: str
    memory_bytes: int
    find_seconds: Callable[[], float]

    @cached_property
    def seconds(self) -> float:
        return self.find_seconds()


@dataclass(frozen=True)
class Forecast:
    """`memory_bytes` is the peak of the processes together, `disk_bytes` what the cache and the bundle take.

    `bundle_bytes`: the bundle's part of that. `stages`: in order.
    """

    memory_bytes: int
    disk_bytes: int
    bundle_bytes: int = 0
    stages: tuple[StageForecast, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    def to_record(self) -> dict[str, Any]:
        """Return it as JSON: {"seconds", "memory_bytes", "disk_bytes", "bundle_bytes", "stages": [...]}."""
        stages = [
            {"name": stage.name, "seconds": stage.seconds, "memory_bytes": stage.memory_bytes} for stage in self.stages
        ]
        sizes = {"memory_bytes": self.memory_bytes, "disk_bytes": self.disk_bytes, "bundle_bytes": self.bundle_bytes}
        return {"seconds": self.seconds, **sizes, "stages": stages}


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
    sample = sample_bytes(inputs.feeds)
    on_cpu = choose_backend(recipe.target, None, recipe.model.generates)[0] in ON_CPU
    activations = inputs.facts.peak_activation_bytes if on_cpu else 0
    return TimedBatch(key, n_samples, int(n_samples * sample * filled), int(n_samples * activations * filled))


def forecast(
    recipe: Recipe,
    before: ModelFacts,
    after: ModelFacts,
    volumes: Volumes,
    decisions: Sequence[Sequence[LayerDecision]] = (),
    timed: TimedBatch | None = None,
    rates: Rates | None = None,
    latency: LatencyForecast | None = None,
) -> Forecast:
    """Estimate the time, memory and disk that a recipe takes, as the sum of what each piece of work needs.

    `decisions`: what each pass will do to the layers; not given, it is taken to work on all. `timed`: the largest batch
    that judging times. `rates`: of this machine; not given, they are measured. `latency`: what was measured of models
    that were made like the recipe's.
    """
    rates = rates or find_rates(find_inner_width(before))
    run = _Run(recipe, before, after, volumes, decisions, timed, rates, latency)
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
    rates: Rates
    latency: LatencyForecast | None

    def list_stages(self) -> list[StageForecast]:
        """Return the stages of the run, in order."""
        stages = []
        if self.recipe.has_onnx:
            stages.append(StageForecast(EXPORT, self.export_bytes(), self.export_seconds))
        if self.recipe.has_onnx and not self.in_files:
            memory = self.graph_bytes() + self.evaluation_bytes(1)
            stages.append(StageForecast(BASELINE, memory, partial(self.evaluation_seconds, 1)))
        names = pass_names(self.recipe.passes)
        stages += [
            StageForecast(name, self.pass_bytes(number), partial(self.pass_seconds, number))
            for number, name in enumerate(names)
        ]
        in_torch = self.in_files or not self.recipe.has_onnx or is_scored_by_torch(self.recipe, self.before)
        if self.before.structure is not None and in_torch:
            stages.append(StageForecast("scoring the model in torch", self.scoring_bytes(), self.scoring_seconds))
        if self.n_checkpoints:
            stages.append(StageForecast(WRITING, self.writing_bytes(), self.writing_seconds))
        if self.recipe.has_onnx:
            stages.append(StageForecast("judging", self.judging_bytes(), self.judging_seconds))
        return [StageForecast("start", self.base_bytes, self.start_seconds), *stages]

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

    @property
    def forward(self) -> float:
        """Return the seconds of one sample through the float model in ONNX Runtime, on all threads."""
        speed = self.recipe.validate_.benchmark
        if self.latency is not None and self.latency.metric != "tpot":
            return self.latency.float_ms / 1000 / speed.batch_size * speed.threads / self.rates.threads
        return 2 * self.before.macs / (matrix_rate() * EFFICIENCY)

    def start_seconds(self) -> float:
        """Return the seconds until work begins: imports, the plan, digests of weights that were not read."""
        unread = (
            self.volumes.unread_bytes / (self.rates.hash * (os.cpu_count() or 1)) if self.volumes.unread_bytes else 0
        )
        return AROUND * self.rates.start + unread

    def export_seconds(self) -> float:
        """Return the seconds of exporting the float graph, writing and comparing it.

        Where weights stay in files none are written; they are read twice, to compare torch with the graph.
        """
        if self.before.source == "onnx":
            return self.before.n_bytes / self.rates.write
        traced = len(self.before.layers) * TRACED_A_LAYER * self.rates.trace
        if self.in_files:
            return traced + 2 * BlockTime(self.before, self.rates).read_seconds()
        if self.latency is not None and self.latency.export_s:
            traced = self.latency.export_s
        return traced + self.before.n_bytes * (2 / self.rates.write + 2 / self.rates.touch)

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

    def evaluation_seconds(self, runs: float) -> float:
        """Return the seconds of so many passes over the evaluation set in ONNX Runtime."""
        rows = self._rows("evaluation")
        filled = self.volumes.scored / rows if self.volumes.scored and rows else 1.0
        return runs * filled * self.volumes.samples.get("evaluation", 0) * self.forward

    def pass_seconds(self, number: int) -> float:
        """Return the seconds of a pass, and of measuring what it leaves where that is asked for."""
        pass_ = self.recipe.passes[number]
        trained = self._training(number).seconds
        if self.on_blocks(number):
            work = pass_.count_block_work(self.before, self.calibration.a_sample)
            tokens = self.calibration if pass_.needs_calibration else Tokens(0)
            timed = BlockTime(self.before, self.rates)
            return trained + timed.pass_seconds(work, pass_.find_weight_scheme(), tokens, self.find_rounded(number))
        runs = pass_.calibration_runs * self.volumes.samples.get("calibration", 0)
        return trained + self.choosing_seconds(number) + runs * self.forward + self.pruning_seconds(number)

    def pruning_seconds(self, number: int) -> float:
        """Return the seconds of finding what goes, and of fitting what stays."""
        work = self.recipe.passes[number].count_pruning(self.before)
        if not (work.forwards or work.tried):
            return 0.0
        calls = self.find_calls() if work.timed else Calls(0.0, 0.0, 0.0)
        timed = PruningTime(
            self.rates,
            self.volumes.samples.get("calibration", 0),
            self.calibration.a_sample,
            self.forward,
            self.export_seconds(),
            (calls.float_s, calls.candidate_s),
        )
        return timed.pass_seconds(work)

    def choosing_seconds(self, number: int) -> float:
        """Return the seconds of timing placements whole; layers alone were timed for the plan, and are kept."""
        if not self.recipe.passes[number].chooses_by_time or self.recipe.model.generates:
            return 0.0
        calls, size = self.find_calls(), self.recipe.validate_.benchmark.batch_size
        timed = [size * calls.float_s, *[size * calls.candidate_s] * PLACEMENTS]
        again = GRAPH_BUDGET_S * (1 + PLACEMENTS // 2)  # about half of them are close to the best
        step = turns_seconds(timed, CALLS, 2, SCREEN_BUDGET_S) + again + 2 * PROCESSES * calls.process_s
        return STEPS * step + PROCESSES * calls.process_s + 3 * GRAPH_BUDGET_S

    def pass_bytes(self, number: int) -> int:
        """Return the memory of a pass: its stream of blocks, its training, or the graph that it works on."""
        pass_ = self.recipe.passes[number]
        if self.on_blocks(number):
            return self.base_bytes + max(self._training(number).memory_bytes, self.stream_bytes(number))
        calibrated = self.volumes.batch * self.before.peak_activation_bytes if pass_.needs_calibration else 0
        if calibrated and pass_.stage_on(self.before) == "graph":
            # all layers' outputs, float and rounded, are compared, piece by piece
            taps = FLOAT_BYTES * sum(layer.n_outputs for layer in self.before.layers)
            calibrated += 2 * ARENA * min(self.volumes.batch * taps, max(OUTPUT_BYTES, taps))
        held = self.graph_bytes() if self.recipe.has_onnx else self.base_bytes
        return held + max(self._training(number).memory_bytes, calibrated)

    def stream_bytes(self, number: int) -> int:
        """Return the bytes that a pass over blocks takes at its peak, above what the process holds."""
        pass_, structure = self.recipe.passes[number], self.before.structure
        assert structure is not None
        use = StreamUse(
            lockstep=getattr(pass_, "sequential", True),
            float_too=pass_.keeps_float_blocks,
            compute=getattr(pass_, "compute", "float32"),
            rounded=self.find_rounded(number),
        )
        rows = self.calibration.n if pass_.needs_calibration else 0
        peak = stream_memory(structure, _collect_shapes(self.before), rows, _find_width(self.before), use)
        if not rows:  # without data the parts outside are opened as a block is, tables of embeddings and all
            peak = max(peak, FIXED_BYTES + self.outside_bytes())
        if sent := min(pass_.count_block_work(self.before, self.calibration.a_sample).gradient_rows, rows):
            shapes = _collect_shapes(self.before)
            peak = max(peak, backward_memory(structure, shapes, sent, _find_width(self.before)))
        calibration = self.recipe.data.calibration
        if self.before.reads_apart and rows and calibration is not None and calibration.packing:
            # a mask [T, T] of each row, which no other row has
            peak += FLOAT_BYTES * rows * self.calibration.a_sample
        return peak + pass_.estimate_extra_bytes(self.before)

    def outside_bytes(self) -> int:
        """Return the float32 bytes of the layers outside the blocks, tied ones once."""
        structure = self.before.structure
        assert structure is not None
        inside = {layer for block in structure.blocks for layer in block.layers}
        outside = {layer.weight: layer.n_weights for layer in self.before.layers if layer.name not in inside}
        return FLOAT_BYTES * sum(outside.values())

    def judging_seconds(self) -> float:
        """Return the seconds of the candidate's outputs, the timed calls, and models between the passes."""
        speed, between = self.recipe.validate_.benchmark, self.between
        calls = self.find_calls()
        if self.recipe.model.generates:
            seconds = self.judged_seconds() if self.in_files else self.evaluation_seconds(JUDGING_RUNS + between)
            return seconds + between * self.export_seconds() + self._request_seconds(calls)
        seconds = self.evaluation_seconds(between) + between * self.export_seconds()
        n_samples = self.volumes.samples.get("evaluation", 0)
        return seconds + judging_seconds(speed, n_samples, calls, self.recipe.validate_.gates)

    def find_calls(self) -> Calls:
        """Return how long a call of a sample takes on the timed threads: measured, or by its work."""
        speed = self.recipe.validate_.benchmark
        single = self.forward * self.rates.threads / speed.threads
        before, after = single, single
        if self.latency is not None and self.latency.metric != "tpot":
            before, after = (ms / 1000 / speed.batch_size for ms in (self.latency.float_ms, self.latency.compressed_ms))
        elif self.recipe.model.generates:
            before = after = single * min(speed.prompt_tokens / _count_rows(self.before), 1.0)
        return Calls(before, after, self.rates.process()[0], self.between, self.find_others())

    def find_others(self) -> list[str]:
        """Return the backends on which the files are run, too, in the process that judges: no decoder's."""
        if self.recipe.model.generates:
            return []
        main = choose_backend(self.recipe.target, None)[0]
        return [name for name in ON_CPU if name != main and BACKENDS[name].available() is None]

    def judged_seconds(self) -> float:
        """Return the seconds of sending the evaluation texts through a large candidate, on the timed threads.

        And through the float model, where it is run.
        """
        timed, tokens = BlockTime(self.before, self.rates), Tokens(self.volumes.scored or self._rows("evaluation"))
        slower = self.rates.threads / self.recipe.validate_.benchmark.threads
        return (1 + self.runs_float) * slower * (timed.forward_seconds(tokens) + timed.head_seconds(tokens.n))

    def _request_seconds(self, calls: Calls) -> float:
        """Return the seconds of timed requests: prompts through both models, then tokens that read all weights each.

        Of the candidate alone where the float graph is not run.
        """
        tokens = [self.before.n_bytes / self.rates.scan, self.after.n_bytes / self.rates.scan]
        if self.latency is not None and self.latency.metric == "tpot":
            tokens = [self.latency.float_ms / 1000, self.latency.compressed_ms / 1000]
        return requests_seconds(self.recipe.validate_.benchmark, calls, tokens if self.runs_float else tokens[1:])

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
        alone = self.rates.process()[1] + 2 * self.before.n_bytes  # the process in which a model's load is measured
        compared = self.evaluation_bytes(2) + sum(self.rates.process(name)[1] for name in self.find_others())
        return self.graph_bytes() + max(timed, alone, compared)

    def evaluation_bytes(self, models: int) -> int:
        """Return the memory of a batch of the evaluation set: activations of one model, and the logits of all."""
        size = fixed_batch(self.before.inputs) or self.recipe.validate_.batch_size
        size = min(size, max(self.volumes.samples.get("evaluation", 0), 1))
        if not self.recipe.model.generates:  # all sessions that are compared keep what a batch took
            ways = 1 if models == 1 else self.find_calls().n_ways
            return ARENA * ways * size * self.before.peak_activation_bytes
        rows = _count_rows(self.before)
        longest = min(self.volumes.longest or rows, rows)
        logits = FLOAT_BYTES * longest * self._vocabulary
        size = max(1, min(size, LOGITS_BYTES // max(logits, 1)))
        return size * (self.before.peak_activation_bytes * longest // rows + models * logits)

    def scoring_seconds(self) -> float:
        """Return the seconds of scoring both models in torch, block by block."""
        rounded = {name for number in range(len(self.recipe.passes)) for name in self.find_rounded(number) or ()}
        tokens = Tokens(self.volumes.scored or self._rows("evaluation"), self.calibration.a_sample)
        return BlockTime(self.before, self.rates).scoring_seconds(tokens, rounded)

    def scoring_bytes(self) -> int:
        """Return the memory of scoring: heads and logits of two models side by side, and what their blocks hand on."""
        structure = self.before.structure
        assert structure is not None
        n_scored = self.volumes.scored or self._rows("evaluation")
        handed_on = 2 * FLOAT_BYTES * n_scored * _find_width(self.before)
        compared = REDUCED_COPIES * 8 * min(REDUCED_AT_ONCE, _count_rows(self.before) * self._vocabulary)
        return self.base_bytes + head_memory(structure, _collect_shapes(self.before)) + handed_on + compared

    @property
    def _vocabulary(self) -> int:
        """Return how many logits a token has."""
        return max((layer.shape[0] for layer in self.before.layers), default=0)

    def loads_whole(self) -> bool:
        """Return whether a checkpoint is run when it is loaded back, or its tensors are only read."""
        return self.before.n_bytes * HEADROOM <= allowed_bytes(self.recipe, self.base_bytes + self.library_bytes)

    def writing_seconds(self) -> float:
        """Return the seconds of writing checkpoints and of loading each back in a process of its own."""
        written = self.after.n_bytes * (1 / self.rates.write + 2 / self.rates.hash)
        weights = self.before.n_bytes / FLOAT_BYTES
        read = (3 if self.loads_whole() else 1) * weights / self.rates.read  # there, and here as stored and as judged
        return self.n_checkpoints * (written + read + self.rates.start)

    def writing_bytes(self) -> int:
        """Return the memory of this process and the one in which a checkpoint is loaded back, together."""
        loaded = LOADED_COPIES * self.before.n_bytes if self.loads_whole() else 0
        return int(self.base_bytes + self.library_bytes + loaded)

    def disk_bytes(self) -> tuple[int, int]:
        """Return the bytes on the disk, and the bundle's part of them."""
        n_streams = sum(map(self.on_blocks, range(len(self.recipe.passes))))
        disk = self.after.n_bytes + n_streams * self.after.n_bytes
        disk += max((self._training(number).disk_bytes for number in range(len(self.recipe.passes))), default=0)
        if self.in_files:
            disk += self.after.n_bytes + self.runs_float * self.before.n_bytes
        elif self.recipe.has_onnx:
            kept = len(self.recipe.passes) - n_streams + 2 + self.between
            disk += 2 * self.before.n_bytes + kept * self.before.n_bytes
        bundle = len(self.recipe.export) * self.after.n_bytes + self.runs_float * self.before.n_bytes
        return disk, min(bundle, disk)

    def on_blocks(self, number: int) -> bool:
        return self.before.structure is not None and self.recipe.passes[number].stage_on(self.before) == "blocks"

    def find_rounded(self, number: int) -> set[str] | None:
        """Return the layers that a pass works on; None: all."""
        return {d.layer for d in self.decisions[number] if d.action != "kept"} if self.decisions else None

    @property
    def calibration(self) -> Tokens:
        """Return the rows of the calibration set, and of one sample."""
        n = self.volumes.tokens or self._rows("calibration")
        return Tokens(n, max(n // max(self.volumes.samples.get("calibration", 0), 1), 1))

    def _rows(self, name: str) -> int:
        return self.volumes.samples.get(name, 0) * _count_rows(self.before)

    def _training(self, number: int) -> TrainingCost:
        samples = self.volumes.samples.get("train", 0)
        return self.recipe.passes[number].estimate_training(self.before, samples, self.forward, self.volumes.filled)


def find_inner_width(facts: ModelFacts) -> int:
    """Return the inputs of the layer in the middle of all, by their number."""
    sizes = sorted(layer.shape[1] for layer in facts.layers if layer.op == "MatMul" and len(layer.shape) > 1)
    return sizes[len(sizes) // 2] if sizes else SIDE


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


@cache
def find_rates(width: int) -> Rates:
    """Return the rates for products of that width, which all plans of a process share: each is measured once."""
    return Rates(width=width)


@cache
def matrix_rate() -> float:
    """Measure the FLOP/s of a float32 matrix product on this machine: the best of a few, each of milliseconds."""
    a = np.ones((512, 512), np.float32)
    return max(2 * 512**3 / time_call(lambda: a @ a) for _ in range(8))


def measure_held_bytes() -> int:
    """Return the memory that this process holds now: what a run in one like it begins with."""
    return int(rss_mib() * 2**20)
