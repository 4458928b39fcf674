"""The plan's forecast of speed, from injected times: what it says, keeps, and refuses to guess."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import onnx_ir as ir
import pytest
from makers import bundle_bytes, image_recipe, plan, write_recipe
from onnx import helper
from places import QUICKSTART

from compress.commands.reproduce import reproduce
from compress.execution.run import apply_recipe
from compress.export.onnx import flush_denormals
from compress.graph.layers import GraphLayer, find_layers
from compress.planning.latency import round_as_planned
from compress.planning.make_plan import make_plan
from compress.recipe.load import load_recipe
from compress.rounding.latency import StateTimer
from compress.rounding.state import GraphState
from compress.timing.clock import PROCESSES, Clock, GraphTimes


def onnx_recipe(folder: Path, passes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Write a file with a depthwise and a full convolution, batch norm unfolded, and samples; a recipe about them."""
    rng, ones = np.random.default_rng(0), np.ones(8, np.float32)
    constants = {"dw.weight": rng.normal(size=(8, 1, 3, 3)), "pw.weight": rng.normal(size=(8, 8, 1, 1))}
    norm = {f"norm.{part}": ones for part in ("gamma", "beta", "mean", "var")}
    nodes = [
        helper.make_node("Conv", ["x", "dw.weight"], ["dw_out"], pads=[1] * 4, group=8),
        helper.make_node("BatchNormalization", ["dw_out", *norm], ["normed"]),
        helper.make_node("Relu", ["normed"], ["a"]),
        helper.make_node("Conv", ["a", "pw.weight"], ["y"]),
    ]
    arrays = {name: values.astype(np.float32) for name, values in constants.items()} | norm
    ir.save(graphs.build(nodes, arrays, {"x": ("n", 8, 6, 6)}, {"y": ("n", 8, 6, 6)}), folder / "net.onnx")
    np.savez(folder / "x.npz", x=rng.normal(size=(64, 8, 6, 6)).astype(np.float32))
    return {
        "version": 1,
        "name": "foreign",
        "model": {"source": "onnx:net.onnx", "task": "generic"},
        "data": {name: {"source": "npz:x.npz"} for name in ("calibration", "evaluation")},
        "passes": list(passes),
        "validate": {"gates": [], "benchmark": {"warmup": 1, "iterations": 5, "throughput_batch_size": 1}},
    }


def price(layer: GraphLayer, in_int8: bool) -> float:
    return 2.0 if not in_int8 else 4.0 if layer.groups > 1 else 1.0


def add_prices(states: Sequence[GraphState]) -> list[float]:
    return [sum(price(layer, layer.name in state.integer) for layer in find_layers(state.model)) for state in states]


