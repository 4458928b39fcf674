"""A good recipe, and how recipes are written, read and refused in tests."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from compress.errors import RecipeError
from compress.recipe.load import load_recipe
from compress.recipe.schema import Recipe
from compress.recipe.vocabulary import recipe_schema

GOOD = """\
version: 1
name: tiny
model: {source: "python:model.py:build", task: image-classification}
passes:
  - {kind: rtn, bits: 8}
  - kind: int8
    ignore: ["re:.*head"]
validate:
  gates:
    - {metric: top1, max_drop: 0.01}
"""


MODEL = GOOD.splitlines()[2]
RECORDS = recipe_schema()["properties"]


def write(text: str, name: str = "a.yaml") -> Path:
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return file


def load(text: str, *overrides: str) -> Recipe:
    return load_recipe(write(text), overrides)


def problems(text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        load(text, *overrides)
    assert caught.value.exit_code == 2
    return caught.value.problems


def only(text: str, *overrides: str) -> str:
    (problem,) = problems(text, *overrides)
    return problem
