"""Make torch's own layers and norms of an ONNX graph's: `nn.Conv2d`, `nn.Linear`, `nn.BatchNorm2d` and the like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from compress.graph.layers import GraphLayer, constant, float_attribute, int_attribute, ints_attribute, is_constant
from compress.graph.torch_images import split_crops, split_pads
from compress.graph.torch_ops import make_form_error

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


class Parameters:
    """The parameters that a graph's initializers become, on the CPU, without gradients.

    A matrix is shared by all that hold it in one form. Vectors are each their reader's own: exporters merge those that
    are equal, as biases of 0 are.
    """

    def __init__(self) -> None:
        self._shared: dict[tuple[str, bool], nn.Parameter] = {}

    def make(self, value: ir.Value | None, flip: bool = False) -> nn.Parameter:
        """Return the parameter of an initializer; `flip`: transposed. ValueError for what is no constant."""
        assert value is not None
        array = np.array(constant(value).T if flip else constant(value), order="C")
        made = nn.Parameter(torch.from_numpy(array), requires_grad=False)
        return made if array.ndim == 1 else self._shared.setdefault((value.name or "", flip), made)


def make_layer(layer: GraphLayer, parameters: Parameters) -> nn.Module:
    """Return the convolution, Linear or Embedding that a graph's layer is; uneven pads are left to its caller."""
    node, shape = layer.node, constant(layer.weight).shape
    has_bias = layer.bias is not None
    made: Any
    if layer.op == "Conv":
        n = len(shape) - 2
        if n not in CONVOLUTIONS:
            raise make_form_error(node, f"{n} dimensions")
        padding = split_pads(node, list(shape[2:]))[0]
        strides, dilations = (ints_attribute(node, key, [1] * n) for key in ("strides", "dilations"))
        kind: Any = CONVOLUTIONS[n]
        sizes = (tuple(shape[2:]), tuple(strides), tuple(padding), tuple(dilations))
        made = kind(shape[1] * layer.groups, shape[0], *sizes, layer.groups, has_bias, device="meta")
    elif layer.op == "Gather":
        made = nn.Embedding(shape[0], shape[1], device="meta")
    else:
        out, into = shape if layer.axis == 0 else shape[::-1]
        made = nn.Linear(into, out, has_bias, device="meta")
    made.weight = parameters.make(layer.weight, flip=layer.axis == 1 and layer.op != "Gather")
    if has_bias:
        made.bias = parameters.make(layer.bias)
    module: nn.Module = made
    return module


def _make_batch_norm(node: ir.Node, shape: tuple[int, ...], parameters: Parameters) -> nn.Module | None:
    vectors = node.inputs[1:5]
    if not all(is_constant(value) for value in vectors) or int_attribute(node, "training_mode", 0):
        return None
    if len(shape) not in BATCH_NORMS:
        raise make_form_error(node, f"an input of {len(shape)} dimensions")
    momentum, epsilon = 1 - float_attribute(node, "momentum", 0.9), float_attribute(node, "epsilon", 1e-5)
    gain, shift, mean, variance = (parameters.make(value) for value in vectors)
    momentum = momentum if 0 < momentum < 1 else 0.1
    module = BATCH_NORMS[len(shape)](len(gain), epsilon, momentum, device="meta")
    module.weight, module.bias = gain, shift
    module.running_mean, module.running_var = mean.data.clone(), variance.data.clone()
    module.num_batches_tracked = torch.tensor(0)
    return module


def _make_layer_norm(node: ir.Node, shape: tuple[int, ...], parameters: Parameters) -> nn.Module | None:
    gain, shift = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    width = shape[int_attribute(node, "axis", -1) :]
    fits = all(value is None or (is_constant(value) and constant(value).shape == width) for value in (gain, shift))
    if gain is None or not fits:
        return None
    module = nn.LayerNorm(width, float_attribute(node, "epsilon", 1e-5), bias=shift is not None, device="meta")
    module.weight = parameters.make(gain)
    if shift is not None:
        module.bias = parameters.make(shift)
    return module


def _make_group_norm(node: ir.Node, shape: tuple[int, ...], parameters: Parameters) -> nn.Module | None:
    gain, shift = node.inputs[1:3]
    n_channels, n_groups = shape[1], int_attribute(node, "num_groups", 1)
    if not all(is_constant(value) and len(constant(value)) == n_channels for value in (gain, shift)):
        return None
    module = nn.GroupNorm(n_groups, n_channels, float_attribute(node, "epsilon", 1e-5), device="meta")
    module.weight, module.bias = parameters.make(gain), parameters.make(shift)
    return module


def _make_conv_transpose(node: ir.Node, shape: tuple[int, ...], parameters: Parameters) -> nn.Module | None:
    weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    if not is_constant(weight) or (bias is not None and not is_constant(bias)):
        return None
    into, out, *size = constant(weight).shape
    n, groups = len(size), int_attribute(node, "group", 1)
    if n not in TRANSPOSED:
        raise make_form_error(node, f"{n} dimensions")
    kind: Any = TRANSPOSED[n]
    module: nn.Module = kind(
        into,
        out * groups,
        tuple(size),
        stride=tuple(ints_attribute(node, "strides", [1] * n)),
        padding=tuple(split_crops(node, n)[0]),
        output_padding=tuple(ints_attribute(node, "output_padding", [0] * n)),
        groups=groups,
        bias=bias is not None,
        dilation=tuple(ints_attribute(node, "dilations", [1] * n)),
        device="meta",
    )
    module.weight = parameters.make(weight)
    if bias is not None:
        module.bias = parameters.make(bias)
    return module


MODULES: dict[str, Callable[[ir.Node, tuple[int, ...], Parameters], nn.Module | None]] = {
    "BatchNormalization": _make_batch_norm,
    "ConvTranspose": _make_conv_transpose,
    "GroupNormalization": _make_group_norm,
    "LayerNormalization": _make_layer_norm,
}
"""Operators beside the layers -> what makes their module, of the shape of their first input; None where what it would
hold is no constant, or not of torch's form."""
