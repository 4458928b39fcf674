"""A layer as matrices: the rows that it reads, its weight against them, its outputs. One form for all kinds of layers.

A layer of `groups` groups is `groups` matrices [out / groups, features]. A feature is one number that one output sees:
an input of a Linear layer, one tap of one channel of a convolution; channel after channel, taps inside. A row is one
place of the output: one token, one pixel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.blocks.materialise import plain
from compress.blocks.trace import CONVOLUTIONS, is_hf_conv1d, is_layer
from compress.errors import PassError


def is_matrix_layer(layer: nn.Module) -> bool:
    """Return whether a layer is Linear, Hugging Face's Conv1D, Conv1d, Conv2d or Conv3d."""
    return isinstance(layer, (nn.Linear, *CONVOLUTIONS)) or is_hf_conv1d(layer)


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
    return layer.groups if isinstance(layer, CONVOLUTIONS) else 1


def n_features(layer: nn.Module) -> int:
    """Return the number of features that one output sees."""
    weight: Any = layer.weight
    return int(weight.shape[0] if is_hf_conv1d(layer) else weight[0].numel())


def read_weight(layer: nn.Module) -> Tensor:
    """Return the weight [groups, out / groups, features], in its own dtype; a view where that is possible."""
    weight: Any = layer.weight.detach()  # type: ignore[operator]
    matrix = weight.T if is_hf_conv1d(layer) else weight.flatten(1)  # [out, features]
    matrices: Tensor = matrix.reshape(n_groups(layer), -1, matrix.shape[1])
    return matrices


def write_weight(layer: nn.Module, matrix: Tensor) -> None:
    """Replace the layer's weight, in place, by `matrix` [groups, out / groups, features] in any float dtype."""
    flat = matrix.flatten(0, 1)
    with torch.no_grad():
        weight: Any = layer.weight
        weight.copy_(flat.T if is_hf_conv1d(layer) else flat.reshape(weight.shape))


def channel_axis(layer: nn.Module) -> int:
    """Return the axis along which the outputs of a layer lie in what it gives: 1 of a convolution, else the last."""
    return 1 if isinstance(layer, CONVOLUTIONS) else -1


def features_of(layer: nn.Module, inputs: np.ndarray) -> np.ndarray:
    """Return the features that units' inputs are, as int64 [n_units, k * taps * groups], numbered over all groups.

    `inputs` [n_units, k]: indices along the weight's input axis; one of a grouped layer stands for it in every group.
    """
    weight: Any = layer.weight
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
    flat = matrix.flatten(0, 1).to(x.dtype)
    if not isinstance(layer, CONVOLUTIONS):
        return functional.linear(x, flat, bias.to(x.dtype))
    out: Tensor = layer._conv_forward(x, flat.reshape(layer.weight.shape), bias.to(x.dtype))
    return out


def input_rows(layer: nn.Module, x: Tensor, rows: Tensor) -> Tensor:
    """Return what some rows (int64) of a layer's output are made from: [groups, len(rows), features].

    Raises PassError for an input without a batch dimension, which convolutions may have.
    """
    if not isinstance(layer, CONVOLUTIONS):
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
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    for axis, (taps, stride, step) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)):
        padded = padded.unfold(2 + axis, step * (taps - 1) + 1, stride)[..., ::step]
    return padded
