"""`prune_channels` through recipes: the plan's widths, the smaller bundle, its weights loaded again, every refusal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import QUICKSTART
from pydantic import ValidationError
from safetensors.numpy import load_file

import compress
from compress.errors import PassError, PlanError, SourceError
from compress.facts import LayerFacts, ModelFacts, Prunable
from compress.formats.targets import TARGETS
from compress.models.load import load_model
from compress.models.source import locate
from compress.passes import PruneChannels
from compress.passes.prune_channels import count_kept_units, least_ratio, shrunk
from compress.recipe.load import Recipe
from compress.recipe.repeat import repeat_training
from compress.specs import ModelSpec

FAST = ["validate.gates=[]", "validate.benchmark={iterations: 1, processes: 1}", "data.evaluation.samples=200"]


def recipe_with(*passes: dict[str, Any], export: tuple[str, ...] = ("onnx",)) -> Recipe:
    said = f"passes=[{', '.join(_flow(one) for one in passes)}]"
    kinds = f"export=[{', '.join(f'{{kind: {kind}}}' for kind in export)}]"
    return compress.load_recipe(QUICKSTART, [*FAST, said, kinds])


def _flow(one: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in one.items()) + "}"


PRUNE = {"kind": "prune_channels", "ratio": 0.5}


def facts() -> ModelFacts:
    """Two convolutions and a Linear: 16 channels between the first two, 8 flattened into the last."""
    layers = (
        LayerFacts("a", "Conv2d", "Conv", "a.weight", (16, 3, 3, 3), 1600 * 27),
        LayerFacts("b", "Conv2d", "Conv", "b.weight", (8, 16, 3, 3), 800 * 144),
        LayerFacts("c", "Linear", "Gemm", "c.weight", (10, 32), 320),
    )
    prunable = (
        Prunable("a", "channels", 16, {"a": 1}, {"b": 1}),
        Prunable("b", "channels", 8, {"b": 1}, {"c": 4}),
    )
    return ModelFacts(
        "torch", "Net", "generic", (), (), layers, prunable=prunable, unprunable={"c": "it is the output"}
    )


def checked(**config: Any) -> Any:
    return PruneChannels(**config).check(facts(), TARGETS["onnxruntime-cpu"])


def test_widths_are_multiples_and_heads_are_not() -> None:
    assert count_kept_units(64, "channels", 0.3, 8) == 48  # 44.8 lies nearer to 48 than to 40
    assert count_kept_units(64, "channels", 0.99, 8) == 0  # less than one would stay
    assert count_kept_units(64, "channels", 0.95, 8) == 8
    assert count_kept_units(12, "heads", 0.25, 8) == 9
    assert count_kept_units(6, "neurons", 0.5, 8) == 6  # fewer than a multiple


def test_a_layer_s_work_is_a_product_of_its_widths() -> None:
    after = shrunk(facts(), facts().prunable or (), {"a": 8, "b": 4})
    assert [layer.shape for layer in after.layers] == [(8, 3, 3, 3), (4, 8, 3, 3), (10, 16)]
    assert [layer.macs for layer in after.layers] == [800 * 27, 200 * 144, 160]


def test_the_least_ratio_is_the_least() -> None:
    assert least_ratio(lambda ratio: ratio >= 0.31) == 0.31
    assert least_ratio(lambda ratio: True) == 0
    assert least_ratio(lambda ratio: False) is None


def test_the_plan_says_what_stays_and_why() -> None:
    plan = checked(ratio=0.5, round_to=4)
    said = {decision.layer: (decision.action, decision.reason) for decision in plan.decisions}
    assert said == {
        "a": ("pruned", "8 of 16 channels stay"),
        "b": ("pruned", "4 of 8 channels stay"),
        "c": ("kept", "it is the output"),
    }
    assert "32% of the multiply-accumulates stay" in plan.notes[0].text


@pytest.mark.parametrize("budget", [{"max_params": 0.5}, {"max_flops": 0.5}, {"speedup": 2.0}])
def test_a_budget_gives_widths_that_meet_it(budget: dict[str, float]) -> None:
    plan = checked(**budget, round_to=1)
    before, after = facts(), plan.facts
    share = {"max_params": after.n_bytes / before.n_bytes}.get(next(iter(budget)), after.macs / before.macs)
    assert 0.4 < share <= 0.5
    assert plan.decisions[0].reason.startswith("expected: ")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"ratio": 0.9, "round_to": 1}, r"ratio 0\.9 would leave nothing of the 8 channels of b; use at most 0\.875"),
        ({"max_params": 0.01}, r"max_params 0\.01 is out of reach: the best, with the least of every dimension left"),
        ({"speedup": 90.0}, r"speedup 90 is out of reach: .* is speedup: [\d.]+ by multiply-accumulates"),
        ({"ratio": 0.5, "ignore": ("nobody",)}, "ignore: 'nobody' selects nothing that could go"),
        ({"ratio": 0.5, "targets": ("c",)}, r"targets: 'c' selects nothing that could go: it is the output"),
        ({"ratio": 0.5, "dimensions": ("heads",)}, r"nothing is left to prune \(of this model channels could be"),
    ],
)
def test_the_plan_refuses(config: dict[str, Any], message: str) -> None:
    problem = checked(**config).problems[0]
    assert problem.startswith("prune_channels: ")
    assert re.search(message, problem)


@pytest.mark.parametrize("budget", [{"max_params": 0.01}, {"speedup": 90.0}, {"max_params": 0.01, "speedup": 90.0}])
def test_the_nearest_to_a_budget_is_the_least_that_widths_leave(budget: dict[str, float]) -> None:
    plan = checked(**budget, or_nearest=True)
    assert not plan.problems and plan.units == {"a": 8, "b": 8}
    assert plan.notes[-1].level == "warning" and re.search(
        r"is out of reach: the best, .* is [\w:. -]+$", plan.notes[-1].text
    )
    with pytest.raises(ValidationError, match="or_nearest is for budgets"):
        PruneChannels(ratio=0.5, or_nearest=True)


def test_an_onnx_file_is_refused() -> None:
    plan = PruneChannels(ratio=0.5).check(ModelFacts("onnx", "Net", "generic", (), (), ()), TARGETS["onnxruntime-cpu"])
    assert "an ONNX file cannot be pruned" in plan.problems[0]


@pytest.mark.parametrize("other", [{"max_flops": 0.4}, {"speedup": 2.5}])
def test_two_budgets_are_both_met(other: dict[str, float]) -> None:
    before, after = facts(), checked(max_params=0.6, **other, round_to=1).facts
    assert after.n_bytes / before.n_bytes <= 0.6
    assert 0.3 < after.macs / before.macs <= 0.4


def test_given_widths_are_the_widths() -> None:
    plan = checked(widths={"a": 5})
    assert [layer.shape for layer in plan.facts.layers] == [(5, 3, 3, 3), (8, 5, 3, 3), (10, 32)]
    assert plan.decisions[0].reason == "5 of 16 channels stay"
    assert "widths: a: has 16 units, not 17; there are a of 16, b of 8" in checked(widths={"a": 17}).problems[0]
    assert "widths: z: names no dimension that can be cut" in checked(widths={"z": 1}).problems[0]


@pytest.mark.parametrize("config", [{}, {"ratio": 0.5, "speedup": 2.0}, {"max_flops": 0.5, "speedup": 2.0}])
def test_one_budget_and_no_more(config: dict[str, float]) -> None:
    with pytest.raises(
        ValidationError,
        match=r"give exactly one of ratio, widths, .*, or max_params and one of",
    ):
        PruneChannels(**config)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the runs of the digits network share: the float model's export, and half of every inner width."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def pruned(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The digits network with half of every inner width, compensated, as ONNX and as a checkpoint; its bundle."""
    folder = tmp_path_factory.mktemp("pruned")
    recipe = recipe_with(PRUNE, export=("onnx", "checkpoint"))
    report = compress.apply(recipe, folder / "out", cache, quiet=True)
    again = compress.apply(recipe, folder / "again", cache, quiet=True)
    same = [(folder / name / "model/model.onnx").read_bytes() for name in ("out", "again")]
    assert same[0] == same[1]  # the second from the cache: sizes come from its record
    assert again is not None
    return folder / "out", report


