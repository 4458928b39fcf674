"""Is the exported graph the model? Compared on real inputs, and the first layer that differs is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import torch

from compress.errors import ExportError
from compress.graph.layers import find_layers
from compress.graph.run import Feeds, open_session, run_batches, tap
from compress.models.load import LoadedModel
from compress.models.trace import run

TOLERANCE = 1e-4
"""Largest difference over largest magnitude; float32 kernels of two libraries stay about ten times below it."""


def check_parity(loaded: LoadedModel, model: ir.Model, batches: Sequence[Feeds]) -> float:
    """Compare torch with the graph over batches of real inputs; the largest relative difference.

    Raises ExportError that names the first layer whose outputs differ beyond the tolerance. An ONNX source is its own
    graph: 0.
    """
    if loaded.module is None:
        return 0.0
    session = open_session(model)
    worst = 0.0
    for feeds, outputs in zip(batches, run_batches(session, batches), strict=True):
        expected = _torch_outputs(loaded, feeds)
        for name, values in outputs.items():
            if values.shape != expected[name].shape:
                raise ExportError(
                    f"parity: output {name!r} has shape {values.shape}, torch gives {expected[name].shape}"
                )
            worst = max(worst, relative_difference(expected[name], values))
    if worst > TOLERANCE:
        where = first_difference(loaded, model, batches)
        raise ExportError(
            f"parity: torch and ONNX differ by {worst:.2e} of the largest output (allowed {TOLERANCE:.0e}); {where}"
        )
    return worst


def relative_difference(expected: np.ndarray, got: np.ndarray) -> float:
    """max |expected - got| / max |expected|; infinite where either is not finite and they differ."""
    if not (np.isfinite(got).all() and np.isfinite(expected).all()):
        return 0.0 if np.array_equal(expected, got, equal_nan=True) else float("inf")
    scale = max(float(np.abs(expected).max(initial=0.0)), 1e-12)
    return float(np.abs(expected.astype(np.float64) - got).max(initial=0.0)) / scale


def first_difference(loaded: LoadedModel, model: ir.Model, batches: Sequence[Feeds]) -> str:
    """A sentence that names the first layer, in graph order, whose output differs."""
    assert loaded.module is not None
    modules = {name.removeprefix("wrapped."): module for name, module in loaded.module.named_modules()}
    layers = [layer for layer in find_layers(model) if layer.name in modules and layer.output.name]
    seen: dict[str, np.ndarray] = {}
    hooks = [modules[la.name].register_forward_hook(_keep(seen, la.name)) for la in layers]
    try:
        _torch_outputs(loaded, batches[0])
    finally:
        for hook in hooks:
            hook.remove()
    got = next(run_batches(open_session(tap(model, [la.output.name or "" for la in layers])), batches[:1]))
    for layer in layers:
        values = got[layer.output.name or ""]
        if layer.name in seen and seen[layer.name].size == values.size:
            difference = relative_difference(seen[layer.name].ravel(), values.ravel())
            if difference > TOLERANCE:
                return f"the first layer to differ is {layer.name} ({layer.op}), by {difference:.2e}"
    return "every layer with a weight agrees: the difference is in what stands between or after them"


def _keep(seen: dict[str, np.ndarray], name: str) -> Callable[[torch.nn.Module, object, object], None]:
    def hook(module: torch.nn.Module, args: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and name not in seen:
            seen[name] = output.detach().numpy()

    return hook


def _torch_outputs(loaded: LoadedModel, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    assert loaded.module is not None
    assert loaded.parameters is not None
    tensors = {loaded.parameters[n]: torch.from_numpy(np.ascontiguousarray(feeds[n])) for n in loaded.input_names}
    outputs = run(loaded.module, tensors)
    return {name: part.numpy() for name, part in zip(loaded.output_names, outputs.values(), strict=True)}
