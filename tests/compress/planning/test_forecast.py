"""The forecast: more work, more of it; and the arithmetic of its terms, on a machine whose speed is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from compress.facts import BlockFacts, LayerFacts, ModelFacts, Reading, Removable, Structure
from compress.formats.schemes import PRESETS
from compress.passes import AutoRound, Awq, Distill, Gptq, Hqq, Int8, Pass, Rtn, SmoothQuant, Tune
from compress.passes.training import BFLOAT16, TRAINED_COPIES
from compress.planning import forecast as room
from compress.planning.block_time import PASSED_OVER, BlockTime, Tokens
from compress.planning.forecast import (
    EFFICIENCY,
    LIBRARIES_BYTES,
    ONNX_BYTES,
    Forecast,
    StageForecast,
    Volumes,
    forecast,
    matrix_rate,
)
from compress.planning.judging_time import Calls, judging_seconds, requests_seconds, turns_seconds
from compress.planning.measured_speed import LatencyForecast
from compress.planning.rates import Columns, Rates
from compress.quantize.fastest import GRAPH_BUDGET_S, SCREEN_BUDGET_S
from compress.quantize.gptq import Rules
from compress.recipe.schema import Recipe
from compress.specs import ModelSpec
from compress.timing.clock import CALLS, PROCESSES
from runtime.bundle.manifest import Benchmark

MIB = 2**20
FACTS = ModelFacts(
    source="torch",
    architecture="Net",
    task="image-classification",
    inputs=(),
    outputs=(),
    layers=(LayerFacts("fc", "Linear", "MatMul", "fc.weight", (1024, 1024), macs=MIB),),
    peak_activation_bytes=MIB,
)
RECIPE = Recipe(
    version=1, name="r", model=ModelSpec(source="onnx:m.onnx", task="image-classification"), passes=(Int8(),)
)
SAMPLES = {"calibration": 1000, "evaluation": 1000}


class GivenRates:
    """A machine whose rates are round numbers: a FLOP in 1 ns, a byte in 1 ns, a weight's rounding in 1 us."""

    touch = scan = read = write = hash = 1e9
    invert, start, trace, threads = 1e12, 8.0, 1e-4, 1

    def product(self, compute: str) -> float:
        return 1e9 if compute == "float32" else 4e9

    update = product

    def process(self, backend: str = "") -> tuple[float, int]:
        return 0.5, 80 * MIB

    def pass_over(self, n_bytes: int) -> float:
        return 1e9

    def compare(self, width: int) -> float:
        return 1e9

    def attend(self, *asked: Any) -> float:
        return 1e-3

    def round(self, *asked: Any) -> float:
        return 1e6

    def solve_hqq(self, *asked: Any) -> float:
        return 1e5

    def learn(self, *asked: Any) -> float:
        return 1e8

    def columns(self, *asked: Any) -> Columns:
        return Columns(1e-4, 1e-7)


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass of the model takes a millisecond."""
    monkeypatch.setattr(room, "matrix_rate", lambda: 2 * MIB / 1e-3 / EFFICIENCY)
    monkeypatch.setattr(room.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(room, "measure_held_bytes", lambda: 0)
    monkeypatch.setattr(room, "ON_CPU", ("onnxruntime-cpu",))


def expect(recipe: Recipe = RECIPE, facts: ModelFacts = FACTS, samples: Any = SAMPLES, batch: int = 32) -> Forecast:
    return forecast(recipe, facts, facts.with_bits({"fc": 8}), Volumes(samples, batch), rates=GivenRates())  # type: ignore[arg-type]


def test_the_terms() -> None:
    """1.6 passes over the calibration set, 2 over the evaluation set, and its rounds."""
    calls = Calls(1e-3, 1e-3, 0.5)
    export = room.TRACED_A_LAYER * 1e-4 + 4 * 4 * MIB / 1e9
    judging = judging_seconds(RECIPE.validate_.benchmark, SAMPLES["evaluation"], calls)
    found = expect()
    choosing = choose([1e-3] * 11, calls)
    assert found.seconds == pytest.approx(10 + export + 1.0 + 1.6 + choosing + judging)
    assert found.memory_bytes == LIBRARIES_BYTES + ONNX_BYTES + 4 * 4 * MIB + room.ARENA * 2 * 32 * MIB
    assert found.disk_bytes == 2 * 4 * MIB + 3 * 4 * MIB + MIB


def test_more_work_takes_more() -> None:
    base = expect()
    assert expect(samples={**SAMPLES, "calibration": 2000}).seconds == pytest.approx(base.seconds + 1.6)
    more = expect(RECIPE.model_copy(update={"passes": (SmoothQuant(), Int8())}))
    assert more.seconds > base.seconds
    assert more.disk_bytes == base.disk_bytes + 2 * 4 * MIB, "its result, and the file that what it left is measured by"
    larger = expect(facts=replace(FACTS, other_bytes=100 * MIB))
    held = LIBRARIES_BYTES + ONNX_BYTES + 4 * 104 * MIB
    assert larger.memory_bytes == held + 80 * MIB + 2 * 104 * MIB, "a process that loads it, while two copies lie here"
    assert larger.disk_bytes > base.disk_bytes
    assert expect(batch=640).memory_bytes > expect(batch=320).memory_bytes > base.memory_bytes


def test_samples_lie_in_memory_from_the_start() -> None:
    """Images of 640 x 480 of a face detector's recipe were 177 of the 923 MiB that it took."""
    held = forecast(RECIPE, FACTS, FACTS, Volumes(SAMPLES, 32, sample_bytes=100 * MIB), rates=GivenRates())  # type: ignore[arg-type]
    bare = forecast(RECIPE, FACTS, FACTS, Volumes(SAMPLES, 32), rates=GivenRates())  # type: ignore[arg-type]
    grown = [more.memory_bytes - less.memory_bytes for more, less in zip(held.stages, bare.stages, strict=True)]
    assert set(grown) == {100 * MIB}


