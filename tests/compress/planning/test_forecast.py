"""The forecast: more work, more of it; times that a machine has seen before, else their order of magnitude."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compress.facts import BlockFacts, InputGroup, LayerFacts, ModelFacts, Removable, Structure
from compress.passes import AutoRound, Distill, Gptq, Int8, Pass, Rtn, SmoothQuant, Tune
from compress.passes.base import DataSize
from compress.passes.training import BFLOAT16, TRAINED_COPIES
from compress.planning import forecast as room
from compress.planning.durations import Duration, Durations
from compress.planning.forecast import (
    EFFICIENCY,
    LIBRARIES_BYTES,
    ONNX_BYTES,
    Forecast,
    StageForecast,
    Volumes,
    forecast,
)
from compress.recipe.schema import Recipe
from compress.specs import ModelSpec
from compress.timing.kept import Kept

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


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass of the model takes a millisecond."""
    rate = 2 * MIB / 1e-3 / EFFICIENCY
    machine = {"matrix_rate": lambda: rate, "measure_held_bytes": lambda: 0, "ON_CPU": ("onnxruntime-cpu",)}
    for name, value in machine.items():
        monkeypatch.setattr(room, name, value)


def expect(recipe: Recipe = RECIPE, facts: ModelFacts = FACTS, samples: Any = SAMPLES, batch: int = 32) -> Forecast:
    return forecast(recipe, facts, facts.with_bits({"fc": 8}), Volumes(samples, batch))


def test_the_terms() -> None:
    """1.6 passes over the calibration set of a thousand samples, each of which takes a millisecond."""
    found = expect()
    timed = 1e-3 * room.TIMED_CALLS * RECIPE.validate_.benchmark.iterations
    written = 2 * 4 * MIB / room.DISK_BYTES_S
    first = {"start": room.START_S, room.EXPORT: 0.1 + written, room.BASELINE: 1.0 + written}
    then = {"int8": room.CLOCK_S + 1.6, "judging": room.CLOCK_S + 2.0 + timed}
    assert {stage.name: stage.duration.seconds for stage in found.stages} == pytest.approx(first | then)
    assert all(stage.duration.guessed_s == stage.duration.seconds for stage in found.stages)
    fresh = room.PROCESS_BYTES + 2 * 4 * MIB
    assert found.memory_bytes == LIBRARIES_BYTES + ONNX_BYTES + 4 * 4 * MIB + room.ARENA * 2 * 32 * MIB + fresh
    assert found.disk_bytes == 2 * 4 * MIB + 3 * 4 * MIB + MIB


def sum_seconds(found: Forecast) -> float:
    return sum(stage.duration.seconds for stage in found.stages)


def test_more_work_takes_more() -> None:
    base = expect()
    assert sum_seconds(expect(samples={**SAMPLES, "calibration": 2000})) == pytest.approx(sum_seconds(base) + 1.6)
    more = expect(RECIPE.model_copy(update={"passes": (SmoothQuant(), Int8())}))
    assert sum_seconds(more) > sum_seconds(base)
    assert more.disk_bytes == base.disk_bytes + 2 * 4 * MIB, "its result, and the file that what it left is measured by"
    larger = expect(facts=replace(FACTS, other_bytes=100 * MIB))
    held = LIBRARIES_BYTES + ONNX_BYTES + 4 * 104 * MIB + room.ARENA * 2 * 32 * MIB
    assert larger.memory_bytes == held + room.PROCESS_BYTES + 2 * 104 * MIB, "processes that load both models"
    assert larger.disk_bytes > base.disk_bytes
    assert expect(batch=640).memory_bytes > expect(batch=320).memory_bytes > base.memory_bytes


def test_samples_lie_in_memory_from_the_start() -> None:
    """Images of 640 x 480 of a face detector's recipe were 177 of the 923 MiB that it took."""
    held = forecast(RECIPE, FACTS, FACTS, Volumes(SAMPLES, 32, sample_bytes=100 * MIB))
    bare = forecast(RECIPE, FACTS, FACTS, Volumes(SAMPLES, 32))
    grown = [more.memory_bytes - less.memory_bytes for more, less in zip(held.stages, bare.stages, strict=True)]
    assert set(grown) == {100 * MIB}


def test_learning_saves_its_state_on_the_disk() -> None:
    def disk(*passes: Pass) -> int:
        return expect(RECIPE.model_copy(update={"passes": passes})).disk_bytes

    whole, scales = (disk(Tune(blockwise=how)) - disk(Rtn()) for how in (False, True))
    assert whole == scales == 4 * 4 * MIB  # without structure all is one block
    blocks = tuple(BlockFacts(f"blocks.{i}", ()) for i in range(4))
    facts = replace(FACTS, structure=Structure(blocks))
    assert AutoRound().estimate_cost(facts, DataSize()).disk_bytes == 4 * MIB
    assert Rtn().estimate_cost(facts, DataSize()).disk_bytes == 0


def test_a_student_keeps_the_activations_of_the_blocks_that_it_has() -> None:
    names = [f"blocks.{n}" for n in range(4)]
    layers = tuple(LayerFacts(name, "Linear", "MatMul", f"{name}.weight", (64, 64), 4096) for name in names)
    removable = tuple(Removable(name, (name,), listed=True) for name in names)
    facts = replace(FACTS, layers=layers, removable=removable)

    def activations(student: dict[str, Any] | None) -> int:
        distill = Distill.model_validate({"epochs": 1, "student": student}, strict=False)
        return distill.estimate_cost(facts, DataSize(train=100)).memory_bytes - TRAINED_COPIES * facts.n_bytes

    assert activations({"layers": "uniform", "keep": 2}) == activations(None) // 2 > 0


