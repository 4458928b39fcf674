"""Learned rounding that was broken off or killed goes on where it was saved, and ends with the same bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from child_processes import run_in_two_processes
from distilling import Interrupted
from streaming import context, llama, streamed, texts
from test_tune import in_two_bits

from compress.blocks.sharing import gather_from_processes, share
from compress.blocks.streamed import StreamedModel
from compress.context import PassResult
from compress.passes import Pass
from compress.passes.autoround import AutoRound
from compress.passes.tune import Tune
from compress.store import training_state
from compress.work import apply_pass

STEPS, MIDDLE = 6, 3
WHOLE = Tune(steps=STEPS, blockwise=False)
BLOCKS = Tune(steps=STEPS, block_steps=STEPS, blockwise=True)
ROUNDED = AutoRound(steps=STEPS, scheme="W2A16", group_size=16)
CONFIG: dict[str, Pass] = {"whole": WHOLE, "blocks": BLOCKS, "autoround": ROUNDED}

pytestmark = pytest.mark.usefixtures("one_thread")


def learned(
    config: Pass, work: Path | None = None, stop: tuple[int, int] | None = None
) -> tuple[PassResult, list[str]]:
    """(the result, the log's lines). `stop`: (a learning's number, its step's) before which it breaks off."""
    lines: list[str] = []
    count = iter(range(100))

    def progress(items: Sequence[Any], label: str, most_s: float | None = None) -> Iterator[Any]:
        number = next(count) if label == "learning" else None
        for item in items:
            if (number, item) == stop:
                raise Interrupted
            yield item

    model = streamed(llama(layers=2))
    model = model if config is ROUNDED else in_two_bits(model)
    return apply_pass(config, model, replace(context(texts(5), work, lines.append), progress=progress)), lines


def assert_same(model: StreamedModel, expected: StreamedModel) -> None:
    assert model.quantized_layers() == expected.quantized_layers()
    for layer in expected.quantized_layers():
        found, wanted = model.store.quantized(layer), expected.store.quantized(layer)
        assert found is not None and wanted is not None
        assert np.array_equal(found.values, wanted.values) and np.array_equal(found.scales, wanted.scales)
    for name in expected.store.names():
        assert torch.equal(model.store.read(name), expected.store.read(name)), name


def losses(result: PassResult) -> dict[str, dict[str, float]]:
    return {
        name: {key: value for key, value in numbers.items() if "loss" in key or "step" in key}
        for name, numbers in result.measured.items()
    }


@functools.cache
def learned_at_once(name: str) -> PassResult:
    """The result of a run that nothing breaks off; not to be changed."""
    result, lines = learned(CONFIG[name])
    assert not any("goes on from" in line for line in lines)
    return result


@pytest.mark.parametrize(
    ("name", "learning", "steps"),
    [
        ("whole", 0, (0, 1, STEPS - 1)),
        ("blocks", 0, (MIDDLE,)),
        ("blocks", 1, (0, STEPS - 1)),
        ("blocks", 2, (MIDDLE,)),
        ("autoround", 0, (0, STEPS - 1)),
        ("autoround", 1, (MIDDLE,)),
    ],
)
@pytest.mark.slow
@pytest.mark.usefixtures("saved_after_every_step")
def test_learning_that_is_broken_off_ends_with_the_same_bytes(
    name: str, learning: int, steps: tuple[int, ...], tmp_path: Path
) -> None:
    """Before the first step, between two, and before the last; in the first block, in later ones, and behind them."""
    config, expected = CONFIG[name], learned_at_once(name)
    for step in steps:
        work = tmp_path / str(step)
        with pytest.raises(Interrupted):
            learned(config, work, (learning, step))
        again, lines = learned(config, work)
        told = [line.partition("goes on from ")[2] for line in lines if "goes on from" in line]
        assert told == ([f"step {step}"] if step else [])
        assert_same(again.model, expected.model)
        assert losses(again) == losses(expected)
        assert len(list((work / "learning").iterdir())) == 1  # what is over was removed


@pytest.mark.slow
@pytest.mark.usefixtures("saved_after_every_step")
def test_what_is_damaged_is_learned_afresh(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        learned(WHOLE, tmp_path, (0, MIDDLE))
    (file,) = (tmp_path / "learning").iterdir()
    file.write_bytes(file.read_bytes()[:-4])
    again, lines = learned(WHOLE, tmp_path)
    assert "tune: end to end: what an earlier run left is damaged; learning starts afresh" in lines
    assert_same(again.model, learned_at_once("whole").model)


def test_short_learning_is_not_saved(tmp_path: Path) -> None:
    learned(WHOLE, tmp_path)
    assert not list((tmp_path / "learning").iterdir())


def learn_in_two_goes(folder: Path) -> list[int]:
    """Break learning off before a step and go on; return the ranks of the processes that did, once for each way."""
    training_state.SAVE_SECONDS = 0.0
    ranks = []
    for name, config, learning in (("whole", WHOLE, 0), ("blocks", BLOCKS, 1)):
        expected, _ = learned(config)
        with pytest.raises(Interrupted):
            learned(config, folder / name, (learning, MIDDLE))
        again, lines = learned(config, folder / name)
        assert sum(line.endswith(f"goes on from step {MIDDLE}") for line in lines) == 1, lines
        assert_same(again.model, expected.model)
        ranks += gather_from_processes(share().rank)
    return ranks


@pytest.mark.slow
def test_two_processes_go_on_together(tmp_path: Path) -> None:
    assert run_in_two_processes(learn_in_two_goes, tmp_path) == [[0, 1, 0, 1]] * 2
