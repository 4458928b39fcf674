"""A recipe's text with every place named from the root, so that it means the same wherever its file lies here."""

from __future__ import annotations

from compress.errors import SourceError
from compress.recipe.load import recipe_to_yaml
from compress.recipe.portable import Portable, split_place, walk_places
from compress.recipe.schema import Recipe
from compress.recipe.variables import escape
from compress.store.paths import resolve_path


def pin_recipe(recipe: Recipe) -> str:
    """Return the recipe as YAML, every default written out, with absolute paths for files and folders that are here."""
    return recipe_to_yaml(
        recipe, Portable(texts={p: escape(_pin(text, recipe)) for p, text in walk_places(recipe, ())})
    )


def _pin(text: str, recipe: Recipe) -> str:
    kind, path, rest = split_place(text)
    try:
        return text if kind == "hf:" else f"{kind}{resolve_path(recipe.root, path)}{rest}"
    except SourceError:  # a module, or a file that the plan will miss under this name
        return text
