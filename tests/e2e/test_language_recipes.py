"""The recipes for the usual language models: planned on a tiny model of each architecture, some of them run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from places import ROOT
from tiny_lm import ARCHITECTURES, QUICK_DECODING, language_folder, write_texts

RECIPES = sorted((ROOT / "recipes/llm").glob("*.yaml"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model of each architecture, and texts."""
    folder = tmp_path_factory.mktemp("architectures")
    for name in ARCHITECTURES:
        language_folder(folder / name, name, hidden_size=128, intermediate_size=256, num_hidden_layers=1)
    write_texts(folder / "texts.jsonl", 72, length=40)
    return folder


def overrides(models: Path, path: Path) -> list[str]:
    texts = f"jsonl:{models / 'texts.jsonl'}"
    return [
        f"vars.model=dir:{models / path.name.partition('-')[0]}",
        "preprocess.max_length=64",
        "preprocess.pack=20",
        f"data.calibration={{source: '{texts}', samples: 12}}",
        f"data.evaluation={{source: '{texts}', skip: 12, samples: 60}}",
        "validate={gates: [{metric: nll, max: 20}, {metric: size_ratio, min: 1}], steps: false}",
        *(f"validate.benchmark.{name}={value}" for name, value in QUICK_DECODING.items()),
    ]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_plans_on_a_tiny_model_of_its_architecture(path: Path, models: Path, tmp_path: Path) -> None:
    from compress.planning.make_plan import make_plan
    from compress.recipe.load import load_recipe

    if "kind: gguf" in path.read_text():
        pytest.importorskip("gguf")
    plan = make_plan(load_recipe(path, overrides(models, path)), tmp_path)
    assert plan.after.n_bytes < plan.before.n_bytes
    assert all(decision.reason for row in plan.steps for decision in row.decisions if decision.action == "kept")


def test_every_architecture_has_recipes() -> None:
    assert {path.name.partition("-")[0] for path in RECIPES} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", ["qwen-w4a16-awq-gptq", "gemma-fp8-kv8", "phi-w4a16-gptq", "llama-q4k-gptq"])
def test_a_recipe_runs_on_a_tiny_model(name: str, models: Path, tmp_path: Path) -> None:
    from compress.execution.run import apply_recipe
    from compress.recipe.load import load_recipe

    path = ROOT / f"recipes/llm/{name}.yaml"
    if "kind: gguf" in path.read_text():
        pytest.importorskip("gguf")
    report = apply_recipe(load_recipe(path, overrides(models, path)), tmp_path / "out", tmp_path / "c", True)
    assert report is not None and report.verdict == "pass", [gate.why for gate in report.gates]
    if name == "llama-q4k-gptq":
        assert (tmp_path / "out/model/model.gguf").stat().st_size == report.candidate.size_bytes
        return
    checkpoint = next(iter((tmp_path / "out").glob("*/*.safetensors"))).parent
    assert "quantization_config" in json.loads((checkpoint / "config.json").read_text())
