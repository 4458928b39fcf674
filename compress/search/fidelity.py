"""A recipe with less to do: shorter training, fewer samples. What comes of it is an estimate, and no verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from compress.recipe.schema import DataSpecs, Recipe
from compress.recipe.search import Racing
from compress.specs import DataSpec


def reduce_recipe(recipe: Recipe, racing: Racing, share: float, n_samples: Mapping[str, int]) -> Recipe:
    """Return the recipe with a share of its training and samples, as `racing.shorten` says; itself where share is 1.

    `n_samples`: of each declared set, for those that do not say how many they take. A set that has several parts and
    does not say so of one of them keeps that part whole.
    """
    if share >= 1:
        return recipe
    changes: dict[str, object] = {}
    if "training" in racing.shorten:
        changes["passes"] = tuple(pass_.shorten(share) for pass_ in recipe.passes)
    names = [name for name in ("evaluation", "calibration") if name in racing.shorten]
    changes["data"] = _reduce_sets(recipe.data, names, racing.least_samples, share, n_samples)
    return recipe.model_copy(update=changes)


def _reduce_sets(
    sets: DataSpecs, names: Sequence[str], least: int, share: float, n_samples: Mapping[str, int]
) -> DataSpecs:
    changed: dict[str, object] = {}
    for name in names:
        declared = getattr(sets, name)
        if isinstance(declared, DataSpec):
            changed[name] = _reduce(declared, least, share, n_samples.get(name))
        elif declared is not None:
            changed[name] = {key: _reduce(spec, least, share, None) for key, spec in declared.items()}
    return sets.model_copy(update=changed)


def _reduce(spec: DataSpec, least: int, share: float, n_all: int | None) -> DataSpec:
    n = spec.samples if spec.samples is not None else None if spec.also else n_all
    if n is not None:
        spec = spec.model_copy(update={"samples": min(n, max(math.ceil(n * share), least))})
    return spec.model_copy(update={"also": tuple(_reduce(part, least, share, None) for part in spec.also)})
