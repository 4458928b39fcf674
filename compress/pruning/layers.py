"""A layer as matrices: the rows that it reads, its weight against them, its outputs. One form for all kinds of layers.

A layer of `groups` groups is `groups` matrices [out / groups, features]. A feature is one number that one output sees:
an input of a Linear layer, one tap of one channel of a convolution; channel after channel, taps inside. A row is one
place of the output: one token, one pixel. A transposed convolution is one over its input with zeros between the places,
whose taps are its own from the last to the first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.blocks.layers import CONVOLUTIONS, TRANSPOSED, has_own_forward, is_hf_conv1d, is_layer
from compress.blocks.materialise import plain
from compress.errors import PassError

COMPUTED = "its weight is computed from other parameters"
"""Why a layer is not pruned or fitted whose weight is no parameter: torch.nn.utils.parametrize."""
WITH_TAPS = (*CONVOLUTIONS, *TRANSPOSED)


def is_matrix_layer(layer: nn.Module) -> bool:
    """Return whether a layer is Linear, Hugging Face's Conv1D, or a convolution, transposed or not, of 1 to 3 axes.

    One of a subclass that computes otherwise is none.
    """
    return (isinstance(layer, (nn.Linear, *WITH_TAPS)) or is_hf_conv1d(layer)) and not has_own_forward(layer)


def layers_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return plain name -> layer, of all that can be seen as matrices."""
    return {plain(name): part for name, part in module.named_modules() if is_matrix_layer(part)}


def weight_names(module: nn.Module) -> dict[str, str]:
    """Return layer -> the first name of its weight, by which shared ones are known."""
    names = {id(parameter): plain(name) for name, parameter in module.named_parameters()}
    layers: dict[str, Any] = {plain(name): part for name, part in module.named_modules() if is_layer(part)}
    return {name: names.get(id(layer.weight), f"{name}.weight") for name, layer in layers.items()}


def n_groups(layer: nn.Module) -> int:
    """Return the number of groups of a convolution; any other layer has one."""
    return layer.groups if isinstance(layer, WITH_TAPS) else 1


def n_features(layer: nn.Module) -> int:
    """Return the number of features that one output sees."""
    weight: Any = layer.weight
    if isinstance(layer, TRANSPOSED):
        return int(weight[:, 0].numel()) // layer.groups
    return int(weight.shape[0] if is_hf_conv1d(layer) else weight[0].numel())


def read_weight(layer: nn.Module) -> Tensor:
    """Return the weight [groups, out / groups, features], in its own dtype; a view where that is possible."""
    weight: Any = layer.weight.detach()  # type: ignore[operator]
    if isinstance(layer, TRANSPOSED):
        by_group = weight.unflatten(0, (layer.groups, -1)).transpose(1, 2)  # [groups, out / groups, in / groups, *taps]
        turned: Tensor = by_group.flip(_tap_axes(layer, 3)).flatten(2)
        return turned
    matrix = weight.T if is_hf_conv1d(layer) else weight.flatten(1)  # [out, features]
    matrices: Tensor = matrix.reshape(n_groups(layer), -1, matrix.shape[1])
    return matrices


def write_weight(layer: nn.Module, matrix: Tensor) -> None:
    """Replace the layer's weight, in place, by `matrix` [groups, out / groups, features] in any float dtype."""
    with torch.no_grad():
        weight: Any = layer.weight
        weight.copy_(_form_weight(layer, matrix))


def _form_weight(layer: Any, matrix: Tensor) -> Tensor:
    """Return `matrix` [groups, out / groups, features] in the form of the layer's weight."""
    if isinstance(layer, TRANSPOSED):
        by_group = matrix.unflatten(2, (-1, *layer.kernel_size))  # [groups, out / groups, in / groups, *taps]
        return by_group.flip(_tap_axes(layer, 3)).transpose(1, 2).flatten(0, 1)
    flat = matrix.flatten(0, 1)
    return flat.T if is_hf_conv1d(layer) else flat.reshape(layer.weight.shape)


def _tap_axes(layer: Any, first: int) -> tuple[int, ...]:
    return tuple(range(first, first + len(layer.kernel_size)))


def channel_axis(layer: nn.Module) -> int:
    """Return the axis along which the outputs of a layer lie in what it gives: 1 of a convolution, else the last."""
    return 1 if isinstance(layer, WITH_TAPS) else -1


