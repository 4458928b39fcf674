"""Exact folding of per-channel scales into the module before an input group: x -> x / s, W -> W diag(s).

Used by AWQ and SmoothQuant. What can be folded where was found by running the model (`Reading.source`, `.how`):

- "norm": weight and bias are divided by s. A norm that computes x (1 + w) keeps (1 + w) / s - 1, so that it still gives
  x (1 + w) / s; which of the two a module is, is found by trying it (`norm_weight_offset`).
- "linear": the source's rows (and bias) are divided by s.
- "value": the same through attention; each of the source's heads serves `source_repeat` query heads, so the scales of
  those must be equal (`tie_scales`).

A source with more outputs than the tensor has channels gives it with its last ones: the values of a fused q/k/v, the up
half of a fused gate/up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from compress.blocks.layers import is_hf_conv1d
from compress.facts import InputGroup

Get = Callable[[str], nn.Module]
"""A layer's or norm's name, as in `Structure`, -> the module that holds its values."""


def fold_scales(input_group: InputGroup, scales: Tensor, get: Get) -> None:
    """Divide the source's outputs by `scales` [in] > 0 and multiply the readers' columns by it, in place.

    The model computes what it did, but for float rounding; every layer of `input_group` then reads a tensor divided by
    `scales`. Raises ValueError without a source, on scales that are not positive and finite, and on scales that differ
    among heads which share a value.
    """
    _check_scales(input_group, scales)
    outputs = source_scales(input_group, scales)
    with torch.no_grad():
        source = get(input_group.source)
        if input_group.how == "norm":
            _divide_norm(source, input_group.source, outputs)
        else:
            _divide_rows(source, outputs)
        for name in input_group.layers:
            weight = get(name).weight
            assert isinstance(weight, Tensor)
            weight.mul_(_shape_for_inputs(get(name), scales.to(weight)))


def source_scales(input_group: InputGroup, scales: Tensor) -> Tensor:
    """Return the scales of the source's (last) outputs [in / source_repeat] for the `scales` [in] of the input
    group."""
    if input_group.source_repeat == 1:
        return scales
    return _group_by_head(input_group, scales)[:, 0].reshape(-1)


def tie_scales(input_group: InputGroup, scales: Tensor) -> Tensor:
    """Return scales that can be folded: the geometric mean over query heads that share a value head. [in] -> [in]."""
    if input_group.source_repeat == 1:
        return scales
    heads = _group_by_head(input_group, scales)
    return heads.log().mean(1, keepdim=True).exp().expand_as(heads).reshape(-1)


def norm_weight_offset(module: nn.Module) -> float | None:
    """Return what `module` adds to its weight before it multiplies: 0.0 (most norms) or 1.0 (Gemma's); found by trying.

    None if its output is not (weight + offset) * f(x) + bias for either, or it has no weight of one dimension: such a
    module is no norm that a scale can be folded into. The module is not changed and may lie on the meta device.
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or any(True for _ in module.children()):
        return None
    generator = torch.Generator().manual_seed(0)
    uniform = functools.partial(_draw_uniform, generator=generator)
    state = {name: uniform(0.5, 1.5, t.shape) for name, t in module.named_parameters()}
    # buffers (running statistics) likewise: any positive value will do
    state |= {name: uniform(0.5, 1.5, t.shape) for name, t in module.named_buffers() if t.is_floating_point()}
    if not {name for name, _ in module.named_parameters()} <= {"weight", "bias"}:
        return None
    x, scales = uniform(-2, 2, (2, 3, len(weight))), uniform(0.5, 2, weight.shape)
    for offset in (0.0, 1.0):
        changed = state | {"weight": (state["weight"] + offset) / scales - offset}
        if "bias" in state:
            changed["bias"] = state["bias"] / scales
        try:
            with torch.no_grad():
                before, after = (torch.func.functional_call(module, s, (x,)) for s in (state, changed))
        except (RuntimeError, TypeError, ValueError, AttributeError):  # one that a gate comes into
            return None
        if not isinstance(before, Tensor) or before.shape != x.shape:
            return None
        if torch.allclose(after, before / scales, rtol=1e-4, atol=1e-5):
            return offset
    return None


def _draw_uniform(low: float, high: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(tuple(shape), generator=generator) * (high - low) + low


def _check_scales(input_group: InputGroup, scales: Tensor) -> None:
    what = f"reading {', '.join(input_group.layers)}"
    if not input_group.source:
        raise ValueError(f"{what}: no module before it can take a scale exactly; leave it as it is")
    if not bool((torch.isfinite(scales) & (scales > 0)).all()):
        raise ValueError(f"{what}: scales must be positive and finite")
    if input_group.source_repeat > 1 and len(scales) % (input_group.source_repeat * input_group.head_size):
        raise ValueError(
            f"{what}: {len(scales)} scales do not fit {input_group.source_repeat} heads of {input_group.head_size}"
        )
    if input_group.source_repeat > 1:
        heads = _group_by_head(input_group, scales)
        if not torch.allclose(heads, heads[:, :1].expand_as(heads), rtol=1e-5, atol=0):
            raise ValueError(f"{what}: scales differ among the query heads that share a value head; use tie_scales")


def _group_by_head(input_group: InputGroup, scales: Tensor) -> Tensor:
    """Return the scales by head: [in] -> [value heads, repeat, head]."""
    return scales.reshape(-1, input_group.source_repeat, input_group.head_size)


def _divide_norm(norm: nn.Module, name: str, scales: Tensor) -> None:
    offset = norm_weight_offset(norm)
    if offset is None:
        raise ValueError(f"{name}: a scale cannot be folded into this {type(norm).__name__}")
    weight, bias = norm.weight, getattr(norm, "bias", None)
    assert isinstance(weight, Tensor)
    weight.copy_((weight + offset) / scales.to(weight) - offset)
    if isinstance(bias, Tensor):
        bias.div_(scales.to(bias))


def _divide_rows(source: nn.Module, scales: Tensor) -> None:
    """Divide the last outputs of a Linear or Conv1D."""
    weight, bias = source.weight, source.bias
    assert isinstance(weight, Tensor)
    rows = weight.t() if is_hf_conv1d(source) else weight  # [out, in]
    rows[-len(scales) :].div_(scales.to(weight)[:, None])
    if isinstance(bias, Tensor):
        bias[-len(scales) :].div_(scales.to(bias))


def _shape_for_inputs(layer: nn.Module, scales: Tensor) -> Tensor:
    """Return the scales [in] in the shape that multiplies the inputs of the layer's weight."""
    return scales[:, None] if is_hf_conv1d(layer) else scales
