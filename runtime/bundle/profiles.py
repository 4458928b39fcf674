"""Shape profiles of an engine: for each free size of its inputs the least, the usual and the largest it takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.bundle.tensors import TensorSpec

Range = tuple[int, int, int]
"""(min, opt, max)."""
Ranges = Mapping[str, Range]
"""Free dimension -> its range: {"batch": (1, 8, 64), "sequence": (1, 128, 128)}."""


@dataclass(frozen=True)
class InputShapes:
    """One input's shapes in one profile."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


Profile = dict[str, InputShapes]
"""Input -> its shapes; every input of the model."""


def profile_of(inputs: Sequence[TensorSpec], ranges: Ranges) -> Profile:
    """Return the shapes of all inputs where each free dimension has its range.

    A dimension may be a sum ("past + sequence"). ValueError for a dimension without a range.
    """
    return {spec.name: InputShapes(*(_resolve_shape(spec, ranges, end) for end in range(3))) for spec in inputs}


def free_dimensions(inputs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """Return the names of the sizes that are free, each once, sums taken apart; in the inputs' order."""
    names = (name for spec in inputs for dim in spec.shape if isinstance(dim, str) for name in _split_terms(dim))
    return tuple(dict.fromkeys(name for name in names if not name.isdigit()))


def range_problems(ranges: Ranges, free: Sequence[str]) -> list[str]:
    """Return what is wrong with one profile, as sentences."""
    problems = [f"{name}: the model has no free size of that name; it has {', '.join(free) or 'none'}"
                for name in ranges if name not in free]  # fmt: skip
    problems += [f"{name}: a free size without min, opt and max; give all three" for name in free if name not in ranges]
    for name, (least, usual, most) in ranges.items():
        if least < 0 or not least <= usual <= most:
            problems.append(f"{name}: [{least}, {usual}, {most}] is not min <= opt <= max, from 0 on")
    return problems


def profile_for(profiles: Sequence[Profile], shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Return the number of the profile that takes these shapes; of several the one whose opt is nearest.

    None: no one does.
    """
    fits = [
        i for i, profile in enumerate(profiles) if all(_fits(profile[name], shape) for name, shape in shapes.items())
    ]
    return min(
        fits,
        key=lambda i: sum(_compute_distance(profiles[i][name], shape) for name, shape in shapes.items()),
        default=None,
    )


def _resolve_shape(spec: TensorSpec, ranges: Ranges, end: int) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) else _resolve_size(dim, ranges, end) for dim in spec.shape)


def _resolve_size(dim: str, ranges: Ranges, end: int) -> int:
    missing = [name for name in _split_terms(dim) if not name.isdigit() and name not in ranges]
    if missing:
        raise ValueError(f"{missing[0]}: a free size without min, opt and max")
    return sum(int(name) if name.isdigit() else ranges[name][end] for name in _split_terms(dim))


def _split_terms(dim: str) -> list[str]:
    return re.split(r"\s*\+\s*", dim.strip())


def _fits(shapes: InputShapes, shape: tuple[int, ...]) -> bool:
    return len(shape) == len(shapes.min) and all(
        least <= size <= most for least, size, most in zip(shapes.min, shape, shapes.max, strict=True)
    )


def _compute_distance(shapes: InputShapes, shape: tuple[int, ...]) -> int:
    return sum(abs(size - usual) for size, usual in zip(shape, shapes.opt, strict=True))
