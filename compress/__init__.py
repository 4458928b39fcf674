"""Make a trained model smaller and faster, and know that it is: recipe, plan, passes, bundle, verdict.

    recipe = compress.load_recipe("recipe.yaml", ["passes.0.bits=8"])
    print(compress.make_plan(recipe).to_dict())
    report = compress.apply_recipe(recipe, Path("bundle"), cache=None, quiet=True)

The functions are imported when they are first asked for, so that `import compress` is quick and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compress.apply import apply_recipe
    from compress.plan import make_plan
    from compress.recipe import load_recipe, recipe_to_yaml

__version__ = "0.1.0"
__all__ = ["__version__", "apply_recipe", "load_recipe", "make_plan", "recipe_to_yaml"]

_HOMES = {
    "load_recipe": "compress.recipe",
    "recipe_to_yaml": "compress.recipe",
    "make_plan": "compress.plan",
    "apply_recipe": "compress.apply",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'compress' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
