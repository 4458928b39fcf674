"""The build's clock: what it keeps, for whom, and that it tells a graph that does four times the work from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from compress.errors import CompressError
from compress.timing.clock import PROCESSES, Clock, middle_batch
from compress.timing.kept import Kept, name_given
from runtime.clock.graphs import Node, write_model
from runtime.errors import RuntimeFailure


def chain(layers: int, width: int = 256) -> ir.Model:
    """So many products x [64, width] W, one after the other."""
    nodes: list[Node] = []
    for number in range(layers):
        out = "y" if number == layers - 1 else f"h{number}"
        nodes.append(("MatMul", ["x" if number == 0 else f"h{number - 1}", "w"], [out], {}))
    weight = (np.random.default_rng(0).normal(size=(width, width)) / 16).astype(np.float32)
    io = ("float32", (64, width))
    return ir.from_proto(onnx.load_from_string(write_model(nodes, {"w": weight}, {"x": io}, {"y": io})))


FEEDS = [{"x": np.ones((64, 256), np.float32)}]


@pytest.mark.slow
def test_more_work_takes_longer_in_this_process_and_in_fresh_ones() -> None:
    clock = Clock("onnxruntime-cpu")
    once, often = clock.time([chain(2), chain(16)], FEEDS, budget_s=1.0)
    assert often > 2 * once
    times = clock.compare([chain(2), chain(16)], FEEDS, budget_s=1.0)
    same, slower = times.speed(0), times.speed(1)
    assert same.low == same.value == same.high == 1.0
    assert 0 < slower.low <= slower.value <= slower.high < 0.5
    assert PROCESSES == 6


def test_each_graph_may_have_a_backend_of_its_own_and_what_it_raises_is_raised() -> None:
    with pytest.raises((RuntimeFailure, CompressError), match="unknown backend 'abacus'"):
        Clock("onnxruntime-cpu").time([chain(1), chain(1)], FEEDS, 0.0, ["onnxruntime-cpu", "abacus"])


def test_what_was_measured_is_kept_for_its_key_and_machine(tmp_path: Path, cpuinfo: Path) -> None:
    kept = Kept(tmp_path)
    assert kept.read("widths", [1]) is None
    kept.write("widths", [1], {"ms": [0.5]})
    assert kept.read("widths", [1]) == {"ms": [0.5]}
    assert kept.read("widths", [2]) is None and kept.read("layers", [1]) is None
    cpuinfo.write_text("model name: another\nflags: avx2")
    assert kept.read("widths", [1]) is None
    assert Kept().read("widths", [1]) is None
    Kept().write("widths", [1], {})


def test_an_edited_measurement_is_none(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.write("widths", [], {"ms": 0.5})
    (file,) = tmp_path.rglob("*.json")
    file.write_text(file.read_text().replace("0.5", "0.1"))
    assert kept.read("widths") is None


def test_what_a_lock_gives_holds_on_any_machine(tmp_path: Path, cpuinfo: Path) -> None:
    kept = Kept(tmp_path)
    kept.give(name_given("placement", ["a graph"]), {"choice": {"kind": "all"}})
    cpuinfo.write_text("model name: another")
    assert kept.read_given("placement", ["a graph"]) == {"choice": {"kind": "all"}}
    assert kept.read("placement", ["a graph"]) is None and kept.read_given("placement", ["another"]) is None


def test_the_middle_batch_is_by_size() -> None:
    batches: list[dict[str, Any]] = [{"x": np.zeros((1, n))} for n in (9, 1, 5)]
    assert middle_batch(batches)["x"].shape == (1, 5)
