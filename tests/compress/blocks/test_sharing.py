"""Two processes share the calibration data and reach what one reaches."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from child_processes import run_in_process, run_in_two_processes
from streaming import W4, context, llama, nearest, streamed, texts
from torch import Tensor

from compress.blocks import activations
from compress.blocks.block import BlockWork
from compress.blocks.sharing import (
    Share,
    from_main,
    gather_from_processes,
    main_process,
    share,
    sum_over_processes,
    wait,
)
from compress.blocks.stream import Stream
from compress.facts import InputGroup


def stream_and_sum(work: Path) -> dict[str, Any]:
    """Round a model's blocks, lockstep and not; return the calls of every process, this one's sums and its model."""
    activations.ROWS = 24
    stream = Stream(streamed(llama(layers=3)), context(texts(7), work if main_process() else None), float_too=True)
    calls: list[int] = []
    traces: list[float] = []
    for block in stream:
        round_block(block, calls, traces)
    model = stream.result().model
    assert len(model.quantized_layers()) == 22
    assert len(set(map(str, gather_from_processes(traces)))) == 1
    weights = {name: model.store.read(name) for name in model.store.names()}
    scales = dict(model.activation_scales)
    return {"calls": gather_from_processes(calls), "traces": traces, "scales": scales, "weights": weights}


def round_block(block: BlockWork, calls: list[int], traces: list[float]) -> None:
    grams: dict[InputGroup, Tensor] = {}
    calls.append(len(block.calls))

    def visit(input_group: InputGroup, x: Tensor) -> None:
        grams[input_group] = grams.get(input_group, torch.zeros(())) + (x.double().T @ x.double())

    def act(input_group: InputGroup) -> None:
        width = block.layers[input_group.layers[0]].in_features
        gram = sum_over_processes(grams.get(input_group, torch.zeros(width, width, dtype=torch.float64)))
        traces.append(float(gram.trace()))
        for layer in input_group.layers:
            block.put(layer, nearest(block.matrix(layer)), W4, float(gram.diagonal().mean()))

    if block.index % 2:
        block.collect(visit)
        for input_group in block.input_groups:
            act(input_group)
    else:
        block.lockstep(visit, act)


@pytest.mark.slow
def test_two_processes_reach_what_one_reaches(tmp_path: Path) -> None:
    """The weights bit for bit, sums of statistics to float64's rounding."""
    one = run_in_process(stream_and_sum, tmp_path / "one")
    two, other = run_in_two_processes(stream_and_sum, tmp_path / "two")
    assert one["calls"] == [[4] * 4] and two["calls"] == [[2] * 4, [2] * 4]
    assert np.allclose(one["traces"], two["traces"], rtol=1e-9)
    assert two["scales"] == other["scales"]
    for name, weight in one["weights"].items():
        assert torch.equal(weight, two["weights"][name]) and torch.equal(weight, other["weights"][name])


def test_one_process_is_alone() -> None:
    assert share() == Share(0, 1) and main_process()
    tensor = torch.ones(2)
    assert sum_over_processes(tensor) is tensor and gather_from_processes("a") == ["a"] and from_main(3) == 3
    wait()
    assert [i for i in range(5) if Share(1, 2).mine(i)] == [1, 3]


def fail_in_second() -> None:
    if share().rank:
        raise ValueError("no more")
    time.sleep(100)


def test_a_process_that_fails_ends_both() -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)fail_in_second in process 1: Traceback.*ValueError: no more"):
        run_in_two_processes(fail_in_second)
    assert time.monotonic() - started < 60
