"""What this machine can do at most, measured through the same runtime: products in float and int8, and reading memory.

A layer cannot be faster than the larger of two times: its operations at the rate of a large product, and its bytes at
the rate at which memory is read (the roofline model, Williams, Waterman and Patterson, CACM 52(4), 2009).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from runtime.backends import Feeds, find_backend, open_model
from runtime.clock.graphs import Node, write_model
from runtime.clock.turns import Call, make_call, time_in_turns
from runtime.errors import RuntimeFailure

ROWS, WIDTH = 128, 1024
"""Of the large product."""
CALLS = 30
BUDGET_S = 1.0
"""Calls of each product, and the seconds after which no more are made."""
READER = "onnxruntime-cpu"
LEAST_READ, MOST_READ = 1 << 20, 1 << 26
"""Bytes of the matrix whose reading is timed: as many as the model has weights, within these."""
MOST_WEIGHT_BYTES = 1 << 27
"""Of a product: one of more outputs is timed with fewer, for it takes as much longer. To make the whole output layer of
Qwen2.5-Coder 0.5B took 2 GiB of memory and 21 s."""


@dataclass(frozen=True)
class Product:
    """A matrix product alone: `rows` vectors of `inputs` numbers by a weight [inputs, outputs].

    `numbers`: "float32"; "uint8" or "int8", which is the type of the vectors, by int8 weights; or "bits", which is
    MatMulNBits with `bits`, `block` and `level` (its accuracy_level).
    """

    rows: int
    inputs: int
    outputs: int
    numbers: str = "float32"
    bits: int = 4
    block: int = 32
    level: int = 0

    @property
    def flops(self) -> int:
        """Return multiplications and additions."""
        return 2 * self.rows * self.inputs * self.outputs

    def shrink(self) -> Product:
        """Return the product with no more outputs than MOST_WEIGHT_BYTES have."""
        bits = {"float32": 32, "bits": self.bits}.get(self.numbers, 8)
        return replace(self, outputs=min(self.outputs, max(1, 8 * MOST_WEIGHT_BYTES // (bits * self.inputs))))


@dataclass(frozen=True)
class Peaks:
    """The rates of one machine, runtime and number of threads; 0 where the runtime computes no such product."""

    gflops: Mapping[str, float]
    """Of large products, billions a second: float32, uint8 and int8 (the vectors' type; weights are int8 in both)."""
    gb_per_s: float
    """Of reading a matrix of `read_bytes`."""
    read_bytes: int = MOST_READ

    def rate(self, numbers: str) -> float:
        """Return the peak for what multiplies in these numbers; other float types count as float32."""
        return self.gflops.get(numbers) or self.gflops.get("float32", 0.0)

    @property
    def int8_gain(self) -> float:
        """Return how many times as fast as float32 a large product of unsigned int8 is."""
        return self.gflops["uint8"] / self.gflops["float32"] if self.gflops.get("float32") else 0.0


def measure_peaks(backend: str, threads: int, n_bytes: int) -> Peaks:
    """Measure the peaks, in about a second, once in a process. `n_bytes`: of a model's weights.

    Weights that fit into a cache are read faster than others; so as much is read as the model does, rounded up to a
    power of two.
    """
    read = min(MOST_READ, max(LEAST_READ, 1 << max(0, n_bytes - 1).bit_length()))
    return Peaks(_measure_rates(backend, threads), _measure_reading(threads, read), read)


@cache
def _measure_rates(backend: str, threads: int) -> Mapping[str, float]:
    products = {numbers: Product(ROWS, WIDTH, WIDTH, numbers) for numbers in ("float32", "uint8", "int8")}
    times = time_products(backend, threads, list(products.values()))
    return {n: p.flops / ms / 1e6 if ms else 0.0 for (n, p), ms in zip(products.items(), times, strict=True)}


@cache
def _measure_reading(threads: int, n_bytes: int) -> float:
    """Return GB/s. By ONNX Runtime, whichever backend is asked about: it reads a matrix as it is given."""
    (seconds,) = _time(READER, threads, [_make_reader(n_bytes // (4 * WIDTH), WIDTH)])
    return n_bytes / seconds / 1e9 if seconds else 0.0


def time_products(backend: str, threads: int, products: Sequence[Product]) -> list[float | None]:
    """Return the milliseconds of each product alone, timed in turn; None for those that the runtime does not run."""
    make = _make_product if backend == READER else _make_qdq_product
    timed = [product.shrink() for product in products]
    seconds = _time(backend, threads, [make(product) for product in timed])
    return [
        None if value is None else 1000 * value * product.outputs / shrunk.outputs
        for value, product, shrunk in zip(seconds, products, timed, strict=True)
    ]


Trial = tuple[bytes, Feeds]


def _time(backend: str, threads: int, trials: Sequence[Trial]) -> list[float | None]:
    """Return the seconds of a quick call of each."""
    found: list[float | None] = [None] * len(trials)
    runs: list[tuple[int, Call]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peaks.")))
        for number, (content, feeds) in enumerate(trials):
            path = folder / f"{number}.onnx"
            path.write_bytes(content)
            try:
                session = open_model(find_backend(backend), path, threads, {})
                stack.callback(session.close)
                session.run(feeds)
            except RuntimeFailure:  # no kernel for it here
                continue
            runs.append((number, make_call(session, [feeds])))
        if runs:
            turns = time_in_turns([call for _, call in runs], CALLS, budget_s=BUDGET_S, one_thread=threads == 1)
            for (number, _), row in zip(runs, turns.seconds, strict=True):
                found[number] = float(row.min())  # other work only slows calls down, and this is of what can be
    return found


def _make_product(product: Product) -> Trial:
    rng = np.random.default_rng(0)
    rows, k, n = product.rows, product.inputs, product.outputs
    if product.numbers in ("uint8", "int8"):
        x = rng.integers(0, 100, (rows, k)).astype(product.numbers)
        integers = rng.integers(-100, 100, (k, n)).astype(np.int8)
        return _wrap([("MatMulInteger", ["x", "w"], ["y"], {})], {"w": integers}, x, "int32", (rows, n))
    x = rng.standard_normal((rows, k), np.float32)
    if product.numbers == "bits":
        blocks = -(-k // product.block)
        packed = rng.integers(0, 255, (n, blocks, product.block * product.bits // 8), np.uint8)
        blockwise: dict[str, np.ndarray] = {"w": packed, "s": np.full(n * blocks, 0.01, np.float32)}
        attributes = {"K": k, "N": n, "bits": product.bits, "block_size": product.block}
        node: Node = (
            "com.microsoft.MatMulNBits",
            ["x", "w", "s"],
            ["y"],
            attributes | {"accuracy_level": product.level},
        )
        return _wrap([node], blockwise, x, "float32", (rows, n))
    weight = rng.standard_normal((k, n), np.float32)
    return _wrap([("MatMul", ["x", "w"], ["y"], {})], {"w": weight}, x, "float32", (rows, n))


def _make_qdq_product(product: Product) -> Trial:
    """Make a product in eight bits as files have it, for a runtime without kernels for the integer operators."""
    if product.numbers not in ("uint8", "int8"):
        return _make_product(product)
    rng = np.random.default_rng(0)
    constants: dict[str, np.ndarray] = {
        "w": rng.integers(-100, 100, (product.inputs, product.outputs)).astype(np.int8),
        "s": np.full((), 0.02, np.float32),
        "z": np.zeros((), product.numbers),
        "wz": np.zeros((), np.int8),
    }
    nodes: list[Node] = [
        ("QuantizeLinear", ["x", "s", "z"], ["q"], {}),
        ("DequantizeLinear", ["q", "s", "z"], ["a"], {}),
        ("DequantizeLinear", ["w", "s", "wz"], ["b"], {}),
        ("MatMul", ["a", "b"], ["y"], {}),
    ]
    x = rng.random((product.rows, product.inputs), np.float32)
    return _wrap(nodes, constants, x, "float32", (product.rows, product.outputs))


def _wrap(
    nodes: Sequence[Node], constants: Mapping[str, np.ndarray], x: np.ndarray, dtype: str, shape: tuple[int, ...]
) -> Trial:
    return write_model(nodes, constants, {"x": (x.dtype.name, x.shape)}, {"y": (dtype, shape)}), {"x": x}


def _make_reader(rows: int, width: int) -> Trial:
    """Make a product of one vector and a matrix that is an input, which no runtime packs beforehand."""
    feeds = {"x": np.ones((1, rows), np.float32), "w": np.ones((rows, width), np.float32)}
    inputs = {name: ("float32", values.shape) for name, values in feeds.items()}
    return write_model([("MatMul", ["x", "w"], ["y"], {})], {}, inputs, {"y": ("float32", (1, width))}), feeds