def test_what_was_measured_of_models_made_like_it_stands_for_counts() -> None:
    """Milliseconds of a call, the seconds of exporting, and the memory that they took."""
    latency = LatencyForecast("latency_p50", "onnxruntime-cpu", 4.0, 2.0, export_s=3.0, held_bytes=2**30)
    about, calls = (RECIPE, FACTS, FACTS, Volumes(SAMPLES, 32)), Calls(4e-3, 2e-3, 0.5)
    stages = {s.name: s for s in forecast(*about, rates=GivenRates(), latency=latency).stages}  # type: ignore[arg-type]
    assert stages[room.EXPORT].seconds == pytest.approx(3.0 + 4 * 4 * MIB / 1e9)
    assert stages["int8"].seconds == pytest.approx(choose([4e-3, *[2e-3] * 10], calls) + 1.6 * 4.0)
    assert stages["judging"].seconds == pytest.approx(judging_seconds(RECIPE.validate_.benchmark, 1000, calls))
    assert stages["judging"].memory_bytes == 2**30 + room.ARENA * 2 * 32 * MIB


def choose(timed: Sequence[float], calls: Calls) -> float:
    """Seconds of choosing a placement: two steps of two looks each, and what confirms it, in fresh processes."""
    looks = turns_seconds(timed, CALLS, 2, SCREEN_BUDGET_S) + 6 * GRAPH_BUDGET_S + 2 * PROCESSES * calls.process_s
    return room.STEPS * looks + PROCESSES * calls.process_s + 3 * GRAPH_BUDGET_S


def test_judging_takes_its_calls_and_no_more_than_its_budgets() -> None:
    assert turns_seconds([10.0, 10.0], 100, 10, 60.0) == 2 * 20.0 + 5 * 20.0, "warm-up, and the least rounds"
    assert turns_seconds([0.1, 0.1], 100, 1, 10.0, 20.0) == pytest.approx(0.2 + 20.0), "as long as it is to last"
    speed, swift = Benchmark(throughput_batch_size=1), Calls(1e-3, 1e-3, 0.5)
    assert 6 * 0.5 < judging_seconds(speed, 0, swift) < 6 * 1.0, "six processes begin"
    samples = judging_seconds(speed, 1000, swift) - judging_seconds(speed, 0, swift)
    assert samples == pytest.approx(1.0)
    alone = requests_seconds(speed, Calls(0.1, 0.1, 0.5), [0.01])
    assert alone == pytest.approx(60 + 6 * (0.5 + 3 * 0.74)), "the candidate alone, in its budget"


