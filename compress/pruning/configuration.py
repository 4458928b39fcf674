"""The configuration of a pruned transformers model, as `from_pretrained` needs it: found by trying, not by name."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from compress.blocks.experts import unstack_experts
from compress.blocks.sizes import UNFIT_NUMBERS, Shapes, rebuild_config, shapes_of

MOST = 4
"""Numbers that are changed together: as many as width, neurons, query heads and key-value heads have."""


def fit_config(model: nn.Module, built: Shapes) -> str:
    """Change `model.config` (in place) to what describes `model` as it is; `built`: its sizes as the old one built it.

    Whole numbers of the configuration take what became of a size that they equal, up to MOST of them together, until a
    model has every size that is built of the configuration as its class reads it from a file, with all its checks.
    Returns why not where none does, and the configuration is left as it was; "" where one does.
    """
    config: Any = model.config
    goal = _Goal(model, built, shapes_of(model))
    if not goal.find_missed(config):
        return ""
    changes, why = _search_changes(goal, config)
    if why and (derived := goal.derived(config)):
        # Code that reads an optional number (`getattr(config, "head_dim", width // heads)`) takes it from the file.
        changes, again = _search_changes(goal, _copy_with(config, [*derived.items()]))
        if not again:
            needed = dict(derived)
            for key in derived:
                fewer = {name: value for name, value in needed.items() if name != key}
                needed = needed if goal.explain_refusal(config, fewer | changes) else fewer
            changes, why = needed | changes, ""
    if not why:
        for key, value in changes.items():
            setattr(config, key, value)
    return why


def _search_changes(goal: _Goal, config: Any) -> tuple[dict[str, int], str]:
    """Return the changes after which a configuration gives the goal's sizes; or no changes, and why none do."""
    best = goal.find_missed(config)
    useful = [
        option for option in goal.options(config) if len(goal.find_missed(_copy_with(config, [option]))) < len(best)
    ]
    refusal = ""
    for n in range(1, MOST + 1):
        for chosen in itertools.combinations(useful, n):
            if len({key for key, _ in chosen}) < n:
                continue
            missed = goal.find_missed(_copy_with(config, chosen))
            if missed:
                best = min(best, missed, key=len)
                continue
            # A class checks how its numbers go together only as it is built (`validate_*`), not as they are set.
            why = goal.explain_refusal(config, dict(chosen))
            if not why:
                return dict(chosen), ""
            refusal = refusal or why
    others = f", nor {len(best) - 1} others" if len(best) > 1 else ""
    return {}, refusal or f"none gives {best[0]} its size{others}"


def _copy_with(config: Any, changes: Sequence[tuple[str, int]]) -> Any:
    """Return a changed copy, its numbers not yet checked together; None where a field does not take such a value."""
    changed = copy.deepcopy(config)
    try:
        for key, value in changes:
            setattr(changed, key, value)
    except UNFIT_NUMBERS:
        return None
    return changed


@dataclass(frozen=True, eq=False)
class _Goal:
    """A model, its sizes as the old configuration built it, and as they are wanted."""

    model: nn.Module
    built: Shapes
    wanted: Shapes

    def find_missed(self, config: Any) -> list[str]:
        """Return what a model built of the configuration has in another size; everything where it cannot be built."""
        everything = [*self.wanted.tensors, *self.wanted.attributes]
        if config is None:
            return everything
        try:
            with torch.device("meta"):
                candidate = type(self.model)(config)
        except UNFIT_NUMBERS:
            return everything
        unstack_experts(candidate)
        candidate_shapes = shapes_of(candidate)
        tensors = [name for name, shape in self.wanted.tensors.items() if candidate_shapes.tensors.get(name) != shape]
        return tensors + [
            path for path, sizes in self.wanted.attributes.items() if self._differs(path, sizes, candidate_shapes)
        ]

    def explain_refusal(self, config: Any, changes: Mapping[str, int]) -> str:
        """Return why a reader of the configuration with these changes does not get the model's sizes; "" if it does."""
        try:
            read = rebuild_config(config, changes)
        except UNFIT_NUMBERS as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return f"{type(config).__name__}: {lines[-1].strip().removeprefix('ValueError: ').removesuffix('.')}"
        missed = self.find_missed(read)
        return f"{type(config).__name__} reads it as another size of {missed[0]}" if missed else ""

    def _differs(self, path: str, sizes: Mapping[str, Any], candidate_shapes: Shapes) -> bool:
        """Return whether a module has a size that differs and that the goal's changes do not explain.

        Sizes that the code only repeats may have followed a change that pruning, too, has made somewhere.
        """
        old, new = self.built.attributes.get(path, {}), candidate_shapes.attributes.get(path, {})
        differing = {key for key, value in sizes.items() if new.get(key) != value}
        return any(sizes[key] != old.get(key) or (old.get(key), new.get(key)) not in self.changes for key in differing)

    @cached_property
    def changes(self) -> set[tuple[int, int]]:
        """Return all pairs (size, what has become of it somewhere)."""
        pairs = [(self.built.tensors[name], shape) for name, shape in self.wanted.tensors.items()]
        return {(old, new) for a, b in pairs for old, new in zip(a, b, strict=True) if old != new}

    def derived(self, config: Any) -> dict[str, int]:
        """Return numbers that all modules which have them have alike, and that the configuration does not name."""
        values: dict[str, set[Any]] = {}
        for sizes in self.wanted.attributes.values():
            for key, value in sizes.items():
                values.setdefault(key, set()).add(value)
        single = {key: min(held) for key, held in values.items() if len(held) == 1 and key not in config.to_dict()}
        return {key: value for key, value in single.items() if type(value) is int}

    def options(self, config: Any) -> Iterator[tuple[str, int]]:
        """Yield fields and values to try: what became of that size, or the same share of it (heads of so many rows)."""
        for key, value in config.to_dict().items():
            if type(value) is int and value > 0:
                shares = {value * new // old for old, new in self.changes if value * new % old == 0}
                yield from ((key, new) for new in sorted(shares - {value}))
            elif value is None:
                yield from ((key, new) for new in sorted({new for _, new in self.changes}))
