"""Compute ONNX operators on torch tensors, with gradients: arithmetic first, then shapes, indices and moves.

Each entry of `OPERATORS` reads a node's attributes once and gives what computes it: tensors in (None for an input that
is left out), a tensor or a tuple of them out. Sizes, axes and other whole numbers that say what is to be done may also
come as numpy arrays, whose elements torch.export may have made symbols. Definitions are those of
https://onnx.ai/onnx/operators, opsets 17 to 23.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.graph.layers import float_attribute, int_attribute, ints_attribute, text_attribute

Compute = Callable[..., Any]
Make = Callable[[ir.Node], Compute]


def _as_written(function: Compute) -> Make:
    """Return the maker of an operator without attributes: `function` serves every node."""
    return lambda node: function


def make_form_error(node: ir.Node, what: str) -> ValueError:
    return ValueError(f"{node.op_type} {node.name!r} with {what} has no form in torch here")


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


def _gemm(node: ir.Node) -> Compute:
    alpha, beta = float_attribute(node, "alpha", 1.0), float_attribute(node, "beta", 1.0)
    flip_a, flip_b = int_attribute(node, "transA", 0), int_attribute(node, "transB", 0)

    def compute(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        a, b = a.t() if flip_a else a, b.t() if flip_b else b
        product = a @ b if alpha == 1.0 else alpha * (a @ b)
        return product if c is None else product + (c if beta == 1.0 else beta * c)

    return compute


def _batch_norm(node: ir.Node) -> Compute:
    epsilon = float_attribute(node, "epsilon", 1e-5)
    if int_attribute(node, "training_mode", 0):
        raise make_form_error(node, "training_mode")
    return lambda x, gain, shift, mean, var: F.batch_norm(x, mean, var, gain, shift, False, 0.0, epsilon)


def _layer_norm(node: ir.Node) -> Compute:
    axis, epsilon = int_attribute(node, "axis", -1), float_attribute(node, "epsilon", 1e-5)

    def compute(x: Tensor, gain: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, x.shape[axis:], gain, shift, epsilon)

    return compute


def _instance_norm(node: ir.Node) -> Compute:
    epsilon = float_attribute(node, "epsilon", 1e-5)
    return lambda x, gain, shift: F.instance_norm(x, None, None, gain, shift, True, 0.0, epsilon)


def _group_norm(node: ir.Node) -> Compute:
    groups, epsilon = int_attribute(node, "num_groups", 1), float_attribute(node, "epsilon", 1e-5)

    def compute(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        if len(gain) != x.shape[1]:  # opset 18: one for each group
            gain, shift = (v.repeat_interleave(x.shape[1] // groups) for v in (gain, shift))
        return F.group_norm(x, groups, gain, shift, epsilon)

    return compute


def _gelu(node: ir.Node) -> Compute:
    kind = text_attribute(node, "approximate", "none")
    return lambda x: F.gelu(x, approximate=kind)


def _hard_sigmoid(node: ir.Node) -> Compute:
    alpha, beta = float_attribute(node, "alpha", 0.2), float_attribute(node, "beta", 0.5)
    return lambda x: (alpha * x + beta).clamp(0, 1)


def _softmax(function: Compute) -> Make:
    def make(node: ir.Node) -> Compute:
        axis = int_attribute(node, "axis", -1)
        return lambda x: function(x, axis)

    return make


def _slope(function: Compute, default: float) -> Make:
    def make(node: ir.Node) -> Compute:
        alpha = float_attribute(node, "alpha", default)
        return lambda x: function(x, alpha)

    return make


def _reduce(function: Callable[[Tensor, list[int], bool], Tensor]) -> Make:
    """Return the maker of a reduction, whose axes are an attribute or a second input; none: all."""

    def make(node: ir.Node) -> Compute:
        written, keep = ints_attribute(node, "axes", []), bool(int_attribute(node, "keepdims", 1))
        idle = bool(int_attribute(node, "noop_with_empty_axes", 0))

        def compute(x: Tensor, axes: Tensor | None = None) -> Tensor:
            chosen = written if axes is None else axes.tolist()
            return x if idle and not chosen else function(x, chosen or list(range(x.dim())), keep)

        return compute

    return make


def _clip(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    """Clamp to bounds that are both tensors or both numbers."""
    return x if low is None and high is None else torch.clamp(x, low, high)


def _divide(a: Any, b: Any) -> Any:
    whole = not any(value.is_floating_point() if isinstance(value, Tensor) else value % 1 for value in (a, b))
    return torch.div(a, b, rounding_mode="trunc") if whole else a / b


def _largest(*values: Tensor) -> Tensor:
    return reduce(torch.maximum, values)


def _smallest(*values: Tensor) -> Tensor:
    return reduce(torch.minimum, values)


def _mean_of(*values: Tensor) -> Tensor:
    return reduce(torch.add, values) / len(values)


def _einsum(node: ir.Node) -> Compute:
    equation = text_attribute(node, "equation", "")
    return lambda *values: torch.einsum(equation, *values)


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


def _lp_norm(node: ir.Node) -> Compute:
    axis, p = int_attribute(node, "axis", -1), int_attribute(node, "p", 2)
    return lambda x: x / torch.linalg.vector_norm(x, p, dim=axis, keepdim=True)


def _rms_norm(node: ir.Node) -> Compute:
    axis, epsilon = int_attribute(node, "axis", -1), float_attribute(node, "epsilon", 1e-5)
    return lambda x, gain: F.rms_norm(x, x.shape[axis:], None, epsilon) * gain


def _dtype_of(code: int) -> torch.dtype:
    """Return the torch type of an ONNX element type. ValueError for one that torch has not."""
    try:
        return torch.from_numpy(np.zeros(0, ir.DataType(code).numpy())).dtype
    except TypeError as error:
        raise ValueError(f"{ir.DataType(code).name} has no type in torch") from error


def _cast(node: ir.Node) -> Compute:
    dtype = _dtype_of(int_attribute(node, "to", 1))
    return lambda x: x.to(dtype)


def _reshape(node: ir.Node) -> Compute:
    literal = bool(int_attribute(node, "allowzero", 0))

    def compute(x: Tensor, shape: Tensor) -> Tensor:
        sizes = shape.tolist()
        return x.reshape(sizes if literal else [s or x.shape[i] for i, s in enumerate(sizes)])

    return compute


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


def _resize(node: ir.Node) -> Compute:
    """Make what resizes images [B, C, ...] to `sizes`, or by `scales`, as torch's interpolation does it."""
    mode, places = text_attribute(node, "mode", "nearest"), text_attribute(node, _PLACES, "half_pixel")
    nearest = text_attribute(node, "nearest_mode", "round_prefer_floor")
    odd = [key for key in ("antialias", "exclude_outside") if int_attribute(node, key, 0)]
    odd += ["axes"] if "axes" in node.attributes else []
    odd += ["keep_aspect_ratio_policy"] if text_attribute(node, _POLICY, "stretch") != "stretch" else []
    odd += ["cubic_coeff_a"] if mode == "cubic" and float_attribute(node, "cubic_coeff_a", -0.75) != -0.75 else []
    if odd or (mode != "nearest" and places not in _ALIGNED):
        raise make_form_error(node, ", ".join(odd) or f"{mode} at {places}")

    def compute(x: Tensor, roi: Any = None, scales: Any = None, sizes: Any = None) -> Tensor:
        n = x.dim() - 2
        given: dict[str, Any] = {}
        if sizes is not None and len(sizes):
            given["size"] = out = sizes.tolist()[2:]
            factors = [b / a for a, b in zip(x.shape[2:], out, strict=True)]
        else:
            given["scale_factor"] = factors = [float(scale) for scale in scales.tolist()[2:]]
            out = [int(size * factor) for size, factor in zip(x.shape[2:], factors, strict=True)]
        if mode == "nearest":
            return F.interpolate(x, mode=_nearest_kernel(node, places, nearest, x.shape[2:], out, factors), **given)
        return F.interpolate(x, mode=_KERNELS[mode][n - 1], align_corners=_ALIGNED[places], **given)

    return compute


