"""What a scheme comes to in one layer: the bits that a weight takes, its groups, and why they cannot be."""

from __future__ import annotations

import math
from typing import cast

from compress.facts import LayerFacts
from compress.formats.schemes import BLOCK_BITS, PRESETS, Scheme, WeightScheme
from compress.formats.targets import KERNEL_BLOCKS, TWO_BIT_BLOCKS, Format, Target


def find_width(weights: WeightScheme, target: Target, in_decoder: bool = False, looked_up: bool = False) -> int:
    """Return the bits in which the target's file holds each integer, which is the least that it has a type for.

    `in_decoder`, `looked_up`: the layer is of a graph that reads one token at a time, or a table of embeddings.
    """
    if target.reads == "checkpoint" or weights.kind == "float" or weights.scales != "float":
        return weights.bits
    if target.reads == "gguf":
        return 4 if weights.bits <= 4 else 5 if weights.bits == 5 else 8
    multiplied = target.cpu_operators and in_decoder and not looked_up
    if weights.bits == 2 and multiplied and weights.group_size in TWO_BIT_BLOCKS:
        return 2
    return 4 if weights.bits <= 4 else 8


def count_stored_bits(scheme: Scheme, layer: LayerFacts, width: int | None = None) -> float:
    """Return the bits that each weight takes, its share of the scales included. `width`: as `find_width` has it."""
    weights, inputs = scheme.weights, layer.shape[1]
    if weights.block:
        return BLOCK_BITS[scheme.name]
    size = weights.group_size
    groups = inputs / size if size > 0 else 1 if size else 1 / layer.shape[0]
    return (width or weights.bits) + (32 if weights.scales == "float" else 8) * groups / weights.rows / inputs


def count_layer_bytes(scheme: Scheme, layer: LayerFacts, target: Target, float_bytes: int) -> int:
    """Return the bytes of a rounded layer's numbers in the file that the target reads, scales and zero points included.

    `float_bytes`: of a scale in a checkpoint whose integers are packed.
    """
    weights, (rows, inputs) = scheme.weights, (layer.shape[0], math.prod(layer.shape[1:]))
    n, size = rows * inputs, weights.group_size
    if weights.block:
        return math.ceil(n * BLOCK_BITS[scheme.name] / 8)
    if weights.scales != "float" or weights.kind == "float":
        return math.ceil(n * count_stored_bits(scheme, layer) / 8)
    if target.reads == "gguf":  # half floats for each 32 weights, whatever the groups
        return math.ceil(n * (find_width(weights, target) + (16 if weights.symmetric else 32) / 32) / 8)
    if target.reads == "onnx":
        width, group = find_width(weights, target), size if size > 0 else inputs
        block = next((block for block in KERNEL_BLOCKS[target.variant] if group % block == 0), group)
        groups = rows * math.ceil(inputs / block)
        zeros = 0 if weights.symmetric else math.ceil(groups * width / 8)  # those that are all zero are held once
        return math.ceil(n * width / 8) + groups * 4 + zeros
    groups = inputs // size if size > 0 else 1
    if scheme.activations is not None and weights.bits == 8:
        return n + 4 * rows * groups
    packed = rows * math.ceil(inputs * weights.bits / 32) * 4
    zeros = 0 if weights.symmetric else math.ceil(rows * weights.bits / 32) * 4 * groups
    # a packed layer's shape, and two tensors more in the header
    return packed + rows * groups * float_bytes + zeros + 16 + 2 * 110


def format_of(scheme: Scheme) -> Format:
    """Return the name under which targets have a fact about the scheme."""
    if scheme.activations is None and scheme.weights.kind == "int" and scheme.weights.scales == "float":
        return cast(Format, f"w{scheme.weights.bits}{'' if scheme.weights.symmetric else '-asym'}")
    return cast(Format, scheme.name.lower().replace("_", "-"))


def describe_scheme(scheme: Scheme) -> str:
    """Format the scheme's name and its groups for the report."""
    size, rows = scheme.weights.group_size, scheme.weights.rows
    if block := scheme.weights.block:
        return f"{scheme.name}, blocks of {block}"
    groups = f"blocks of {rows} x {size}" if rows > 1 else f"group {size}"
    return f"{scheme.name}, " + (groups if size > 0 else "per channel" if size else "one scale")


def fit_group_size(size: int, inputs: int, kernels: tuple[int, ...]) -> int:
    """Return `size` if it divides `inputs`, else the nearest that does and that kernels have (none: any), else -1."""
    if inputs % size == 0:
        return size
    choices = [g for g in kernels or range(8, inputs) if 0 < g <= inputs and inputs % g == 0]
    return min(choices, key=lambda g: abs(math.log(g / size)), default=-1)


def explain_misfit(kind: str, layer: LayerFacts, scheme: Scheme, target: Target, ways: str) -> str | None:
    """Return why this layer's group size cannot work, with the way out, or None."""
    weights, inputs = scheme.weights, layer.shape[1]
    size = weights.group_size
    one_scale = weights.scales == "float" and weights.rows == 1 and (weights.kind == "float" or weights.bits == 8)
    if one_scale and (weights.kind == "float" or scheme.activations is not None):
        least = 0 if weights.kind == "float" else -1
        if size > 0 or size == 0 != least:
            return f"{kind}: {layer.name}: {scheme.name} has one scale for each output channel; leave group_size out"
        return None
    if weights.kind == "float":
        format_ = next((preset for preset in PRESETS.values() if preset.name == scheme.name), None)
        if format_ != scheme:
            fixed = "no such format" if format_ is None else describe_scheme(format_)
            return f"{kind}: {layer.name}: a format of floats has its own bits and groups ({fixed}); leave yours out"
        if inputs % size:
            text = f"{kind}: {layer.name} has {inputs} inputs, which the groups of {scheme.name}, {size}, do not divide"
            return f"{text}; ignore it, or give it another scheme under overrides"
        return None
    if block := weights.block:
        text = f"{kind}: {layer.name} has {inputs} inputs, which the {block} of {scheme.name} do not divide"
        return f"{text}; {ways.removeprefix('or ')}" if inputs % block else None
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
