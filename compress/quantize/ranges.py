"""Which nodes of a graph could overflow a half-precision type."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from compress.graph.half import LARGEST, node_name
from compress.graph.layers import constant, is_constant
from compress.graph.run import TAPPED, Feeds, open_session, run_batches, tap


def overflowing_nodes(model: ir.Model, dtype: str, headroom: float, batches: Iterable[Feeds]) -> dict[str, float]:
    """Node name -> largest magnitude among its float inputs and outputs, where `dtype` has not the `headroom` for it.

    An infinity (a mask, say) counts as what the type cannot hold. Raises ValueError when there is no batch or a value
    is NaN.
    """
    limit = LARGEST[dtype] / headroom
    names = [v.name for node in model.graph for v in node.outputs if v.dtype == ir.DataType.FLOAT and v.name]
    peaks: dict[str, float] = {}
    session = open_session(tap(model, names))
    for outputs in run_batches(session, batches):
        for name, values in outputs.items():
            name = name.removesuffix(TAPPED)
            peak = float(np.abs(values).max(initial=0.0))
            if np.isnan(peak):
                raise ValueError(f"tensor {name!r}: NaN among the values")
            peaks[name] = max(peaks.get(name, 0.0), peak)
    if not peaks:
        raise ValueError("there is no calibration data")
    found = {}
    for node in model.graph:
        peak = max((_peak(value, peaks) for value in [*node.inputs, *node.outputs] if value is not None), default=0.0)
        if peak > limit:
            found[node_name(node)] = peak
    return found


def _peak(value: ir.Value, peaks: dict[str, float]) -> float:
    if is_constant(value) and value.dtype == ir.DataType.FLOAT:
        return float(np.abs(constant(value)).max(initial=0.0))
    return peaks.get(value.name or "", 0.0)