@pytest.mark.slow
def test_the_bundle_is_smaller_and_nearly_as_good(pruned: tuple[Path, Any]) -> None:
    out, report = pruned
    before, after = report.baseline.metrics["top1"], report.candidate.metrics["top1"]
    assert after > before - 0.03
    sizes = [(out / name / "model.onnx").stat().st_size for name in ("baseline", "model")]
    assert sizes[1] < 0.6 * sizes[0]
    rows = {row["layer"]: row for row in report.layers}
    assert rows["layer1.conv1"]["action"] == "pruned"
    assert rows["layer1.conv1"]["width"] < rows["layer1.conv1"]["width_before"]


@pytest.mark.slow
def test_the_checkpoint_is_the_factory_s_weights_with_a_record(pruned: tuple[Path, Any]) -> None:
    """safetensors and shapes.json: a python: source takes them, and gives what the ONNX file gives."""
    import onnxruntime as ort

    weights = pruned[0] / "checkpoint/model.safetensors"
    quick = compress.load_recipe(QUICKSTART).model
    spec = ModelSpec(source=quick.source, weights=str(weights), task="image-classification")
    loaded = load_model(locate(spec, Path.cwd()), {"pixel_values": ((1, 8, 8), "float32")})
    assert load_file(weights)["layer1.conv1.weight"].shape == tuple(loaded.module.layer1.conv1.weight.shape)
    x = np.random.default_rng(0).standard_normal((3, 1, 8, 8)).astype(np.float32)
    session = ort.InferenceSession(pruned[0] / "model/model.onnx", providers=["CPUExecutionProvider"])
    expected = session.run(None, {session.get_inputs()[0].name: x})[0]
    with torch.no_grad():
        found = loaded.module(torch.from_numpy(x)).numpy()
    assert np.abs(found - expected).max() < 1e-4


