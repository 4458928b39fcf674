"""The configuration of a pruned transformers model, as `from_pretrained` needs it: found by trying, not by name."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from compress.blocks.sizes import Shapes, shapes_of

UNFIT_NUMBERS = (
    *(ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, AssertionError, AttributeError),
    StrictDataclassError,
)
"""What building a model raises of whose configuration the numbers do not go together."""

MOST = 4
"""Numbers that are changed together: as many as width, neurons, query heads and key-value heads have."""


def fit_config(model: nn.Module, built: Shapes) -> list[str]:
    """Change `model.config` (in place) to what describes `model` as it is; `built`: its sizes as the old one built it.

    Whole numbers of the configuration take what became of a size that they equal, up to MOST of them together, until a
    model built of it has every size. Where none gives that, the tensors and modules that the best one misses are
    returned, and the configuration is left as it was.
    """
    config: Any = model.config
    goal = _Goal(model, built, shapes_of(model))
    start = goal.missed_by(config)
    if not start:
        return []
    useful = [one for one in goal.options(config) if len(goal.missed_by(_with(config, [one]))) < len(start)]
    best = start
    for n in range(1, MOST + 1):
        for chosen in itertools.combinations(useful, n):
            if len({key for key, _ in chosen}) == n:
                missed = goal.missed_by(_with(config, chosen))
                if not missed:
                    for key, value in chosen:
                        setattr(config, key, value)
                    return []
                best = min(best, missed, key=len)
    return best


def _with(config: Any, changes: Sequence[tuple[str, int]]) -> Any:
    """A changed copy; None where a field does not take such a value."""
    changed = copy.deepcopy(config)
    try:
        for key, value in changes:
            setattr(changed, key, value)
    except (StrictDataclassError, TypeError, ValueError, AttributeError):
        return None
    return changed


@dataclass(frozen=True, eq=False)
class _Goal:
    """A model, its sizes as the old configuration built it, and as they are wanted."""

    model: nn.Module
    built: Shapes
    wanted: Shapes

    def missed_by(self, config: Any) -> list[str]:
        """What a model built of the configuration has in another size; everything where it cannot be built."""
        everything = [*self.wanted.tensors, *self.wanted.attributes]
        if config is None:
            return everything
        try:
            with torch.device("meta"):
                made = shapes_of(type(self.model)(config))
        except UNFIT_NUMBERS:
            return everything
        tensors = [name for name, shape in self.wanted.tensors.items() if made.tensors.get(name) != shape]
        return tensors + [path for path, own in self.wanted.attributes.items() if self._differs(path, own, made)]

    def _differs(self, path: str, own: Mapping[str, Any], made: Shapes) -> bool:
        """Sizes that the code only repeats may have followed a change that pruning, too, has made somewhere."""
        old, new = self.built.attributes.get(path, {}), made.attributes.get(path, {})
        differing = {key for key, value in own.items() if new.get(key) != value}
        return any(own[key] != old.get(key) or (old.get(key), new.get(key)) not in self.changes for key in differing)

    @cached_property
    def changes(self) -> set[tuple[int, int]]:
        """(size, what has become of it somewhere)."""
        pairs = [(self.built.tensors[name], shape) for name, shape in self.wanted.tensors.items()]
        return {(old, new) for a, b in pairs for old, new in zip(a, b, strict=True) if old != new}

    def options(self, config: Any) -> Iterator[tuple[str, int]]:
        """Fields and values to try: what became of that size, or the same share of it (heads of so many rows)."""
        for key, value in config.to_dict().items():
            if type(value) is int and value > 0:
                shares = {value * new // old for old, new in self.changes if value * new % old == 0}
                yield from ((key, new) for new in sorted(shares - {value}))
            elif value is None:
                yield from ((key, new) for new in sorted({new for _, new in self.changes}))