def test_training_takes_what_its_samples_are_long_and_its_precision_is_fast() -> None:
    samples = {**SAMPLES, "train": 1000}

    def seconds(filled: float = 1.0, **config: Any) -> float:
        recipe = RECIPE.model_copy(update={"passes": (Distill(epochs=10, held_out=0, **config),)})
        volumes = Volumes(samples, 32, filled=filled)
        return sum_seconds(forecast(recipe, FACTS, FACTS, volumes))

    whole = seconds() - seconds(filled=0.0)
    assert whole > 10
    assert seconds(filled=0.25) - seconds(filled=0.0) == pytest.approx(whole / 4)
    assert seconds(precision="bfloat16") - seconds(filled=0.0) == pytest.approx(BFLOAT16 * whole)
    assert seconds(max_seconds=3.0) - seconds(filled=0.0) == pytest.approx(3.0)


WIDE, INNER, VOCABULARY = 64, 128, 1000
SHAPES = {"q": (WIDE, WIDE), "up": (INNER, WIDE), "down": (WIDE, INNER)}


def decoder(n_blocks: int = 2) -> ModelFacts:
    """Facts of a decoder whose blocks have three layers."""
    blocks = tuple(
        BlockFacts(f"b.{i}", tuple(InputGroup((f"b.{i}.{name}",), f"b.{i}.norm", "norm") for name in SHAPES))
        for i in range(n_blocks)
    )
    layers = [
        LayerFacts(f"b.{i}.{name}", "Linear", "MatMul", f"b.{i}.{name}.weight", shape, macs=8 * shape[0] * shape[1])
        for i in range(n_blocks)
        for name, shape in SHAPES.items()
    ]
    head = LayerFacts("head", "Linear", "MatMul", "head.weight", (VOCABULARY, WIDE))
    structure = Structure(blocks, after=(InputGroup(("head",)),))
    return ModelFacts("torch", "Lm", "text-generation", (), (), (*layers, head), structure=structure)


def stage_of(*passes: Pass, tokens: int = 4096, facts: ModelFacts | None = None) -> dict[str, StageForecast]:
    """The stages of a checkpoint's recipe, by name."""
    model = ModelSpec(source="dir:lm", task="text-generation")
    recipe = Recipe(
        version=1, name="r", model=model, target="transformers", passes=passes, export=({"kind": "checkpoint"},)
    )  # type: ignore[arg-type]
    facts = facts or decoder()
    volumes = Volumes({"calibration": 8, "evaluation": 4}, 1, tokens, 1024)
    found = forecast(recipe, facts, facts, volumes)
    assert found.memory_bytes == max(stage.memory_bytes for stage in found.stages)
    return {stage.name: stage for stage in found.stages}


def test_a_checkpoint_is_neither_exported_nor_timed() -> None:
    assert list(stage_of(Rtn())) == ["start", "rtn", "scoring the model in torch", "writing the bundle"]


def test_each_pass_over_blocks_takes_its_own_time() -> None:
    passes = (Rtn(group_size=32), Gptq(group_size=32), AutoRound(group_size=32))
    seconds = {pass_.kind: stage_of(pass_)[pass_.kind].duration.seconds for pass_ in passes}
    assert seconds["rtn"] < seconds["gptq"] < seconds["autoround"]
    assert stage_of(Gptq(), tokens=8192)["gptq"].duration.seconds > seconds["gptq"]
    assert stage_of(Rtn(), tokens=8192)["rtn"].duration.seconds == seconds["rtn"], "it reads no data"


def test_weights_that_were_not_read_take_time_at_the_start() -> None:
    def start(unread: int) -> float:
        recipe = RECIPE.model_copy(update={"passes": ()})
        return forecast(recipe, FACTS, FACTS, Volumes(SAMPLES, 32, unread_bytes=unread)).stages[0].duration.seconds

    assert start(3 * 10**9) - start(0) == pytest.approx(10.0)


def test_what_a_stage_took_for_as_much_work_is_what_it_takes(tmp_path: Path) -> None:
    durations = Durations(Kept(tmp_path), threads=2)
    assert durations.find("gptq", 1000.0, guess_s=5.0) == Duration.guess(5.0)
    durations.keep("gptq", 1000.0, 40.0)
    durations.keep("gptq", 8000.0, 200.0)
    assert durations.find("gptq", 1000.0, 5.0) == Duration(40.0)
    assert durations.find("gptq", 1500.0, 5.0) == Duration(60.0), "in proportion, where it is alike"
    assert durations.find("gptq", 2100.0, 5.0) == Duration.guess(5.0), "between the two, and like neither"
    assert durations.find("gptq", 7000.0, 5.0) == Duration(175.0)
    assert durations.find("rtn", 1000.0, 5.0) == Duration.guess(5.0)
    assert replace(durations, threads=1).find("gptq", 1000.0, 5.0) == Duration.guess(5.0)
    durations.keep("gptq", 1000.0, 30.0)
    assert durations.find("gptq", 1000.0, 5.0) == Duration(30.0), "the last time counts"


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (Duration(40.6), "41 s"),
        (Duration(164.0), "2.7 min"),
        (Duration(0.0), "0 s"),
        (Duration.guess(20.0), "10 to 40 s"),
        (Duration.guess(100.0), "0.8 to 3 min"),
        (Duration.guess(7200.0), "1 to 4 h"),
        (Duration.add([Duration(40.0), Duration.guess(20.0)]), "50 to 80 s"),
    ],
)
def test_a_duration_is_said_as_well_as_it_is_known(duration: Duration, text: str) -> None:
    assert str(duration) == text
