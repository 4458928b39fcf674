"""Which modules of a torch model are layers: their types, the shapes of their weights, their operators in ONNX."""

from __future__ import annotations

from torch import nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
Work = dict[str, tuple[int, str]]
"""Layer -> its multiply-accumulates in a run, and the ONNX operator that it is."""


def is_layer(module: nn.Module) -> bool:
    """Return whether a module's weight is a matrix, a kernel or a table."""
    return isinstance(module, (nn.Linear, nn.Embedding, *CONVOLUTIONS, *TRANSPOSED)) or is_hf_conv1d(module)


def has_own_forward(layer: nn.Module) -> bool:
    """Return whether a layer, no table, is of a subclass of torch's that computes otherwise: Falcon's, phimoe's router.

    An engine that puts its own layer in its place, and whoever computes with its weight alone, loses that.
    """
    kind = next(kind for kind in type(layer).__mro__ if kind.__name__ in LAYER_OPS)
    computes = ("forward", "_conv_forward")
    own = any(getattr(type(layer), name, None) is not getattr(kind, name, None) for name in computes)
    return own and not isinstance(layer, nn.Embedding)


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
