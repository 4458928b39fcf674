"""What holds of any weight scheme on a layer: the name of its format, its groups, what a run never calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

from compress.facts import LayerFacts, PassPlan, Structure
from compress.formats.schemes import Scheme
from compress.formats.targets import Format, Target


def format_of(scheme: Scheme) -> Format:
    """Return the name under which targets have a fact about the scheme."""
    if scheme.activations is None and scheme.weights.kind == "int":
        return cast(Format, f"w{scheme.weights.bits}{'' if scheme.weights.symmetric else '-asym'}")
    return cast(Format, scheme.name.lower().replace("_", "-"))


def describe_scheme(scheme: Scheme) -> str:
    """Format the scheme's name and its groups for the report."""
    size = scheme.weights.group_size
    return f"{scheme.name}, " + (f"group {size}" if size > 0 else "per channel" if size else "one scale")


def float_problems(kind: str, schemes: Iterable[Scheme]) -> list[str]:
    """Return why a pass that rounds to integers cannot take these schemes, a line for each that is FP8."""
    odd = sorted({scheme.name for scheme in schemes if scheme.weights.kind == "float"})
    return [f"{kind}: {name} is no integer grid, and this pass rounds to one; use rtn" for name in odd]


def fit_group_size(size: int, inputs: int, kernels: tuple[int, ...]) -> int:
    """Return `size` if it divides `inputs`, else the nearest that does and that kernels have (none: any), else -1."""
    if inputs % size == 0:
        return size
    choices = [g for g in kernels or range(8, inputs) if 0 < g <= inputs and inputs % g == 0]
    return min(choices, key=lambda g: abs(math.log(g / size)), default=-1)


def group_problem(kind: str, layer: LayerFacts, scheme: Scheme, target: Target, ways: str) -> str | None:
    """Return why this layer's group size cannot work, with the way out, or None."""
    weights, inputs = scheme.weights, layer.shape[1]
    size = weights.group_size
    if weights.kind == "float" or (scheme.activations is not None and weights.bits == 8):
        least = 0 if weights.kind == "float" else -1
        if size > 0 or size == 0 != least:
            return f"{kind}: {layer.name}: {scheme.name} has one scale for each output channel; leave group_size out"
        return None
    kernels = target.kernels(weights.bits)
    if size == 0 or (size > 0 and inputs % size):
        return f"{kind}: {layer.name} has {inputs} inputs, which group_size {size} does not divide; " + _suggest_sizes(
            size, inputs, kernels, ways
        )
    if kernels and size not in kernels and inputs % min(k for k in kernels if k > 0) == 0:
        some = ", ".join(str(k) for k in kernels)
        return (
            f"{kind}: {layer.name}: target {target.name} has {weights.bits}-bit kernels for group_size {some}, "
            f"not {size}; it would run slower than float32"
        )
    return None


def _suggest_sizes(size: int, inputs: int, kernels: tuple[int, ...], ways: str) -> str:
    fitting = [g for g in kernels or range(1, 257) if g > 0 and inputs % g == 0]
    nearest = sorted(fitting, key=lambda g: abs(g - size))[:2]
    if not nearest and -1 in kernels:
        nearest = [-1]
    if not nearest:
        return ways.removeprefix("or ")
    return f"use group_size: {' or '.join(str(g) for g in sorted(nearest))}, {ways}"


def find_uncalled(layers: Sequence[LayerFacts], structure: Structure) -> list[LayerFacts]:
    """Return the layers outside the blocks that read nothing: a stream of calibration data never comes to them."""
    read = {name for reading in structure.readings for name in reading.layers}
    inside = tuple(f"{block.name}." if block.name else "" for block in structure.blocks)
    return [layer for layer in layers if layer.name not in read and not layer.name.startswith(inside)]


def with_problems(plan: PassPlan, texts: Sequence[str]) -> PassPlan:
    """Return the same plan with more problems."""
    return replace(plan, problems=(*plan.problems, *texts))