@dataclass
class Machine:
    """Takes `time` for states and `others` for graphs on several backends, in fresh processes, too."""

    time: Callable[[Sequence[GraphState]], list[float]] = add_prices
    others: tuple[float, ...] = (2.0, 1.0)
    calls: list[int] = field(default_factory=list)

    def time_states(self, states: Sequence[GraphState]) -> list[float]:
        self.calls.append(len(states))
        return self.time(states)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Times as on one where a depthwise layer takes twice as long in int8 and any other half."""
    machine = Machine()

    def compare(timer: StateTimer, states: Sequence[GraphState], *rest: Any) -> GraphTimes:
        return GraphTimes(np.array([machine.time_states(states)] * PROCESSES))

    monkeypatch.setenv("COMPRESS_TIMING", "on")
    monkeypatch.setattr(StateTimer, "time", lambda timer, states, *rest: machine.time_states(states))
    monkeypatch.setattr(StateTimer, "compare", compare)
    monkeypatch.setattr(Clock, "time", lambda clock, graphs, *rest: list(machine.others))
    return machine


def notes(made: Any) -> str:
    return "\n".join(note.text for note in made.notes)


def test_an_onnx_file_s_forecast_is_that_of_the_placement_that_gains(tmp_path: Path, machine: Machine) -> None:
    recipe = onnx_recipe(tmp_path, [{"kind": "fold_batchnorm"}, {"kind": "int8"}])
    made = plan(recipe, tmp_path, tmp_path / "cache")
    assert (made.latency.float_ms, made.latency.compressed_ms, made.latency.in_float) == (4.0, 3.0, ("dw",))
    assert "1 layer computes in float here" in notes(made) and "no faster" not in notes(made)
    n_calls = len(machine.calls)
    assert plan(recipe, tmp_path, tmp_path / "cache").latency == made.latency and len(machine.calls) == n_calls


def test_a_recipe_that_gains_nothing_is_told_so_before_any_work_and_what_gains(
    tmp_path: Path, machine: Machine
) -> None:
    pytest.importorskip("openvino")
    machine.time = lambda states: [2.0 + 0.08 * bool(s.integer) for s in states]
    made = plan(onnx_recipe(tmp_path, [{"kind": "int8"}]), tmp_path, tmp_path / "cache")
    assert "int8 makes this model no faster on onnxruntime-cpu here (0.96x), at most smaller" in notes(made)
    assert "target: openvino" in notes(made) and "2.00x" in notes(made)


def test_another_way_that_is_faster_than_a_recipe_that_gains_is_told(tmp_path: Path, machine: Machine) -> None:
    pytest.importorskip("openvino")
    machine.time = lambda states: [4.0, 2.0]
    machine.others = (4.0, 1.0)
    made = plan(onnx_recipe(tmp_path, [{"kind": "int8", "placement": "auto"}]), tmp_path, tmp_path / "cache")
    assert "faster here than this recipe's 2.00x: target: openvino" in notes(made) and "4.00x" in notes(made)


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        (
            {"metric": "latency_p50", "min_speedup": 2.5},
            "warning: gate latency_p50 min_speedup 2.5: foreseen 2.00x, w",
        ),
        (
            {"metric": "latency_p50", "min_speedup": 1.5},
            "info: gate latency_p50 min_speedup 1.5: foreseen 2.00x, s",
        ),
        ({"metric": "latency_p50", "max": 2.05}, "info: gate latency_p50 max 2.05: foreseen 2 ms, near the bound"),
        ({"metric": "size_ratio", "min": 3.9}, "warning: gate size_ratio min 3.9: foreseen"),
        ({"metric": "size", "max": 1}, "warning: gate size max 1: foreseen"),
    ],
)
def test_gates_are_held_against_what_is_foretold(
    tmp_path: Path, machine: Machine, gate: dict[str, Any], said: str
) -> None:
    machine.time = lambda states: [4.0, 2.0]
    recipe = onnx_recipe(tmp_path, [{"kind": "int8", "placement": "auto"}]) | {"validate": {"gates": [gate]}}
    made = plan(recipe, tmp_path, tmp_path / "cache")
    assert any(f"{note.level}: {note.text}".startswith(said) for note in made.notes), notes(made)


@pytest.mark.parametrize(
    ("with_zeros", "said"), [(3.0, "of the 2.00x foreseen 1.33x come from these zeros alone"), (3.9, "")]
)
def test_of_a_gain_that_denormal_weights_make_their_part_is_told(
    tmp_path: Path, machine: Machine, with_zeros: float, said: str
) -> None:
    machine.time = lambda states: [4.0, 2.0, with_zeros][: len(states)]
    recipe = onnx_recipe(tmp_path, [{"kind": "int8", "placement": "auto"}])
    model = ir.load(tmp_path / "net.onnx")
    weight = model.graph.initializers["pw.weight"]
    values = weight.const_value.numpy().copy()  # type: ignore[union-attr]
    values[:2] = 1e-40
    weight.const_value = ir.tensor(values, name="pw.weight")
    ir.save(model, tmp_path / "net.onnx")
    made = plan(recipe, tmp_path, tmp_path / "cache")
    assert said in notes(made) and ("16 weights are denormal numbers" in notes(made)) == bool(said)
    assert flush_denormals(model) == 16 and flush_denormals(model) == 0


def test_where_nothing_is_timed_the_plan_says_so_and_why(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = onnx_recipe(tmp_path, [{"kind": "int8"}])
    engine = plan(recipe | {"target": "tensorrt"}, tmp_path, tmp_path / "cache")
    assert "nothing was measured: tensorrt does not run here" in notes(engine)
    monkeypatch.setenv("COMPRESS_TIMING", "off")
    off = plan(recipe, tmp_path, tmp_path / "cache")
    assert "nothing was measured: COMPRESS_TIMING is off" in notes(off)
    assert engine.latency is None and off.latency is None and not machine.calls


def test_timed_and_untimed_results_have_keys_of_their_own(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, keys = onnx_recipe(tmp_path, [{"kind": "int8"}]), []
    slower = recipe | {"validate": {"benchmark": {"threads": 2}}}
    for case, switch in ((recipe, "on"), (slower, "on"), (recipe, "off")):
        monkeypatch.setenv("COMPRESS_TIMING", switch)
        keys.append(plan(case, tmp_path, tmp_path / "cache").keys.passes[0])
    assert len(set(keys)) == 3


def test_weights_are_rounded_as_the_scheme_says(tmp_path: Path) -> None:
    from compress.formats.schemes import Scheme, WeightScheme

    state = round_as_planned(
        GraphState(graphs.one_layer()), {"fc": Scheme(WeightScheme(4, 32)), "gone": Scheme(WeightScheme(4))}
    )
    assert state.weight_only == ["fc"] and (state.weights["fc"].bits, state.weights["fc"].group_size) == (4, 32)


@pytest.mark.slow
def test_a_torch_model_is_built_untrained_pruned_as_planned_and_exported(tmp_path: Path, machine: Machine) -> None:
    seen: list[list[tuple[int, ...]]] = []

    def time(states: Sequence[GraphState]) -> list[float]:
        seen.append([state.facts()[1].shape for state in states])
        return [4.0, 1.0]

    machine.time = time
    recipe = image_recipe(tmp_path)
    recipe["passes"] = [{"kind": "prune_channels", "ratio": 0.5, "targets": ["fc1"]}]
    made = plan(recipe, tmp_path, tmp_path / "cache")
    assert made.latency.speedup == 4 and seen[-1] == [(32, 256), (16, 256)]


@pytest.mark.slow
def test_a_twin_has_the_layers_of_the_trained_model_biases_too(tmp_path: Path, machine: Machine) -> None:
    seen: list[list[bool]] = []

    def time(states: Sequence[GraphState]) -> list[float]:
        seen.append([layer.bias is not None for layer in find_layers(states[0].model)])
        return [1.0] * len(states)

    machine.time = time
    make_plan(load_recipe(QUICKSTART, ["passes=[{kind: equalize}]"]), tmp_path)
    assert seen[0] == [True] * 7  # a batch norm of a new model has no bias, and one of a trained model has


@pytest.mark.slow
def test_the_lock_repeats_the_choice_on_a_machine_with_other_times(tmp_path: Path, machine: Machine) -> None:
    recipe = write_recipe(
        tmp_path / "foreign.yaml", onnx_recipe(tmp_path, [{"kind": "fold_batchnorm"}, {"kind": "int8"}])
    )
    apply_recipe(load_recipe(recipe), tmp_path / "first", tmp_path / "cache", quiet=True)
    lock = json.loads((tmp_path / "first/lock.json").read_text())
    assert list(lock["choices"]["1"]["in_float"]) == ["dw"]
    layers = {row["layer"]: row for row in json.loads((tmp_path / "first/layers.json").read_text())}
    assert "computed in float" in layers["dw"]["reason"] and layers["pw"]["reason"] == "W8A8"
    machine.time = lambda states: [5.0 - bool(s.integer) for s in states]
    assert reproduce(tmp_path / "first", out=tmp_path / "again", quiet=True).same
    assert bundle_bytes(tmp_path / "again") == bundle_bytes(tmp_path / "first")