def test_learning_saves_its_state_on_the_disk() -> None:
    def disk(*passes: Pass) -> int:
        return expect(RECIPE.model_copy(update={"passes": passes})).disk_bytes

    whole, scales = (disk(Tune(blockwise=how)) - disk(Rtn()) for how in (False, True))
    assert whole == scales == 4 * 4 * MIB  # without structure all is one block
    blocks = tuple(BlockFacts(f"blocks.{i}", ()) for i in range(4))
    facts = replace(FACTS, structure=Structure(blocks))
    assert AutoRound().estimate_training(facts, 0, 0.0).disk_bytes == 4 * MIB
    assert Rtn().estimate_training(facts, 0, 0.0).disk_bytes == 0


def test_a_student_keeps_the_activations_of_the_blocks_that_it_has() -> None:
    names = [f"blocks.{n}" for n in range(4)]
    layers = tuple(LayerFacts(name, "Linear", "MatMul", f"{name}.weight", (64, 64), 4096) for name in names)
    removable = tuple(Removable(name, (name,), listed=True) for name in names)
    facts = replace(FACTS, layers=layers, removable=removable)

    def activations(student: dict[str, Any] | None) -> int:
        distill = Distill.model_validate({"epochs": 1, "student": student}, strict=False)
        return distill.estimate_training(facts, 100, 0.0).memory_bytes - TRAINED_COPIES * facts.n_bytes

    assert activations({"layers": "uniform", "keep": 2}) == activations(None) // 2 > 0


def test_training_takes_what_its_samples_are_long_and_its_precision_is_fast() -> None:
    samples = {**SAMPLES, "train": 1000}

    def seconds(filled: float = 1.0, **knobs: Any) -> float:
        recipe = RECIPE.model_copy(update={"passes": (Distill(epochs=10, held_out=0, **knobs),)})
        volumes = Volumes(samples, 32, filled=filled)
        return forecast(recipe, FACTS, FACTS, volumes, rates=GivenRates()).seconds  # type: ignore[arg-type]

    whole = seconds() - seconds(filled=0.0)
    assert whole > 10
    assert seconds(filled=0.25) - seconds(filled=0.0) == pytest.approx(whole / 4)
    assert seconds(precision="bfloat16") - seconds(filled=0.0) == pytest.approx(BFLOAT16 * whole)
    assert seconds(max_seconds=3.0) - seconds(filled=0.0) == pytest.approx(3.0)


def test_the_rate_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 4.0, 4.0, 5.0, 5.0, 7.0, *([0.0, 9.0] * 5)])
    monkeypatch.setattr("compress.planning.rates.time.perf_counter", lambda: next(times))
    assert matrix_rate.__wrapped__() == 2 * 512**3 / 1.0


WIDE, INNER, VOCABULARY = 64, 128, 1000
SHAPES = {"q": (WIDE, WIDE), "up": (INNER, WIDE), "down": (WIDE, INNER)}


def decoder(n_blocks: int = 2) -> ModelFacts:
    """Facts of a decoder whose blocks have three layers."""
    blocks = tuple(
        BlockFacts(f"b.{i}", tuple(Reading((f"b.{i}.{name}",), f"b.{i}.norm", "norm") for name in SHAPES))
        for i in range(n_blocks)
    )
    layers = [
        LayerFacts(f"b.{i}.{name}", "Linear", "MatMul", f"b.{i}.{name}.weight", shape, macs=8 * shape[0] * shape[1])
        for i in range(n_blocks)
        for name, shape in SHAPES.items()
    ]
    head = LayerFacts("head", "Linear", "MatMul", "head.weight", (VOCABULARY, WIDE))
    structure = Structure(blocks, after=(Reading(("head",)),))
    return ModelFacts("torch", "Lm", "text-generation", (), (), (*layers, head), structure=structure)


def stage_of(*passes: Pass, tokens: int = 4096, facts: ModelFacts | None = None) -> dict[str, StageForecast]:
    """The stages of a checkpoint's recipe, by name."""
    model = ModelSpec(source="dir:lm", task="text-generation")
    recipe = Recipe(
        version=1, name="r", model=model, target="transformers", passes=passes, export=({"kind": "checkpoint"},)
    )  # type: ignore[arg-type]
    facts = facts or decoder()
    volumes = Volumes({"calibration": 8, "evaluation": 4}, 1, tokens, 1024)
    found = forecast(recipe, facts, facts, volumes, rates=GivenRates())  # type: ignore[arg-type]
    assert found.seconds == pytest.approx(sum(stage.seconds for stage in found.stages))
    assert found.memory_bytes == max(stage.memory_bytes for stage in found.stages)
    return {stage.name: stage for stage in found.stages}


