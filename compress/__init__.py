"""Make a trained model smaller and faster, and know that it is: recipe, plan, passes, bundle, verdict.

    result = compress.quantize(net, "INT8", calibration_dataset=loader)   # a model and data that a program holds
    result = compress.prune(net, speedup=1.5, train_dataset=loader)
    result = compress.auto(net, "size >= 4x, top1 drop <= 0.01", train_dataset=loader)
    compress.bench(net, calibration_dataset=loader)   # every format on every backend of this machine

    recipe = compress.load_recipe("recipe.yaml", ["passes.0.bits=8"])
    compress.plan(recipe)                       # a Plan; draws itself in a notebook
    result = compress.apply(recipe, "bundle")   # a Result: `.verdict`, `.report`, `.bundle`, `.torch()`, `.save()`
    study = compress.sweep(recipe, "study")     # of a recipe with `search:`; draws its front in a notebook
    compress.blame("bundle")                    # the layers that carry its loss
    compress.tabulate({"INT8": result})         # several results side by side: which one to take when

The functions are imported when they are first asked for, so that `import compress` is quick and needs no torch.
"""

import os
import sys

if (  # started as `python -m compress`
    sys.argv[:1] == ["-m"]
    and sys.orig_argv[-len(sys.argv)].startswith("compress")
    and not sys.flags.safe_path
    and os.path.dirname(__path__[0]) != sys.path[0]
):
    del sys.path[0]  # the working directory may be a bundle's that holds a `runtime` of its own
from runtime.processes import search_path  # noqa: F401  # isort: skip  (first of all, so that no `from __future__` stands here)

import importlib
from typing import TYPE_CHECKING, Any

from compress.version import BUILD_SIDE, __version__

if TYPE_CHECKING:
    from compress.api.choices import tabulate
    from compress.api.jobs import apply, auto, bench, plan, prune, quantize, sweep
    from compress.api.result import Result
    from compress.commands.blame import blame_bundle as blame
    from compress.export.torch_module import load_torch
    from compress.recipe.load import load_recipe, recipe_to_yaml

__all__ = [
    "Result",
    "__version__",
    "apply",
    "auto",
    "bench",
    "blame",
    "load_recipe",
    "load_torch",
    "plan",
    "prune",
    "quantize",
    "recipe_to_yaml",
    "sweep",
    "tabulate",
]

_JOBS = ("apply", "auto", "bench", "plan", "prune", "quantize", "sweep")
_HOMES = {
    **{name: ("compress.api.jobs", name) for name in _JOBS},
    "Result": ("compress.api.result", "Result"),
    "tabulate": ("compress.api.choices", "tabulate"),
    "load_torch": ("compress.export.torch_module", "load_torch"),
    "load_recipe": ("compress.recipe.load", "load_recipe"),
    "recipe_to_yaml": ("compress.recipe.load", "recipe_to_yaml"),
    "blame": ("compress.commands.blame", "blame_bundle"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'compress' has no attribute '{name}'")
    module, function = _HOMES[name]
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"compress.{name}: {error}; {BUILD_SIDE}", name=error.name) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
