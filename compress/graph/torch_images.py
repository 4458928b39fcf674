"""Compute ONNX operators on images and other grids [B, C, ...] in torch: convolutions, pools, resizing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.graph.layers import float_attribute, int_attribute, ints_attribute, text_attribute
from compress.graph.torch_ops import Compute, Make, ignore_attributes, make_form_error

Pads = Callable[[Tensor], list[int]]
"""Gives what has to be padded before a kernel, as `F.pad` wants it."""


def split_pads(node: ir.Node, size: list[int]) -> tuple[list[int], Pads | None]:
    """Return (padding that torch's kernel takes, what pads before it or None). `size`: of the kernel."""
    n, how = len(size), text_attribute(node, "auto_pad", "NOTSET")
    strides, dilations = (values or [1] * n for values in _read_strides(node))
    if how in ("SAME_UPPER", "SAME_LOWER"):
        spans = [d * (k - 1) + 1 for d, k in zip(dilations, size, strict=True)]
        return [0] * n, lambda x: _pad_to_same(x.shape[2:], spans, strides, how == "SAME_LOWER")
    pads = ints_attribute(node, "pads", []) if how == "NOTSET" else []
    begins, ends = pads[:n] or [0] * n, pads[n:] or [0] * n
    if begins == ends:
        return begins, None
    uneven = [p for pair in reversed(list(zip(begins, ends, strict=True))) for p in pair]
    return [0] * n, lambda x: uneven


def _pad_to_same(shape: Sequence[int], spans: Sequence[int], strides: Sequence[int], lower: bool) -> list[int]:
    """Return the padding with which an axis of n gives ceil(n / stride) places, its odd one at the end or the start."""
    pads: list[int] = []
    for n, span, stride in reversed(list(zip(shape, spans, strides, strict=True))):
        total = max(((n + stride - 1) // stride - 1) * stride + span - n, 0)
        half = total // 2
        pads += [total - half, half] if lower else [half, total - half]
    return pads


def _conv(node: ir.Node) -> Compute:
    group, strides, dilations = int_attribute(node, "group", 1), *_read_strides(node)
    split: dict[tuple[int, ...], tuple[list[int], Pads | None]] = {}

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        size = tuple(weight.shape[2:])
        if size not in split:
            split[size] = split_pads(node, list(size))
        padding, before = split[size]
        kernel = (F.conv1d, F.conv2d, F.conv3d)[len(size) - 1]
        x = F.pad(x, before(x)) if before else x
        return kernel(x, weight, bias, strides or 1, padding, dilations or 1, group)

    return compute


def _conv_transpose(node: ir.Node) -> Compute:
    group, strides, dilations = int_attribute(node, "group", 1), *_read_strides(node)
    extra = ints_attribute(node, "output_padding", [])

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        padding, crop = split_crops(node, x.dim() - 2)
        kernel = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[x.dim() - 3]
        x = kernel(x, weight, bias, strides or 1, padding, extra or 0, group, dilations or 1)
        return F.pad(x, crop) if crop else x

    return compute


def split_crops(node: ir.Node, n_dims: int) -> tuple[list[int], list[int]]:
    """Return (padding that a transposed kernel takes, what is cut off behind it, as `F.pad` wants it; [] for none)."""
    if "output_shape" in node.attributes or text_attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise make_form_error(node, "output_shape or auto_pad")
    pads = ints_attribute(node, "pads", [0] * (2 * n_dims))
    if pads[:n_dims] == pads[n_dims:]:
        return pads[:n_dims], []
    return [0] * n_dims, [-p for axis in reversed(range(n_dims)) for p in (pads[axis], pads[n_dims + axis])]


def _read_strides(node: ir.Node) -> tuple[list[int], list[int]]:
    return ints_attribute(node, "strides", []), ints_attribute(node, "dilations", [])


def _max_pool(node: ir.Node) -> Compute:
    size, (strides, dilations) = ints_attribute(node, "kernel_shape", []), _read_strides(node)
    padding, before = split_pads(node, size)
    kernel = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(size) - 1]
    ceil = bool(int_attribute(node, "ceil_mode", 0))

    def compute(x: Tensor) -> Tensor:
        x = F.pad(x, before(x), value=-torch.inf) if before else x
        return kernel(x, size, strides or 1, padding, dilations or 1, ceil)

    return compute


def _average_pool(node: ir.Node) -> Compute:
    size, (strides, dilations) = ints_attribute(node, "kernel_shape", []), _read_strides(node)
    padding, before = split_pads(node, size)
    kernel = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(size) - 1]
    ceil, whole = bool(int_attribute(node, "ceil_mode", 0)), bool(int_attribute(node, "count_include_pad", 0))
    if any(d != 1 for d in dilations) or (before and ceil):
        raise make_form_error(node, "dilations, or uneven pads with ceil_mode")

    def compute(x: Tensor) -> Tensor:
        if before is None:
            return kernel(x, size, strides or [1] * len(size), padding, ceil, whole)
        pads, steps = before(x), strides or [1] * len(size)
        mean = kernel(F.pad(x, pads), size, steps)
        return mean if whole else mean / kernel(F.pad(torch.ones_like(x[:1, :1]), pads), size, steps)

    return compute


def _global_mean(x: Tensor) -> Tensor:
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


def _global_max(x: Tensor) -> Tensor:
    return x.amax(tuple(range(2, x.dim())), keepdim=True)


def _local_response(node: ir.Node) -> Compute:
    size, bias = int_attribute(node, "size", 1), float_attribute(node, "bias", 1.0)
    alpha, beta = float_attribute(node, "alpha", 1e-4), float_attribute(node, "beta", 0.75)
    if size % 2 == 0:
        raise make_form_error(node, "an even size")
    return lambda x: F.local_response_norm(x, size, alpha, beta, bias)


def _depth_to_space(node: ir.Node) -> Compute:
    block, mode = int_attribute(node, "blocksize", 1), text_attribute(node, "mode", "DCR")

    def compute(x: Tensor) -> Tensor:
        n, _, height, width = x.shape
        if mode == "CRD":
            return F.pixel_shuffle(x, block)
        parts = x.reshape(n, block, block, -1, height, width).permute(0, 3, 4, 1, 5, 2)
        return parts.reshape(n, -1, height * block, width * block)

    return compute


def _space_to_depth(node: ir.Node) -> Compute:
    block = int_attribute(node, "blocksize", 1)

    def compute(x: Tensor) -> Tensor:
        n, channels, height, width = x.shape
        parts = x.reshape(n, channels, height // block, block, width // block, block).permute(0, 3, 5, 1, 2, 4)
        return parts.reshape(n, channels * block * block, height // block, width // block)

    return compute


_KERNELS = {"linear": ("linear", "bilinear", "trilinear"), "cubic": ("", "bicubic", "")}
_PLACES, _POLICY = "coordinate_transformation_mode", "keep_aspect_ratio_policy"
_ALIGNED = {"half_pixel": False, "pytorch_half_pixel": False, "align_corners": True}
"""Where ONNX takes a pixel from -> what torch calls it."""
_ROUNDED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_prefer_floor": lambda at: np.ceil(at - 0.5),
    "round_prefer_ceil": lambda at: np.floor(at + 0.5),
}


def _resize(node: ir.Node) -> Compute:
    """Make what resizes images [B, C, ...] to `sizes`, or by `scales`, as torch's interpolation does it."""
    mode, places = text_attribute(node, "mode", "nearest"), text_attribute(node, _PLACES, "half_pixel")
    nearest = text_attribute(node, "nearest_mode", "round_prefer_floor")
    odd = [key for key in ("antialias", "exclude_outside") if int_attribute(node, key, 0)]
    odd += ["axes"] if "axes" in node.attributes else []
    odd += ["keep_aspect_ratio_policy"] if text_attribute(node, _POLICY, "stretch") != "stretch" else []
    odd += ["cubic_coeff_a"] if mode == "cubic" and float_attribute(node, "cubic_coeff_a", -0.75) != -0.75 else []
    if odd or places not in ((*_ALIGNED, "asymmetric") if mode == "nearest" else _ALIGNED):
        raise make_form_error(node, ", ".join(odd) or f"{mode} at {places}")

    def compute(x: Tensor, roi: Any = None, scales: Any = None, sizes: Any = None) -> Tensor:
        n = x.dim() - 2
        given: dict[str, Any] = {}
        if sizes is not None and len(sizes):
            given["size"] = out = sizes.tolist()[2:]
            factors = [b / a for a, b in zip(x.shape[2:], out, strict=True)]
        else:
            if any(scale != 1 for scale in scales.tolist()[:2]):
                raise make_form_error(node, "scales of the batch or the channels")
            given["scale_factor"] = factors = [float(scale) for scale in scales.tolist()[2:]]
            out = [int(size * factor) for size, factor in zip(x.shape[2:], factors, strict=True)]
        if mode == "nearest":
            return F.interpolate(x, mode=_nearest_kernel(node, places, nearest, x.shape[2:], out, factors), **given)
        return F.interpolate(x, mode=_KERNELS[mode][n - 1], align_corners=_ALIGNED[places], **given)

    return compute


def _nearest_kernel(
    node: ir.Node, places: str, rounding: str, shape: Sequence[int], out: Sequence[int], factors: Sequence[float]
) -> str:
    """Return torch's mode that takes the very pixels which ONNX takes. ValueError where none does."""
    sizes = [*zip(shape, out, factors, strict=True)]
    if not all(isinstance(number, int | float) for axis in sizes for number in axis):  # symbols, as it is exported
        return "nearest" if places == "asymmetric" else "nearest-exact"
    for kernel, shift in (("nearest", 0.0), ("nearest-exact", 0.5)):
        if all(
            np.array_equal(_pick_pixels(n, m, f, places, rounding), np.floor((np.arange(m) + shift) / f).clip(0, n - 1))
            for n, m, f in sizes
        ):
            return kernel
    raise make_form_error(node, f"nearest at {places}, {rounding}")


def _pick_pixels(n: int, n_out: int, factor: float, places: str, rounding: str) -> np.ndarray:
    """Return which of `n` pixels ONNX takes for each of `n_out`."""
    at = np.arange(n_out, dtype=np.float64)
    if places == "asymmetric":
        at = at / factor
    elif places == "align_corners":
        at = at * (n - 1) / max(n_out - 1, 1)
    elif places == "pytorch_half_pixel" and n_out == 1:
        at = at * 0
    else:
        at = (at + 0.5) / factor - 0.5
    return _ROUNDED[rounding](at).clip(0, n - 1)


IMAGE_OPERATORS: dict[str, Make] = {
    "AveragePool": _average_pool,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "DepthToSpace": _depth_to_space,
    "GlobalAveragePool": ignore_attributes(_global_mean),
    "GlobalMaxPool": ignore_attributes(_global_max),
    "LRN": _local_response,
    "MaxPool": _max_pool,
    "Resize": _resize,
    "SpaceToDepth": _space_to_depth,
}
"""Operator -> what makes a node's function."""