_PLACES, _POLICY = "coordinate_transformation_mode", "keep_aspect_ratio_policy"
_ALIGNED = {"half_pixel": False, "pytorch_half_pixel": False, "align_corners": True}
"""Where ONNX takes a pixel from -> what torch calls it."""
_ROUNDED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_prefer_floor": lambda at: np.ceil(at - 0.5),
    "round_prefer_ceil": lambda at: np.floor(at + 0.5),
}


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
    else:
        at = (at + 0.5) / factor - 0.5
    return _ROUNDED[rounding](at).clip(0, n - 1)


def _arg_max(node: ir.Node) -> Compute:
    axis, keep = int_attribute(node, "axis", 0), bool(int_attribute(node, "keepdims", 1))
    if int_attribute(node, "select_last_index", 0):
        raise make_form_error(node, "select_last_index")
    return lambda x: x.argmax(axis, keep)


def _top_k(node: ir.Node) -> Compute:
    axis, largest = int_attribute(node, "axis", -1), bool(int_attribute(node, "largest", 1))
    return lambda x, k: tuple(x.topk(int(k.reshape(-1)[0]), axis, largest))


def _flatten(node: ir.Node) -> Compute:
    axis = int_attribute(node, "axis", 1)

    return lambda x: x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _transpose(node: ir.Node) -> Compute:
    order = ints_attribute(node, "perm", [])
    return lambda x: x.permute(order or list(reversed(range(x.dim()))))