@pytest.mark.slow
def test_a_damaged_record_is_refused(pruned: tuple[Path, Any], tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes((pruned[0] / "checkpoint/model.safetensors").read_bytes())
    (tmp_path / "shapes.json").write_text("{}")
    quick = compress.load_recipe(QUICKSTART).model
    spec = ModelSpec(source=quick.source, weights=str(weights), task="image-classification")
    with pytest.raises(SourceError, match=r"shapes\.json: is not a record of shapes"):
        load_model(locate(spec, Path.cwd()), {"pixel_values": ((1, 8, 8), "float32")})


@pytest.mark.slow
def test_prune_then_int8(cache: Path, tmp_path: Path) -> None:
    report = compress.apply(recipe_with(PRUNE, {"kind": "int8"}), tmp_path / "out", cache, quiet=True)
    assert report is not None
    assert report.candidate.metrics["top1"] > report.baseline.metrics["top1"] - 0.04
    history = next(row for row in report.layers if row["layer"] == "layer2.conv1")["history"]
    assert [line.partition(":")[0] for line in history] == ["prune_channels", "int8"]


def test_no_calibration_data_is_refused(tmp_path: Path) -> None:
    recipe = compress.load_recipe(QUICKSTART, [*FAST, f"passes=[{_flow(PRUNE)}]", "data.calibration=null"])
    with pytest.raises((PlanError, PassError), match="calibration"):
        compress.apply(recipe, tmp_path / "out", tmp_path / "cache", quiet=True)


@pytest.mark.slow
def test_a_speedup_that_is_measured(cache: Path, tmp_path: Path) -> None:
    """The notes say what was measured and what was foretold; the figures are the machine's."""
    asked = {"max_params": 0.9, "speedup": 40, "or_nearest": True}
    recipe = recipe_with({"kind": "prune_channels", "timed_in": "int8", "round_to": 8, **asked})
    report = compress.apply(recipe, tmp_path / "out", cache, quiet=True)
    assert report is not None
    settled = json.loads((tmp_path / "out/lock.json").read_text())["training"]
    again = repeat_training(recipe, settled).passes[0]
    assert isinstance(again, PruneChannels) and again.speedup is None and not again.or_nearest
    found = {r["layer"]: r["width"] for r in report.layers if r.get("width", 0) < r.get("width_before", 0)}
    assert again.widths == found
    texts = [row["reason"] for row in report.layers if row["type"] == "note"]
    assert any(
        "times as fast as before, measured on onnxruntime-cpu in int8" in text and "to 40; the layers" in text
        for text in texts
    )
    assert list((cache / "measured").glob("*.json"))
