"""The recipes that come with the project, and the pages that explain them: in a clone, and in what is installed."""

from __future__ import annotations

import re
from pathlib import Path

from compress.errors import RecipeError
from runtime.words import did_you_mean

PACKAGE = Path(__file__).parents[1]
SHARE = PACKAGE / "share" if (PACKAGE / "share").is_dir() else PACKAGE.parent
"""A wheel keeps below share/ what a clone has at its root."""
SCHEMA = SHARE / "recipes/schema.json"


def list_examples() -> dict[str, Path]:
    """Return the recipes by name, those by use case first, then folder by folder."""
    files = sorted(SHARE.glob("recipes/**/*.yaml"), key=lambda file: (len(file.parts), file))
    return {file.stem: file for file in files}


def find_example(name: str) -> Path:
    """Return the recipe of that name. RecipeError if there is none."""
    examples = list_examples()
    if name not in examples:
        near = did_you_mean(name, list(examples))
        raise RecipeError(f"--example {name}: no such recipe; `compress new --example list` names all{near}")
    return examples[name]


def describe_example(recipe: Path) -> str:
    """Return the first sentence of the comment at the recipe's head."""
    lines = recipe.read_text(encoding="utf-8").partition("\nversion:")[0].splitlines()[1:]
    return re.split(r"(?<=\.) ", " ".join(line.removeprefix("# ") for line in lines))[0]


def find_pages(recipe: Path) -> list[Path]:
    """Return the pages of the documentation that the recipe names."""
    return [SHARE / page for page in re.findall(r"docs/[\w/-]+\.md", recipe.read_text(encoding="utf-8"))]
