"""Find SmoothQuant's scales, the strength of each group chosen by the error it leaves, and apply them to a graph.

Xiao et al., SmoothQuant (2022, arXiv:2211.10438), equation 4: s = max|X|^alpha / max|W|^(1 - alpha) for each input
channel; X / s and W * s give the same product. A fixed alpha of 0.5 ruins layers whose activations carry a few huge
channels (the second feed-forward product of BERT-like encoders), so alpha is searched, and "leave it alone" is among
the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compress.graph.edit import append, initializer, reroute, uses_of
from compress.graph.layers import GraphLayer, constant, is_constant
from compress.rounding.observers import Observer, choose_range
from compress.rounding.quantized_weight import round_to_nearest

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Exponents that are tried; SmoothQuant's paper (arXiv 2211.10438) takes 0.5 for most models, 0.75 for GLM-130B."""
FREE, COSTLY = 0.9, 0.6
"""Part of the old error that the new one must be below: if a smoothing folds, and if it costs a multiplication."""
NORMS = {"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"}


@dataclass(frozen=True)
class Smoothing:
    """The outcome for one group of layers that read one tensor. `scales` float32 [in], or None when nothing was gained.

    `error_before`, `error_after`: squared error of the int8 products relative to their energy.
    """

    alpha: float | None
    scales: np.ndarray | None
    error_before: float
    error_after: float


def smoothing_scales(input_peak: np.ndarray, weight_peak: np.ndarray, alpha: float) -> np.ndarray:
    """Return the scales of equation 4, float32 [in], normalised to a geometric mean of 1. Dead channels get 1."""
    alive = (input_peak > 0) & (weight_peak > 0)
    x, w = np.where(alive, input_peak, 1.0), np.where(alive, weight_peak, 1.0)
    logs = np.where(alive, alpha * np.log(x) - (1 - alpha) * np.log(w), 0.0)
    if alive.any():
        logs = np.where(alive, logs - logs[alive].mean(), 0.0)
    scales: np.ndarray = np.exp(np.clip(logs, -16, 16))
    return scales.astype(np.float32)


def search_smoothing(
    rows: np.ndarray,
    input_peak: np.ndarray,
    weights: Sequence[np.ndarray],
    alphas: Sequence[float] = ALPHAS,
    gain: float = FREE,
    tied: Callable[[np.ndarray], np.ndarray] = lambda scales: scales,
    by_row: bool = False,
) -> Smoothing:
    """Try each alpha on sampled input rows [n, in] and the group's weights [out, in]; keep the best.

    An alpha is taken only if the error falls below `gain` of what it was: a smoothing that cannot be folded into the
    layer before costs a multiplication at run time. `tied` brings scales into the form that can be folded. `by_row`:
    each row has a symmetric scale of its own, found at run time (W8A8), instead of all sharing one range.
    """
    weight = np.concatenate([w.astype(np.float32) for w in weights])  # [sum of out, in]
    exact = rows @ weight.T
    energy = max(float(np.square(exact).sum()), 1e-30)
    before = _measure_product_error(rows, weight, exact, np.ones(rows.shape[1], np.float32), by_row) / energy
    weight_peak = np.abs(weight).max(axis=0)
    best = Smoothing(None, None, before, before)
    for alpha in alphas:
        scales = tied(smoothing_scales(input_peak, weight_peak, alpha))
        error = _measure_product_error(rows, weight, exact, scales, by_row) / energy
        if error < gain * before and (best.scales is None or error < best.error_after):
            best = Smoothing(alpha, scales, before, error)
    return best


def _measure_product_error(
    rows: np.ndarray, weight: np.ndarray, exact: np.ndarray, scales: np.ndarray, by_row: bool
) -> float:
    """Return the squared error of the product in int8, inputs by row or per tensor, weights per output channel."""
    x = _round_by_row(rows / scales) if by_row else _round_by_tensor(rows / scales)
    w = round_to_nearest(weight * scales, 8).dequantize()
    return float(np.square(x @ w.T - exact).sum())


def _round_by_tensor(rows: np.ndarray) -> np.ndarray:
    seen = Observer()
    seen.update(rows)
    low, high = choose_range(seen, "mse")
    step = np.float32((high - low) / 255)
    rounded: np.ndarray = np.clip(np.round((rows - np.float32(low)) / step), 0, 255) * step + np.float32(low)
    return rounded


def _round_by_row(rows: np.ndarray) -> np.ndarray:
    peak = np.abs(rows).max(axis=1, keepdims=True)
    step = np.where(peak > 0, peak, 1.0).astype(np.float32) / np.float32(127)
    rounded: np.ndarray = np.round(rows / step) * step
    return rounded


def input_groups(layers: Sequence[GraphLayer]) -> dict[str, list[GraphLayer]]:
    """Group matrix products by the tensor they read: those that must share smoothing scales."""
    groups: dict[str, list[GraphLayer]] = {}
    for layer in layers:
        if layer.op in ("MatMul", "Gemm") and layer.data_input.name:
            groups.setdefault(layer.data_input.name, []).append(layer)
    return groups


def apply_smoothing(model: ir.Model, group: Sequence[GraphLayer], scales: np.ndarray) -> str:
    """Divide the group's input by `scales` [in] and multiply its weights by them; the product stays the same.

    Returns how the division was written: "folded into <node>" or "multiplication".
    """
    for layer in group:
        weight = constant(layer.weight)
        along = scales[:, None] if layer.axis == 1 else scales[None, :]  # MatMul [in, out], Gemm transB [out, in]
        name = f"{layer.name}/smoothed" if len(uses_of(layer.weight)) > 1 else layer.weight.name or layer.name
        layer.node.replace_input_with(layer.weight_input, initializer(model, name, (weight * along).astype(np.float32)))
    value = group[0].data_input
    readers = {layer.node for layer in group}
    norm = foldable_norm(group)
    if norm is not None:
        for parameter in norm.inputs[1:]:
            assert parameter is not None
            initializer(model, parameter.name or "", (constant(parameter) / scales).astype(np.float32))
        return f"folded into {norm.name}"
    inverse = initializer(model, f"{value.name}/smoothing", (1.0 / scales).astype(np.float32))
    uses = [use for use in uses_of(value) if use[0] in readers]
    smoothed = append(model, "Mul", [value, inverse], f"{value.name}/smoothed")
    smoothed.type, smoothed.shape = value.type, value.shape
    reroute(uses, smoothed)
    model.graph.sort()
    return "multiplication"


def foldable_norm(group: Sequence[GraphLayer]) -> ir.Node | None:
    """Return the normalisation that gives the group's input and can take the scales in, or None."""
    norm = group[0].data_input.producer()
    return norm if norm is not None and _can_fold(norm, {layer.node for layer in group}) else None


def _can_fold(norm: ir.Node, readers: Collection[ir.Node]) -> bool:
    """Return whether `norm` is a normalisation that only `readers` see, with constant parameters of its own."""
    if norm.op_type not in NORMS or norm.outputs[0].is_graph_output():
        return False
    if not all(use.node in readers for use in norm.outputs[0].uses()):
        return False
    return all(value is not None and is_constant(value) and len(uses_of(value)) == 1 for value in norm.inputs[1:])
