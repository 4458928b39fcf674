"""Make a trained model smaller and faster, and know that it is: recipe, plan, passes, bundle, verdict.

    recipe = compress.load_recipe("recipe.yaml", ["passes.0.bits=8"])
    compress.plan(recipe)                       # a Plan; draws itself in a notebook
    report = compress.apply(recipe, "bundle")   # a runtime.report.Report; the bundle is the folder

The functions are imported when they are first asked for, so that `import compress` is quick and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compress.planner import make_plan as plan
    from compress.recipe import load_recipe, recipe_to_yaml
    from compress.runner import apply_recipe as apply

__version__ = "0.1.0"
__all__ = ["__version__", "apply", "load_recipe", "plan", "recipe_to_yaml"]

_HOMES = {
    "load_recipe": ("compress.recipe", "load_recipe"),
    "recipe_to_yaml": ("compress.recipe", "recipe_to_yaml"),
    "plan": ("compress.planner", "make_plan"),
    "apply": ("compress.runner", "apply_recipe"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'compress' has no attribute '{name}'")
    module, function = _HOMES[name]
    return getattr(importlib.import_module(module), function)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
