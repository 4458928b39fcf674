"""The forecast: more work, more of it; and the arithmetic of its terms, on a machine whose speed is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from compress.facts import BlockFacts, LayerFacts, ModelFacts, Structure
from compress.passes import AutoRound, Distill, Int8, Pass, Rtn, SmoothQuant, Tune
from compress.passes.training import BFLOAT16
from compress.planning import forecast as room
from compress.planning.forecast import (
    EFFICIENCY,
    LIBRARIES_BYTES,
    ONNX_BYTES,
    Forecast,
    Volumes,
    forecast,
    matrix_rate,
)
from compress.recipe.schema import Recipe
from compress.specs import ModelSpec

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
    monkeypatch.setattr(room, "matrix_rate", lambda: 2 * MIB / 1e-3 / EFFICIENCY)
    monkeypatch.setattr(room.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(room.time, "process_time", lambda: 1e3)
    monkeypatch.setattr(room, "held_bytes", lambda: 0)


def expect(recipe: Recipe = RECIPE, facts: ModelFacts = FACTS, samples: Any = SAMPLES, batch: int = 32) -> Forecast:
    return forecast(recipe, facts, facts.with_bits({"fc": 8}), Volumes(samples, batch))


def test_the_terms() -> None:
    """1.6 passes over the calibration set, 3 over the evaluation set, 2 models timed 210 times, 40 batches of 64."""
    seconds = 8 + 4 * MIB / 20e6 + 1.6 + 3 + 2 * 1e-3 * (10 + 2 * 100) + 40 * 1e-3 * 64
    found = expect()
    assert found.seconds == pytest.approx(seconds)
    assert found.memory_bytes == LIBRARIES_BYTES + ONNX_BYTES + 4 * 4 * MIB + 2 * 32 * MIB
    assert found.disk_bytes == 2 * 4 * MIB + 3 * 4 * MIB + MIB


def test_more_work_takes_more() -> None:
    base = expect()
    assert expect(samples={**SAMPLES, "calibration": 2000}).seconds == pytest.approx(base.seconds + 1.6)
    more = expect(RECIPE.model_copy(update={"passes": (SmoothQuant(), Int8())}))
    assert more.seconds > base.seconds
    assert more.disk_bytes == base.disk_bytes + 2 * 4 * MIB, "its result, and the file that what it left is measured by"
    assert expect(batch=64).memory_bytes == base.memory_bytes + 2 * 32 * MIB
    larger = expect(facts=replace(FACTS, other_bytes=100 * MIB))
    assert larger.memory_bytes == base.memory_bytes + 400 * MIB and larger.disk_bytes > base.disk_bytes


def test_learning_saves_its_state_on_the_disk() -> None:
    def disk(*passes: Pass) -> int:
        return expect(RECIPE.model_copy(update={"passes": passes})).disk_bytes

    whole, scales = (disk(Tune(blockwise=how)) - disk(Rtn()) for how in (False, True))
    assert whole == scales == 4 * 4 * MIB  # without structure all is one block
    blocks = tuple(BlockFacts(f"blocks.{i}", ()) for i in range(4))
    facts = replace(FACTS, structure=Structure(blocks))
    assert AutoRound().estimate_training(facts, 0, 0.0).disk_bytes == 4 * MIB
    assert Rtn().estimate_training(facts, 0, 0.0).disk_bytes == 0


def test_training_takes_what_its_samples_are_long_and_its_precision_is_fast() -> None:
    samples = {**SAMPLES, "train": 1000}

    def seconds(filled: float = 1.0, **knobs: Any) -> float:
        recipe = RECIPE.model_copy(update={"passes": (Distill(epochs=10, held_out=0, **knobs),)})
        return forecast(recipe, FACTS, FACTS, Volumes(samples, 32, filled=filled)).seconds

    whole = seconds() - seconds(filled=0.0)
    assert whole > 10
    assert seconds(filled=0.25) - seconds(filled=0.0) == pytest.approx(whole / 4)
    assert seconds(precision="bfloat16") - seconds(filled=0.0) == pytest.approx(BFLOAT16 * whole)
    assert seconds(max_seconds=3.0) - seconds(filled=0.0) == pytest.approx(3.0)


def test_the_rate_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 4.0, 4.0, 5.0, 5.0, 7.0, *([0.0, 9.0] * 5)])
    monkeypatch.setattr(room.time, "perf_counter", lambda: next(times))
    assert matrix_rate() == 2 * 512**3 / 1.0