def test_a_checkpoint_is_neither_exported_nor_timed() -> None:
    assert list(stage_of(Rtn())) == ["start", "rtn", "scoring the model in torch", "writing the bundle"]


def test_the_terms_of_passes_over_blocks() -> None:
    time, facts = BlockTime(decoder(), GivenRates()), decoder()  # type: ignore[arg-type]
    weights = 2 * sum(out * n for out, n in SHAPES.values())
    outputs = 2 * sum(out for out, _ in SHAPES.values())
    forward = time.forward_seconds(Tokens(1000))
    assert forward == pytest.approx(1000 * (2 * weights + 4 * PASSED_OVER * outputs) / 1e9)
    assert time.forward_seconds(Tokens(2000)) == pytest.approx(2 * forward)
    assert time.forward_seconds(Tokens(1000), "bfloat16") < forward
    chosen = [layer.name for layer in facts.layers if layer.name != "head"]
    squares = 2 * sum(n**2 for _, n in SHAPES.values())
    gram = time.gram_seconds(Tokens(4096), "float32", chosen)
    assert gram == pytest.approx((2 * 4096 + 20) * squares / 1e9)  # narrow: no stripes
    assert time.inversion_seconds(chosen) == pytest.approx(2 * sum(n**3 for _, n in SHAPES.values()) / 1e12)
    rtn = time.pass_seconds(Rtn().count_block_work(facts, 8), Rtn().find_weight_scheme(), Tokens(0), chosen)
    read, written = (weights + VOCABULARY * WIDE) / 1e9, time.write_seconds(chosen)
    assert rtn == pytest.approx(read + written + weights / 1e6)


def test_each_pass_over_blocks_takes_its_own_time() -> None:
    seconds = {
        pass_.kind: stage_of(pass_)[pass_.kind].seconds
        for pass_ in (
            Rtn(group_size=32),
            Hqq(group_size=32),
            Gptq(group_size=32),
            Awq(group_size=32),
            AutoRound(group_size=32),
        )
    }
    assert seconds["rtn"] < seconds["hqq"] and seconds["rtn"] < seconds["gptq"] < seconds["awq"] < seconds["autoround"]
    assert stage_of(Gptq(compute="bfloat16"))["gptq"].seconds < seconds["gptq"]
    assert stage_of(Gptq(bits=3))["gptq"].seconds > stage_of(Gptq(sweeps=0))["gptq"].seconds
    assert stage_of(Gptq(), tokens=8192)["gptq"].seconds > seconds["gptq"]
    assert stage_of(Rtn(), tokens=8192)["rtn"].seconds == seconds["rtn"], "it reads no data"


def test_nothing_is_measured_for_memory_and_disk_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rates, "product", None)
    recipe = RECIPE.model_copy(update={"passes": (Gptq(),)})
    found = forecast(recipe, decoder(), decoder(), Volumes(SAMPLES, 1, 4096))
    assert found.memory_bytes > 0 < found.disk_bytes
    with pytest.raises(TypeError, match="not callable"):
        _ = found.seconds


def test_weights_that_were_not_read_take_time_at_the_start() -> None:
    def start(unread: int) -> float:
        recipe = RECIPE.model_copy(update={"passes": ()})
        volumes = Volumes(SAMPLES, 32, unread_bytes=unread)
        return forecast(recipe, FACTS, FACTS, volumes, rates=GivenRates()).stages[0].seconds  # type: ignore[arg-type]

    assert start(10**10) - start(0) == pytest.approx(10.0)


def test_rates_are_measured_in_moments() -> None:
    rates = Rates(width=256)
    scheme = Gptq(group_size=32).find_weight_scheme()
    assert scheme is not None
    found = [rates.touch, rates.hash, rates.product("bfloat16"), rates.round(scheme), rates.read]
    assert all(1e4 < rate < 1e15 for rate in found)
    assert rates.touch == rates.touch


@pytest.mark.parametrize("name", ["W4A16_ASYM", "NVFP4A16", "MXFP4A16", "FP8_BLOCK", "Q4_K"])
def test_every_kind_of_numbers_has_its_rates(name: str) -> None:
    rates, scheme = Rates(), PRESETS[name].weights
    found = [rates.round(scheme), rates.columns(scheme, Rules(sweeps=1)).seconds(512, 512)]
    if scheme.scales != "six-bit":  # which nothing learns
        found.append(rates.learn(scheme))
    assert all(0 < rate < float("inf") for rate in found)
