"""Where the time of a model's call goes: each node that its runtime executed, with what it read, gave, and took.

The graph that is executed is not the file's: nodes were fused, moved to other layouts, or left alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from runtime.backends import Session
from runtime.bundle.onnx_file import Graph

ITEM_BYTES: dict[str, float] = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "uint16": 2,
    "int16": 2,
}
ITEM_BYTES |= {"uint8": 1, "int8": 1, "bool": 1, "float8e4m3fn": 1, "uint4": 0.5, "int4": 0.5}
WEIGHT = {"QLinearConv": 3, "QLinearMatMul": 3, "QGemm": 3}
"""Operator -> which input is its weight; of other products the second."""
CONVOLUTIONS = (
    "Conv",
    "FusedConv",
    "NhwcFusedConv",
    "QLinearConv",
    "ConvInteger",
    "ConvTranspose",
    "QLinearConvTranspose",
)
PRODUCTS = (
    *CONVOLUTIONS,
    *("MatMul", "FusedMatMul", "Gemm", "FusedGemm", "QGemm", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat"),
    *("DynamicQuantizeMatMul", "MatMulNBits", "Convolution", "GroupConvolution", "FullyConnected", "Deconvolution"),
)
"""Operators that multiply by a weight or by each other, in ONNX, ONNX Runtime and OpenVINO."""
INTEGER = ("uint8", "int8")


@dataclass(frozen=True)
class Tensor:
    """What a node reads or gives, as it was in the profiled calls; shape None where the runtime does not say."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    constant: bool = False

    @property
    def size(self) -> int:
        """Return the number of elements; 0 where the shape is not known."""
        return 0 if self.shape is None else math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Return the bytes that it takes."""
        return int(self.size * ITEM_BYTES.get(self.dtype, 4))


@dataclass(frozen=True)
class NodeTime:
    """A node of the executed graph. `ms`: of one call, the mean of the calls that were not disturbed."""

    name: str
    operator: str
    ms: float
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    integers: Mapping[str, int] = field(default_factory=dict)
    """The attributes that are whole numbers."""
    computes_in: str = "float32"
    """The type of what it multiplies: float32, float16, bfloat16, uint8, int8."""
    layer: str = ""
    """Of a product: the layer's name in the file, or the file's node; "" of others."""
    source: str = ""
    """Of a product: the file's node that it came from."""

    @property
    def is_product(self) -> bool:
        """Return whether it is one of PRODUCTS."""
        return self.operator in PRODUCTS

    @property
    def weight(self) -> Tensor | None:
        """Return the constant that a product multiplies by; None where both sides are activations."""
        place = WEIGHT.get(self.operator, 1)
        return self.inputs[place] if self.is_product and len(self.inputs) > place else None

    @property
    def rows(self) -> int:
        """Return how many vectors a matrix product multiplies: batch times tokens; of a convolution its positions."""
        if not self.outputs or self.outputs[0].shape is None or not self.outputs[0].shape:
            return 0
        shape = self.outputs[0].shape
        return self.outputs[0].size // max(1, self.output_width or shape[-1])

    @property
    def output_width(self) -> int:
        """Return a product's output channels or columns; 0 where they are not known."""
        weight = self.weight
        if self.operator == "MatMulNBits":
            return self.integers.get("N", 0)
        if weight is None or not weight.shape:
            return 0
        return weight.shape[0 if self._is_output_first else -1]

    @property
    def input_width(self) -> int:
        """Return a product's input channels or columns; 0 where they are not known."""
        if self.operator == "MatMulNBits":
            return self.integers.get("K", 0)
        weight = self.weight
        if weight is None or not weight.shape or len(weight.shape) < 2:
            return 0
        return weight.shape[1 if self._is_output_first else -2]

    @property
    def _is_output_first(self) -> bool:
        return self.operator in (*CONVOLUTIONS, "Convolution", "FullyConnected") or bool(self.integers.get("transB"))

    @property
    def flops(self) -> int:
        """Return multiplications and additions of a product; 0 of other nodes, or where shapes are not known."""
        weight = self.weight
        if not self.is_product or not self.outputs or weight is None or not self.inputs:
            return 0
        if self.operator == "MatMulNBits":
            return 2 * self.outputs[0].size * self.integers.get("K", 0)
        if weight.shape is None or not weight.shape:
            return 0
        if self.operator == "ConvTranspose":
            return 2 * self.inputs[0].size * math.prod(weight.shape[1:])
        if self.operator in (*CONVOLUTIONS, "Convolution"):
            return 2 * self.outputs[0].size * math.prod(weight.shape[1:])
        first = self.inputs[0].shape
        return 2 * self.outputs[0].size * (first[-1] if first else 0)

    @property
    def n_bytes(self) -> int:
        """Return the bytes that it reads and writes, each tensor once."""
        return sum(tensor.n_bytes for tensor in (*self.inputs, *self.outputs))

    @property
    def gflops(self) -> float:
        """Return billions of operations a second; 0 where they are not known."""
        return self.flops / self.ms / 1e6 if self.ms > 0 else 0.0


@dataclass(frozen=True)
class Profile:
    """One model's executed graph with its times.

    `call_ms`: of a call: its nodes' time, and of a short call (SHORT_MS) also the runtime's own around them.
    """

    backend: str
    nodes: tuple[NodeTime, ...]
    n_calls: int = 0
    call_ms: float = 0.0
    file: Graph = field(default_factory=lambda: Graph((), {}))
    """The graph as the file has it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "call_ms", self.call_ms or self.nodes_ms)

    @cached_property
    def nodes_ms(self) -> float:
        """Return the time of all nodes."""
        return sum(node.ms for node in self.nodes)

    @cached_property
    def products(self) -> tuple[NodeTime, ...]:
        """Return the nodes that multiply, in the order of execution."""
        return tuple(node for node in self.nodes if node.is_product)

    @cached_property
    def n_bytes(self) -> int:
        """Return the bytes of the weights that products read."""
        return sum(w.n_bytes for node in self.products if (w := node.weight) is not None and w.constant)

    def find(self, *operators: str) -> tuple[NodeTime, ...]:
        """Return the nodes of these operators."""
        return tuple(node for node in self.nodes if node.operator in operators)

    @cached_property
    def makers(self) -> dict[str, NodeTime]:
        """Return, by tensor, the executed node that makes it."""
        return {tensor.name: node for node in self.nodes for tensor in node.outputs}

    @cached_property
    def readers(self) -> dict[str, list[NodeTime]]:
        """Return, by tensor, the executed nodes that read it."""
        readers: dict[str, list[NodeTime]] = defaultdict(list)
        for node in self.nodes:
            for tensor in node.inputs:
                readers[tensor.name].append(node)
        return readers


class Profiled(Protocol):
    """A session whose calls are profiled."""

    @property
    def session(self) -> Session: ...

    def after_call(self) -> None:
        """Keep what the runtime says of the last call, where it forgets it with the next."""
        ...

    def read(self, keep: Callable[[int], bool]) -> Profile:
        """End the profile and return it; `keep`: which runs of the graph count, by number."""
        ...


def average_undisturbed(times: Sequence[float]) -> float:
    """Return the mean of the faster half: other work only slows a node down, and hits another one in each call."""
    quick = sorted(times)[: (len(times) + 1) // 2]
    return sum(quick) / len(quick)
