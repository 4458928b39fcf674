"""Which modules of a torch model are layers: their types, the shapes of their weights, their operators in ONNX."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
PROBE_FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What a forward pass may raise that wants more than a batch of vectors."""
Work = dict[str, tuple[int, str]]
"""Layer -> its multiply-accumulates in a run, and the ONNX operator that it is."""


def is_layer(module: nn.Module) -> bool:
    """Return whether a module's weight is a matrix, a kernel or a table."""
    return isinstance(module, (nn.Linear, nn.Embedding, *CONVOLUTIONS, *TRANSPOSED)) or is_hf_conv1d(module)


def has_own_forward(layer: nn.Module) -> bool:
    """Return whether a layer, no table, is of a subclass of torch's that computes otherwise, as phimoe's router does.

    An engine that puts its own layer in its place, and whoever computes with its weight alone, loses that.
    """
    return has_own_formula(layer) and not (isinstance(layer, nn.Linear) and _multiplies_alone(layer))


def has_own_formula(layer: nn.Module) -> bool:
    """Return whether a layer, no table, is of a subclass of torch's with a forward pass of its own, as Falcon's are."""
    kind = next(kind for kind in type(layer).__mro__ if kind.__name__ in LAYER_OPS)
    computes = ("forward", "_conv_forward")
    own = any(getattr(type(layer), name, None) is not getattr(kind, name, None) for name in computes)
    return own and not isinstance(layer, nn.Embedding)


def _multiplies_alone(layer: nn.Module) -> bool:
    """Return whether a subclass of Linear computes what Linear does, by another formula: tried with a small weight."""
    if layer._parameters.keys() != {"weight", "bias"} or layer._buffers or layer._modules:
        return False
    probe: Any = copy.copy(layer)
    probe.in_features, probe.out_features = 5, 3
    with torch.no_grad(), torch.device("cpu"):
        weight, bias = torch.linspace(-1, 1, 15).reshape(3, 5), None if layer.bias is None else torch.linspace(1, 2, 3)
        held = {"weight": weight, "bias": bias}
        probe._parameters = {name: None if each is None else nn.Parameter(each, False) for name, each in held.items()}
        x = torch.linspace(-9, 9, 40).reshape(2, 4, 5).sin()
        try:
            found = [type(layer).forward(probe.train(training), x) for training in (True, False)]
        except PROBE_FAILURES:
            return False
        expected = nn.functional.linear(x, weight, bias)
        return all(
            isinstance(each, Tensor) and each.shape == expected.shape and torch.allclose(each, expected)
            for each in found
        )


def in_axis(layer: nn.Module) -> int:
    """Return the axis of a layer's weight along which its inputs lie."""
    return 0 if is_hf_conv1d(layer) or isinstance(layer, TRANSPOSED) else 1


def is_hf_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D: a Linear with a transposed weight (GPT-2)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def layer_type(layer: nn.Module) -> str:
    """Return a layer's name for `targets:`; a subclass counts as the torch class that it is."""
    return next(kind.__name__ for kind in type(layer).__mro__ if kind.__name__ in LAYER_OPS)


def weight_shape(layer: nn.Module) -> tuple[int, ...]:
    """Return a layer's weight shape as [out, in / groups, *kernel], or [rows, width] for Embedding."""
    shape: tuple[int, ...] = tuple(layer.weight.shape)  # type: ignore[arg-type]
    if is_hf_conv1d(layer):
        return shape[::-1]
    if isinstance(layer, TRANSPOSED):  # torch has [in, out / groups, *kernel]
        return (shape[1] * layer.groups, shape[0] // layer.groups, *shape[2:])
    return shape


LAYER_OPS = {
    "Linear": "MatMul",
    "Conv1d": "Conv",
    "Conv2d": "Conv",
    "Conv3d": "Conv",
    "ConvTranspose1d": "ConvTranspose",
    "ConvTranspose2d": "ConvTranspose",
    "ConvTranspose3d": "ConvTranspose",
    "Embedding": "Gather",
    "Conv1D": "Gemm",
}
"""Layer type -> ONNX operator, where the forward pass did not tell."""
