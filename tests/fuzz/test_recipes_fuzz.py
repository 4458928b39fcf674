"""Recipes, as texts and as records: read or refused, and what is read is written as it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fuzzing import assert_done_or_refused, bounded, corpus, fuzz
from hypothesis import given
from places import RECIPES
from recipe_strategies import as_text, growing, mutated, values

from compress.recipe.load import load_recipe, recipe_to_yaml
from compress.recipe.vocabulary import recipe_schema

LARGEST = 30
"""Seconds for a recipe of as many values as there may be: it takes five, and five times that where CPython (3.11) asks
the system for a piece of its stack, and gives it back, at each call from a depth that is just its end."""
SHIPPED = [path.read_bytes() for path in sorted(RECIPES.rglob("*.yaml"))]
PLAIN = {"version": 1, "name": "x", "model": {"source": "python:a:b", "task": "generic"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the cases are written, beside a recipe that they may include."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "quickstart.yaml").write_bytes((RECIPES / "quickstart.yaml").read_bytes())
    return folder


def assert_writes_as_it_reads(kind: str, content: bytes, folder: Path) -> None:
    """A recipe or a RecipeError; a recipe is written as text that reads as the same recipe, which writes the same."""
    file, again = folder / "case.yaml", folder / "again.yaml"
    file.write_bytes(content)
    recipe = assert_done_or_refused(kind, lambda: load_recipe(file), (2,), LARGEST)
    if recipe is None:
        return
    with bounded(LARGEST):
        text = recipe_to_yaml(recipe)
    again.write_text(text, encoding="utf-8")
    with bounded(LARGEST):
        reread = load_recipe(again)
    assert repr(reread.model_dump()) == repr(recipe.model_dump())  # repr: 1, 1.0 and True are equal
    with bounded(LARGEST):
        assert recipe_to_yaml(reread) == text


@pytest.mark.parametrize("path", corpus("recipes"), ids=lambda path: path.name)
def test_what_broke_once_is_read_or_refused(path: Path, folder: Path) -> None:
    assert_writes_as_it_reads("recipes (corpus)", path.read_bytes(), folder)


@fuzz(share=0.005, quick=4)
@given(text=growing())
def test_a_recipe_that_grows_is_read_or_refused(folder: Path, text: str) -> None:
    assert_writes_as_it_reads("recipes that grow", text.encode(), folder)


@fuzz(share=0.145, quick=25)
@given(content=mutated(SHIPPED))
def test_a_mutated_recipe_is_read_or_refused(folder: Path, content: bytes) -> None:
    assert_writes_as_it_reads("recipes as text", content, folder)


@fuzz(share=0.02, quick=10)
@given(data=values(recipe_schema()))
def test_any_recipe_is_written_as_it_reads(folder: Path, data: dict[str, Any]) -> None:
    assert_writes_as_it_reads("recipes as records", as_text(data).encode(), folder)


@fuzz(share=0.08, quick=30)
@given(
    one=values(recipe_schema()["properties"]["passes"]["items"]).map(lambda one: {"passes": [one]})
    | values(recipe_schema()["properties"]["export"]["items"]).map(lambda one: {"export": [one]})
    | values(recipe_schema()["properties"]["preprocess"]).map(lambda one: {"preprocess": one})
    | values(recipe_schema()["properties"]["data"]).map(lambda one: {"data": one})
    | values(recipe_schema()["properties"]["validate"]).map(lambda one: {"validate": one})
)
def test_any_record_of_a_recipe_is_written_as_it_reads(folder: Path, one: dict[str, Any]) -> None:
    assert_writes_as_it_reads("records of a recipe", as_text({**PLAIN, **one}).encode(), folder)