def _concat(node: ir.Node) -> Compute:
    axis = int_attribute(node, "axis", 0)
    return lambda *parts: torch.cat(parts, axis)


def _split(node: ir.Node) -> Compute:
    axis, n_parts = int_attribute(node, "axis", 0), len(node.outputs)

    def compute(x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
        return x.split(-(-x.shape[axis] // n_parts) if sizes is None else sizes.tolist(), axis)

    return compute


def _gather(node: ir.Node) -> Compute:
    axis = int_attribute(node, "axis", 0)

    def compute(x: Tensor, indices: Any) -> Tensor:
        at = axis % x.dim()
        if isinstance(indices, np.ndarray):
            return x.select(at, indices.item())
        places = torch.where(indices < 0, indices + x.shape[at], indices).long()
        if at == 0 and x.dim() == 2 and x.is_floating_point():
            return F.embedding(places, x)
        return x.index_select(at, places.reshape(-1)).reshape(*x.shape[:at], *places.shape, *x.shape[at + 1 :])

    return compute


def _gather_elements(node: ir.Node) -> Compute:
    axis = int_attribute(node, "axis", 0)
    return lambda x, indices: x.gather(axis, torch.where(indices < 0, indices + x.shape[axis], indices))


def _gather_nd(node: ir.Node) -> Compute:
    n_shared = int_attribute(node, "batch_dims", 0)

    def compute(x: Tensor, indices: Tensor) -> Tensor:
        if n_shared == 0:
            return x[tuple(indices.unbind(-1))]
        shared = x.shape[:n_shared]
        rows = x.reshape(-1, *x.shape[n_shared:])
        places = indices.reshape(-1, *indices.shape[n_shared:])
        gathered = [row[tuple(place.unbind(-1))] for row, place in zip(rows, places, strict=True)]
        return torch.stack(gathered).reshape(*shared, *gathered[0].shape)

    return compute


def _shape(node: ir.Node) -> Compute:
    start, end = int_attribute(node, "start", 0), node.attributes.get("end")
    stop = None if end is None else end.as_int()
    return lambda x: torch.tensor(list(x.shape)[start:stop], dtype=torch.int64, device=x.device)


def _constant_of_shape(node: ir.Node) -> Compute:
    given = node.attributes.get("value")
    value = torch.zeros(1) if given is None else torch.from_numpy(np.array(given.as_tensor().numpy()))
    if value.numel() == 1:
        number = value.item()
        return lambda shape: torch.full(shape.tolist(), number, dtype=value.dtype, device=_device_of(shape))
    raise make_form_error(node, "more than one value")


def _device_of(numbers: Any) -> Any:
    """Return the device of a tensor; None, the usual one, of an array."""
    return getattr(numbers, "device", None) if isinstance(numbers, Tensor) else None


def _constant(node: ir.Node) -> Compute:
    given = node.attributes.get("value")
    if given is None:
        raise make_form_error(node, "a value that is no tensor")
    value = torch.from_numpy(np.array(given.as_tensor().numpy()))
    return lambda: value


def _trilu(node: ir.Node) -> Compute:
    keep = torch.triu if int_attribute(node, "upper", 1) else torch.tril
    return lambda x, k=None: keep(x, 0 if k is None else int(k))


def _cumulative_sum(node: ir.Node) -> Compute:
    if int_attribute(node, "exclusive", 0) or int_attribute(node, "reverse", 0):
        raise make_form_error(node, "exclusive or reverse")
    return lambda x, axis: x.cumsum(int(axis), dtype=x.dtype)


def _pad(node: ir.Node) -> Compute:
    mode = text_attribute(node, "mode", "constant")
    if mode == "wrap":
        raise make_form_error(node, "mode wrap")

    def compute(x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None) -> Tensor:
        chosen = list(range(x.dim())) if axes is None else [axis % x.dim() for axis in axes.tolist()]
        begins, ends = pads.reshape(2, -1).tolist()
        sides = {axis: pair for axis, *pair in zip(chosen, begins, ends, strict=True)}
        flat = [p for axis in reversed(range(x.dim())) for p in sides.get(axis, [0, 0])]
        if mode == "constant":
            return F.pad(x, flat, value=0 if value is None else value.item())
        while len(flat) > 2 and flat[-2:] == [0, 0]:  # torch reflects the last axes alone
            flat = flat[:-2]
        return F.pad(x, flat, mode="replicate" if mode == "edge" else mode)

    return compute


def _squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes.reshape(-1).tolist()))


def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    chosen = axes.reshape(-1).tolist()
    rank = x.dim() + len(chosen)
    for axis in sorted(axis % rank for axis in chosen):
        x = x.unsqueeze(axis)
    return x


def _slice(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None) -> Tensor:
    chosen = range(len(starts)) if axes is None else axes.tolist()
    strides = [1] * len(starts) if steps is None else steps.tolist()
    for axis, start, end, step in zip(chosen, starts.tolist(), ends.tolist(), strides, strict=True):
        x = _take_slice(x, axis, slice(start, end, step))
    return x


def _take_slice(x: Tensor, axis: int, part: slice) -> Tensor:
    if part.step > 0:
        return x[(*[slice(None)] * (axis % x.dim()), part)]
    places = range(*part.indices(x.shape[axis]))
    return x.index_select(axis, torch.tensor(list(places), dtype=torch.int64, device=x.device))


def _expand(x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, shape.tolist()))


