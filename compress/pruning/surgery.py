"""Units taken out of a module for good: parameters and buffers get smaller, and what it knows of their sizes follows.

What changed is a `Shapes` record (see `compress.blocks.sizes`), by which a module as its code builds it takes the
smaller weights: safetensors and that record are the whole model, no pickle needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from compress.blocks.forward import name_outputs
from compress.blocks.layers import CONVOLUTIONS, TRANSPOSED, in_axis, is_hf_conv1d
from compress.blocks.materialise import plain
from compress.blocks.sizes import Shapes, put_tensor, shapes_of, tensor_at, tensor_holders
from compress.errors import PassError
from compress.pruning.dimensions import Dimension
from compress.structure.dataflow import within

HEAD_COUNTS = re.compile(r"(?!.*(group|per|rep)).*(head|(?<![a-z])(num|n)_)")
"""Names of attributes that count heads, unless they are LENGTHS; queries for each key-value head stay as many.

n_ begins a word: SegFormer's sequence_reduction_ratio counts nothing.
"""
LENGTHS = re.compile(r".*(size|dim|inner|embed|width|hidden|features)")
"""Names of attributes that hold the length of an axis."""


def remove(module: nn.Module, dimension: Dimension, units: np.ndarray) -> None:
    """Remove units (int64, numbers in `dimension`) from `module`, in place.

    Parameters keep their names and stay shared where they were; new ones ask for no gradient. PassError if nothing
    would be left.
    """
    if len(units) >= dimension.n_units:
        raise PassError(f"{dimension.name}: all {dimension.n_units} {dimension.kind} would go; leave at least one")
    before, held = shapes_of(module), tensor_holders(module)
    outputs: dict[int, np.ndarray] = {}
    for (name, axis), members in dimension.members.items():
        old = tensor_at(*held[name][0])
        removed = np.zeros(old.shape[axis], bool)
        removed[members[units].reshape(-1)] = True
        kept = np.flatnonzero(~removed)
        put_tensor(held[name], old.index_select(axis, torch.from_numpy(kept)))
        outputs |= {id(part): kept for part, _ in held[name]} if axis == 0 else {}
    for part in {id(part): part for name, _ in dimension.members for part, _ in held[name]}.values():
        _update_layer_sizes(part, outputs.get(id(part)))
    if dimension.kind == "heads":
        _update_head_counts(module, dimension, dimension.n_units - len(units), before)


def differs_from_masked(
    module: nn.Module, dimension: Dimension, units: np.ndarray, feeds: Mapping[str, Tensor]
) -> float:
    """Return the largest output difference between removing units and not reading them, over the largest output.

    `module` is left without the units. About 0 unless a norm sees the dimension; inf where the smaller module does not
    run, or its outputs have other shapes: its code then holds a size that only its author can change.
    """
    held = tensor_holders(module)
    layers = {plain(path): part for path, part in module.named_modules()}
    weights = {id(layers[name].weight): in_axis(layers[name]) for name in dimension.readers}
    for (name, axis), members in dimension.members.items():
        values = tensor_at(*held[name][0])
        if weights.get(id(values)) == axis:
            values.data.index_fill_(axis, torch.from_numpy(members[units].reshape(-1)), 0.0)
    with torch.no_grad():
        expected = list(name_outputs(module(**feeds)).values())
        remove(module, dimension, units)
        try:
            outputs = list(name_outputs(module(**feeds)).values())
        except (RuntimeError, ValueError, IndexError):  # shapes that do not fit: the answer, not a failure
            return math.inf
    if [tensor.shape for tensor in outputs] != [tensor.shape for tensor in expected]:
        return math.inf
    pairs = zip(outputs, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def _update_layer_sizes(part: nn.Module, kept: np.ndarray | None) -> None:
    """Update what torch's own layers know of their sizes.

    `kept`: which indices of their first axis stay, if some go.
    """
    attributes, weight = vars(part), part._parameters.get("weight")
    if weight is None:
        return
    if isinstance(part, nn.Linear):
        part.out_features, part.in_features = weight.shape
    elif is_hf_conv1d(part):
        attributes["nx"], attributes["nf"] = weight.shape
    elif isinstance(part, nn.Embedding):
        part.embedding_dim = weight.shape[1]
    elif isinstance(part, TRANSPOSED):
        part.in_channels, part.out_channels = weight.shape[0], weight.shape[1] * part.groups
    elif isinstance(part, CONVOLUTIONS):
        if kept is not None and part.groups > 1:  # depthwise: whole groups go
            part.groups = len(np.unique(kept // (part.out_channels // part.groups)))
        part.out_channels, part.in_channels = weight.shape[0], weight.shape[1] * part.groups
    elif isinstance(part, nn.LayerNorm):
        part.normalized_shape = tuple(weight.shape)
    else:
        attributes.update({key: len(weight) for key in ("num_features", "num_channels") if key in attributes})


def _update_head_counts(module: nn.Module, dimension: Dimension, n_left: int, before: Shapes) -> None:
    """Update counts of heads, and lengths of all heads together, in the attention module and what is inside it."""
    n = dimension.n_units
    size = min(members.shape[1] for members in dimension.members.values())  # of one head
    factors = {members.shape[1] // size for members in dimension.members.values()}
    counts = {n * factor: n_left * factor for factor in factors}
    lengths = {old * size: new * size for old, new in counts.items()}
    # the innermost module that holds all of the layers
    paths = [name.split(".")[:-1] for name in (*dimension.writers, *dimension.readers)]
    differing = (i for i, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1)
    inside = ".".join(paths[0][: next(differing, min(map(len, paths)))])
    for path, part in module.named_modules():
        if within(plain(path), inside) and "weight" not in part._parameters:
            for key, value in before.attributes.get(plain(path), {}).items():
                known = lengths if LENGTHS.match(key) else counts if HEAD_COUNTS.match(key) else {}
                if type(value) is int and value in known:
                    setattr(part, key, known[value])
