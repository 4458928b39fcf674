"""Describe an engine: its shape profiles, what it was compiled with and for, and why it would not run here.

A profile has for each free size of the inputs the least, the usual and the largest that the engine takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.bundle.tensors import TensorSpec

Range = tuple[int, int, int]
"""(min, opt, max)."""
Ranges = Mapping[str, Range]
"""Free dimension -> its range: {"batch": (1, 8, 64), "sequence": (1, 128, 128)}."""
ENGINES = ("tensorrt", "tensorrt-rtx")
"""The runtimes that run engines, not graphs."""
COMPILED = (*ENGINES, "executorch")
"""Those, and the runtime of .pte files: they run no ONNX file."""


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


@dataclass(frozen=True)
class EngineOrder:
    """An engine that the recipe asks for: compiled when the bundle was built, or left for `compress compile`.

    `name`: of its artifact. `runtime`: tensorrt or tensorrt-rtx. `graph`: the artifact that it is compiled from.
    `options`: the recipe's, resolved.
    """

    name: str
    runtime: str
    graph: str
    profiles: tuple[Profile, ...]
    options: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineRecord:
    """What an engine is. `platform`: operating system and processor, "linux-x86_64".

    `compute_capabilities`: of the GPUs that run it. `gpu`: the one that it was compiled on; "" where it was compiled
    without one. `weights_from`: the bundle's file whose weights it gets when it is opened; "": it holds them. `layers`:
    the bundle's file with every kernel: types, tactic, nodes of the graph that it runs. `held`: part of the graph's
    products that run in the precision asked for; `short`: node -> what it got instead. `inspected`: by the engine
    inspector, or from the builder's log.
    """

    runtime: str
    version: str
    platform: str
    compute_capabilities: tuple[str, ...]
    profiles: tuple[Profile, ...]
    version_compatible: bool = False
    hardware_compatibility_level: str = "none"
    weights_from: str = ""
    gpu: str = ""
    build_seconds: float = 0.0
    n_layers: int = 0
    layers: str = ""
    asked: dict[str, int] = field(default_factory=dict)
    """Precision -> number of products that were to run in it."""
    held: float = 1.0
    short: dict[str, str] = field(default_factory=dict)
    inspected: str = "log"


@dataclass(frozen=True)
class Here:
    """The machine that an engine would run on. `capability`: its GPU's, "8.9"."""

    version: str
    platform: str
    capability: str


def why_not_here(record: EngineRecord, here: Here) -> list[str]:
    """Return why the engine would not run on this machine, as sentences with the way out; empty where it would."""
    problems = []
    again = "compile it here: compress compile BUNDLE"
    if record.platform != here.platform:
        problems.append(f"it was compiled for {record.platform}, and this is {here.platform}; {again}")
    if not _same_version(record, here.version):
        problems.append(f"it was compiled by {record.runtime} {record.version}, and {here.version} is here; {again}")
    if not _runs_on(record, here.capability):
        known = ", ".join(record.compute_capabilities)
        problems.append(f"it is for compute capability {known}, and this GPU has {here.capability}; {again}")
    return problems


def _same_version(record: EngineRecord, version: str) -> bool:
    """Return whether an engine runs in this version of its library.

    It runs in the version that built it; a version-compatible one in later ones of the same major, too.
    """
    built, here = (tuple(map(_parse_number, text.split("."))) for text in (record.version, version))
    return built == here or (record.version_compatible and built[0] == here[0] and built <= here)


def _runs_on(record: EngineRecord, capability: str) -> bool:
    if record.hardware_compatibility_level == "ampere+":
        return tuple(map(_parse_number, capability.split("."))) >= (8, 0)
    return capability in record.compute_capabilities


def _parse_number(text: str) -> int:
    digits = "".join(letter for letter in text if letter.isdigit())
    return int(digits or 0)