def _range(start: Any, limit: Any, delta: Any) -> Tensor:
    dtype = start.dtype if isinstance(start, Tensor) else torch.int64
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=dtype, device=_device_of(start))


_PLAIN: dict[str, Compute] = {
    "Abs": torch.abs, "Add": torch.add, "And": torch.logical_and, "CastLike": lambda x, like: x.to(like.dtype),
    "Ceil": torch.ceil, "Clip": _clip, "Cos": torch.cos, "Div": _divide, "Dropout": lambda x, *ratio: x,
    "Equal": torch.eq, "Erf": torch.erf, "Exp": torch.exp, "Expand": _expand, "Floor": torch.floor,
    "GlobalAveragePool": _global_mean, "GlobalMaxPool": _global_max, "Greater": torch.gt, "GreaterOrEqual": torch.ge,
    "HardSwish": F.hardswish, "Identity": lambda x: x, "IsNaN": torch.isnan, "Less": torch.lt,
    "LessOrEqual": torch.le, "Log": torch.log, "MatMul": torch.matmul, "Max": _largest, "Mean": _mean_of,
    "Min": _smallest, "Mish": F.mish, "Mul": torch.mul, "Neg": torch.neg, "Not": torch.logical_not,
    "Or": torch.logical_or, "Pow": torch.pow, "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x),
    "Range": _range, "Reciprocal": torch.reciprocal, "Relu": F.relu, "Round": torch.round, "Sigmoid": torch.sigmoid,
    "Sign": torch.sign, "Sin": torch.sin, "Size": lambda x: torch.tensor(x.numel(), device=x.device), "Slice": _slice,
    "Softplus": F.softplus, "Softsign": F.softsign, "Sqrt": torch.sqrt, "Squeeze": _squeeze, "Sub": torch.sub,
    "Sum": lambda *values: reduce(torch.add, values), "Tan": torch.tan, "Tanh": torch.tanh,
    "Tile": lambda x, times: x.repeat(times.tolist()), "Unsqueeze": _unsqueeze, "Where": torch.where,
    "Xor": torch.logical_xor,
}  # fmt: skip
OPERATORS: dict[str, Make] = {name: _as_written(function) for name, function in _PLAIN.items()} | {
    "ArgMax": _arg_max,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Concat": _concat,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Celu": _slope(F.celu, 1.0),
    "CumSum": _cumulative_sum,
    "DepthToSpace": _depth_to_space,
    "Einsum": _einsum,
    "Elu": _slope(F.elu, 1.0),
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GroupNormalization": _group_norm,
    "HardSigmoid": _hard_sigmoid,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "LRN": _local_response,
    "LeakyRelu": _slope(F.leaky_relu, 0.01),
    "LogSoftmax": _softmax(F.log_softmax),
    "LpNormalization": _lp_norm,
    "MaxPool": _max_pool,
    "Mod": lambda node: torch.fmod if int_attribute(node, "fmod", 0) else torch.remainder,
    "Pad": _pad,
    "RMSNormalization": _rms_norm,
    "ReduceL1": _reduce(lambda x, axes, keep: torch.linalg.vector_norm(x, 1, dim=axes, keepdim=keep)),
    "ReduceL2": _reduce(lambda x, axes, keep: torch.linalg.vector_norm(x, dim=axes, keepdim=keep)),
    "ReduceMax": _reduce(lambda x, axes, keep: torch.amax(x, axes, keep)),
    "ReduceMean": _reduce(lambda x, axes, keep: torch.mean(x, axes, keep)),
    "ReduceMin": _reduce(lambda x, axes, keep: torch.amin(x, axes, keep)),
    "ReduceSumSquare": _reduce(lambda x, axes, keep: torch.sum(x.square(), axes, keep)),
    "ReduceSum": _reduce(lambda x, axes, keep: torch.sum(x, axes, keep)),
    "Reshape": _reshape,
    "Resize": _resize,
    "Shape": _shape,
    "Softmax": _softmax(F.softmax),
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "TopK": _top_k,
    "Transpose": _transpose,
    "Trilu": _trilu,
}
"""Operator -> what makes a node's function."""