def features_of(layer: nn.Module, inputs: np.ndarray) -> np.ndarray:
    """Return the features that units' inputs are, as int64 [n_units, k * taps * groups], numbered over all groups.

    `inputs` [n_units, k]: indices along the weight's input axis; one of a grouped layer stands for it in every group,
    but for a transposed convolution, whose axis has those of all groups.
    """
    weight: Any = layer.weight
    if isinstance(layer, TRANSPOSED):
        places: np.ndarray = inputs[:, :, None] * int(weight[0, 0].numel()) + np.arange(int(weight[0, 0].numel()))
        return places.reshape(len(inputs), -1)
    taps = int(weight[0, 0].numel()) if isinstance(layer, CONVOLUTIONS) else 1
    width, groups = n_features(layer), n_groups(layer)
    first = inputs[:, :, None, None] * taps + np.arange(groups)[:, None] * width  # [n_units, k, groups, 1]
    features: np.ndarray = (first + np.arange(taps)).reshape(len(inputs), -1)
    return features


def n_rows(layer: nn.Module, out: Tensor) -> int:
    """Return how many rows one call makes: the numbers that it gives, over its outputs."""
    return out.numel() // max(out.shape[channel_axis(layer)], 1)


def output_rows(layer: nn.Module, out: Tensor, rows: Tensor) -> Tensor:
    """Return some rows (int64) of an output, or of a tensor of its form: [len(rows), out]."""
    last = out.movedim(channel_axis(layer), -1)
    return last.reshape(-1, last.shape[-1])[rows]


def in_groups(layer: nn.Module, rows: Tensor) -> Tensor:
    """Return rows of outputs [n, out] by group: [groups, n, out / groups]."""
    return rows.reshape(len(rows), n_groups(layer), -1).movedim(1, 0)


def apply_layer(layer: nn.Module, x: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    """Return what the layer would give with another weight and bias; no hook is run.

    `matrix` [groups, out / groups, features], `bias` [out].
    """
    matrix, bias = matrix.to(x.dtype), bias.to(x.dtype)
    if isinstance(layer, TRANSPOSED):
        transpose: Any = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
        places = layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
        turned: Tensor = transpose[len(layer.kernel_size) - 1](x, _form_weight(layer, matrix), bias, *places)
        return turned
    if not isinstance(layer, CONVOLUTIONS):
        return functional.linear(x, matrix.flatten(0, 1), bias)
    out: Tensor = layer._conv_forward(x, _form_weight(layer, matrix), bias)
    return out


def input_rows(layer: nn.Module, x: Tensor, rows: Tensor) -> Tensor:
    """Return what some rows (int64) of a layer's output are made from: [groups, len(rows), features].

    Raises PassError for an input without a batch dimension, which convolutions may have.
    """
    if not isinstance(layer, WITH_TAPS):
        return x.reshape(-1, x.shape[-1])[rows][None]
    if x.dim() != len(layer.kernel_size) + 2:
        raise PassError(
            f"{type(layer).__name__}: an input of shape {list(x.shape)} has no batch dimension; feed batches"
        )
    seen = windows(layer, x)  # [batch, channels, *places, *taps]
    n_space = len(layer.kernel_size)
    places = seen.shape[2 : 2 + n_space]
    where = torch.unravel_index(rows, (len(x), *places))
    order = (0, *range(2, 2 + n_space), 1, *range(2 + n_space, 2 + 2 * n_space))
    patches = seen.permute(order)[where]  # [rows, channels, *taps]
    return patches.reshape(len(rows), n_groups(layer), -1).movedim(1, 0)


def windows(layer: Any, x: Tensor) -> Tensor:
    """Return a view [batch, channels, *places, *taps] of the padded input: what each place of the output sees."""
    strides = layer.stride
    if isinstance(layer, TRANSPOSED):
        padded, strides = _spread(layer, x), (1,) * len(strides)
    else:
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        padded = functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    for axis, (taps, stride, step) in enumerate(zip(layer.kernel_size, strides, layer.dilation, strict=True)):
        padded = padded.unfold(2 + axis, step * (taps - 1) + 1, stride)[..., ::step]
    return padded


def _spread(layer: Any, x: Tensor) -> Tensor:
    """Return a transposed convolution's input with zeros between its places, padded as its windows reach."""
    sizes = [(n - 1) * stride + 1 for n, stride in zip(x.shape[2:], layer.stride, strict=True)]
    spread = x.new_zeros(*x.shape[:2], *sizes)
    places: Any = (..., *(slice(None, None, stride) for stride in layer.stride))
    spread[places] = x
    pads: list[int] = []
    for taps, step, less, more in zip(
        layer.kernel_size, layer.dilation, layer.padding, layer.output_padding, strict=True
    ):
        reach = step * (taps - 1) - less
        pads = [reach, reach + more, *pads]  # torch wants the last axis first
    return functional.pad(spread, pads)
