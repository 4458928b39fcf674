"""What a recipe uses of other distributions: its passes, metrics and targets that plug-ins add."""

from __future__ import annotations

from compress.recipe.schema import Recipe
from compress.work import WORK, find_work
from runtime.plugins import BACKEND_GROUP, METRIC_GROUP, PASS_GROUP, TASK_GROUP, TORCH_TASK_GROUP, find_plugin


def list_plugins(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Return "group: name" -> distribution, version and digest of the code of each plug-in that the recipe names."""
    judged = recipe.validate_
    names = [
        *((PASS_GROUP, pass_.kind) for pass_ in recipe.passes),
        *((METRIC_GROUP, name) for name in (*judged.metrics, *(gate.metric for gate in judged.gates))),
        *((group, recipe.model.task) for group in (TASK_GROUP, TORCH_TASK_GROUP)),
        *((BACKEND_GROUP, name) for name in (recipe.target, *map(recipe.target_of, recipe.export))),
    ]
    named = {f"{group}: {name}": find_plugin(group, name) for group, name in names}
    return {name: plugin.to_record() for name, plugin in sorted(named.items()) if plugin is not None}


def check_work(recipe: Recipe) -> None:
    """Import the work of passes from outside, so that the plan finds what the run would. Raises PluginError."""
    for pass_ in recipe.passes:
        if pass_.kind not in WORK and pass_.work:
            find_work(pass_.kind)
