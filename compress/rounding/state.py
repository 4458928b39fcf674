"""What the graph passes have decided about a model, kept beside its float graph until an exporter writes it down.

Passes decide, exporters write: one state gives every variant, and a layer goes back to float by leaving the state.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir

from compress.facts import LayerFacts
from compress.formats.schemes import KvScheme
from compress.graph.layers import layer_facts
from compress.rounding.placement import Kind
from compress.rounding.quantized_weight import QuantizedWeight

Variant = Literal["u8s8", "s8s8"]
FLOAT8 = ml_dtypes.float8_e4m3fn
LARGEST_FLOAT8 = 448.0


@dataclass(frozen=True)
class Range:
    """The real interval that 256 levels cover: [low, high] as uint8, [-peak, peak] as symmetric int8 or as float8."""

    low: float
    high: float
    peak: float

    def parameters(self, variant: Variant, float8: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return (scale float32 [], zero point uint8, int8 or float8 [])."""
        if float8:
            return np.asarray(np.float32(max(self.peak, 1e-12) / LARGEST_FLOAT8)), np.zeros((), FLOAT8)
        if variant == "s8s8":
            return np.asarray(np.float32(max(self.peak, 1e-12) / 127)), np.zeros((), np.int8)
        scale = np.float32(max(self.high - self.low, 1e-12) / 255)
        return np.asarray(scale), np.asarray(np.clip(np.round(-self.low / scale), 0, 255), np.uint8)


@dataclass
class GraphState:
    """A float graph and the decisions about it.

    `integer`: layers computed in eight bits (weights and activations): int8, or float8 where their weights are
    (`in_float8`). `weight_only`: layers whose weights alone are rounded.
    Both are keys of `weights`. `unpacked`: of the latter, those computed as if they were float: a runtime unpacks their
    weights once, as it loads them. `input_scales`: of the latter, those whose inputs are rounded as they run, too, in
    the weights' own format (NVFP4, MXFP8) -> what a block's scale of 1 stands for. `ranges`: tensor -> interval, for
    every tensor the placement quantizes (static int8 only). `biases`: layer -> corrected bias. `leave_out`: operators
    whose outputs stay float. `half`: the float type that the rest is computed in; `half_kept`: the nodes kept in
    float32. `kv_cache`: how a decoder keeps keys and values, with `kv_scales`: attention module -> (scale of its keys,
    of its values). `timed_for`: the target by whose times layers are unpacked and `placement` is chosen, "" for none;
    without them it would be `untimed_placement`.
    """

    model: ir.Model
    integer: list[str] = field(default_factory=list)
    weight_only: list[str] = field(default_factory=list)
    unpacked: list[str] = field(default_factory=list)
    input_scales: dict[str, float] = field(default_factory=dict)
    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    biases: dict[str, np.ndarray] = field(default_factory=dict)
    ranges: dict[str, Range] = field(default_factory=dict)
    placement: Kind = "inputs"
    attention: bool = False
    leave_out: list[str] = field(default_factory=list)
    dynamic: bool = False
    half: str | None = None
    half_kept: list[str] = field(default_factory=list)
    kv_cache: KvScheme | None = None
    kv_scales: dict[str, tuple[float, float]] = field(default_factory=dict)
    timed_for: str = ""
    untimed_placement: Kind = "inputs"

    def facts(self) -> tuple[LayerFacts, ...]:
        """Return the graph's layers as the plan knows them, the decided ones in the bits they are stored in."""
        return layer_facts(self.model, {name: float(weight.bits) for name, weight in self.weights.items()})

    @property
    def in_float8(self) -> bool:
        """Return whether the layers computed in eight bits are so in float8; a graph has one of the two."""
        return any(self.weights[name].values.dtype == FLOAT8 for name in self.integer)

    def for_target(self, name: str) -> GraphState:
        """Return what a target's file is written from: without what was chosen by the times of another target."""
        if self.timed_for in ("", name):
            return self
        return replace(
            self,
            integer=[*self.integer, *self.unpacked],
            weight_only=[layer for layer in self.weight_only if layer not in self.unpacked],
            unpacked=[],
            placement=self.untimed_placement,
            timed_for="",
        )

    def to_float(self, layer: str) -> None:
        """Return one layer to float."""
        self.integer = [name for name in self.integer if name != layer]
        self.weight_only = [name for name in self.weight_only if name != layer]
        self.unpacked = [name for name in self.unpacked if name != layer]
        self.input_scales.pop(layer, None)
        self.weights.pop(layer, None)
        self.biases.pop(layer, None)

    def record(self) -> dict[str, Any]:
        """Return everything but the graph and the arrays, as JSON values."""
        return {
            "bits": {name: [w.bits, w.group_size] for name, w in self.weights.items()},
            "ranges": {name: [r.low, r.high, r.peak] for name, r in self.ranges.items()},
            "float8": [name for name, weight in self.weights.items() if weight.values.dtype == FLOAT8],
            "kv_scales": {name: list(pair) for name, pair in self.kv_scales.items()},
            **{name: getattr(self, name) for name in _JSON_FIELDS},
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the integer weights, scales, zero points and biases by name."""
        arrays = {f"{name}|bias": bias for name, bias in self.biases.items()}
        for name, weight in self.weights.items():
            values = weight.values.view(np.uint8) if weight.values.dtype == FLOAT8 else weight.values
            arrays |= {f"{name}|values": values, f"{name}|scales": weight.scales}
            if weight.zero_points is not None:
                arrays[f"{name}|zero_points"] = weight.zero_points
            if weight.offsets is not None:
                arrays[f"{name}|offsets"] = weight.offsets
            arrays |= {f"{name}|stored|{part}": array for part, array in weight.stored.items()}
        return arrays


_JSON_FIELDS = (
    "integer",
    "weight_only",
    "unpacked",
    "input_scales",
    "placement",
    "attention",
    "leave_out",
    "dynamic",
    "half",
    "half_kept",
    "kv_cache",
    "timed_for",
    "untimed_placement",
)
"""Fields that are JSON values as they are."""


def restore_state(model: ir.Model, record: dict[str, Any], arrays: dict[str, np.ndarray]) -> GraphState:
    """Rebuild the state of `model` from its `record()` and `arrays()`."""
    weights = {}
    for name, (bits, group) in record["bits"].items():
        values = arrays[f"{name}|values"]
        if name in record["float8"]:  # files of arrays have no such type
            values = values.view(FLOAT8)
        zero_points = arrays.get(f"{name}|zero_points")
        offsets, prefix = arrays.get(f"{name}|offsets"), f"{name}|stored|"
        stored = {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
        weights[name] = QuantizedWeight(values, arrays[f"{name}|scales"], zero_points, bits, group, offsets, stored)
    return GraphState(
        model,
        weights=weights,
        biases={key.removesuffix("|bias"): value for key, value in arrays.items() if key.endswith("|bias")},
        ranges={name: Range(*span) for name, span in record["ranges"].items()},
        kv_scales={name: (keys, values) for name, (keys, values) in record["kv_scales"].items()},
        **{name: record[name] for name in _JSON_FIELDS},
    )
