"""Metrics of a recipe's own, python:FILE.py:FUNCTION: their files looked at, and not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from compress.errors import SourceError
from compress.recipe.schema import Recipe
from compress.store.paths import resolve_path
from runtime.bundle.files import sha256_of
from runtime.bundle.format import Judgement
from runtime.tasks.metrics import OWN
from runtime.words import suggest


@dataclass(frozen=True)
class OwnMetric:
    """A function of (outputs, labels) in a file of the recipe's. `name`: as the recipe has it."""

    name: str
    path: Path
    function: str
    sha256: str

    @property
    def short_name(self) -> str:
        """Return the name that bundles have: the file without its folders, which are of one machine."""
        return f"python:{self.path.name}:{self.function}"


def find_own_metrics(recipe: Recipe) -> list[OwnMetric]:
    """Return the recipe's own metrics, each once. SourceError for a file that is not there."""
    matches = [(name, match) for name in recipe.own_metrics if (match := OWN.fullmatch(name))]
    found = []
    for name, match in matches:
        path = resolve_path(recipe.root, match[1])
        if not path.is_file():
            raise SourceError(f"{name}: {path} is a folder; give a file that ends in .py")
        found.append(OwnMetric(name, path, match[2], sha256_of(path)))
    return found


def digest_own_metrics(recipe: Recipe) -> dict[str, str]:
    """Return short name -> sha256 of the file, for the lock and the keys of results."""
    return {metric.short_name: metric.sha256 for metric in find_own_metrics(recipe)}


def shorten_names(judgement: Judgement, metrics: list[OwnMetric]) -> Judgement:
    """Return the judgement as a bundle has it, own metrics under their short names."""
    short = {metric.name: metric.short_name for metric in metrics}
    gates = tuple(replace(gate, metric=short.get(gate.metric, gate.metric)) for gate in judgement.gates)
    named = dict.fromkeys(short.get(name, name) for name in judgement.metrics)
    return replace(judgement, gates=gates, metrics=tuple(named))


def own_metric_problems(recipe: Recipe) -> list[str]:
    """Report files and functions that are not there or take other arguments, and names that two files share."""
    try:
        metrics = find_own_metrics(recipe)
    except SourceError as error:
        return [f"validate: {problem}" for problem in error.problems]
    problems = [f"validate: {metric.name}: {text}" for metric in metrics for text in _check_function(metric)]
    files: dict[str, Path] = {}
    for metric in metrics:
        if files.setdefault(metric.short_name, metric.path) != metric.path:
            problems.append(
                f"validate: {metric.name}: {files[metric.short_name]} has the same name and function, and a bundle "
                "names no folders; rename one"
            )
    return problems


def _check_function(metric: OwnMetric) -> Iterator[str]:
    try:
        tree = ast.parse(metric.path.read_bytes())
    except (SyntaxError, ValueError) as error:
        yield f"{metric.path}: is not Python: {error}"
        return
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    others = {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    } | {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    unknown = "*" in others  # from elsewhere, which is not looked at
    if metric.function in functions:
        takes = functions[metric.function].args
        n_plain = len(takes.posonlyargs) + len(takes.args)
        required = n_plain - len(takes.defaults)
        keyword = zip(takes.kwonlyargs, takes.kw_defaults, strict=True)
        lacking = [argument.arg for argument, default in keyword if default is None]
        if required > 2 or (n_plain < 2 and takes.vararg is None) or lacking:
            yield f"{metric.function} must take two arguments, the outputs by name and the labels"
    elif metric.function not in others and not unknown:
        yield f"{metric.path.name} has no function '{metric.function}'{suggest(metric.function, functions)}"
