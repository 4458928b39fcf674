"""The precision in which large products are computed; passes name it without torch, which is imported by its use."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Literal

Compute = Literal["float32", "bfloat16"]
ROWS = 512
"""Of a product that comes out in bfloat16 at once: of 4,096 rows and 8,960 outputs, as Qwen2.5-Coder 1.5B has them, an
EPYC gives 330 GFLOP/s so, and 230 where all of it is made float32 afterwards."""


def multiply(left: Any, right: Any, compute: Compute) -> Any:
    """Return the product [n, m], float32, of matrices [n, k] and [k, m], whose factors are rounded to `compute`.

    They are float32, or what `prepare` made of that. Where sums are rounded, too, that adds a fifth to the error of the
    factors (0.29 % of the product beside 0.24 %, k = 4,864).
    """
    if not rounds_sums(compute, left.device.type):
        with products_in(compute):
            return left @ right
    import torch

    product = torch.empty(len(left), right.shape[1])
    for place, part in _multiply_in_parts(left, right, compute):
        product[place] = part
    return product


def add_product(total: Any, left: Any, right: Any, compute: Compute) -> None:
    """Add to `total` [n, m], float32, in place, what `multiply` returns."""
    if not rounds_sums(compute, left.device.type):
        with products_in(compute):
            total.addmm_(left, right)
        return
    for place, part in _multiply_in_parts(left, right, compute):
        total[place] += part


def prepare(factor: Any, compute: Compute) -> Any:
    """Return a float32 matrix in the type in which products multiply it."""
    return factor.bfloat16() if rounds_sums(compute, factor.device.type) else factor


def rounds_sums(compute: Compute, device: str) -> bool:
    """Return whether products come out in bfloat16, as an EPYC's AVX-512 gives them, and not with sums of float32."""
    return compute != "float32" and device == "cpu" and not _cpu_keeps_sums()


def _multiply_in_parts(left: Any, right: Any, compute: Compute) -> Iterator[tuple[slice, Any]]:
    right = prepare(right, compute)
    for start in range(0, len(left), ROWS):
        place = slice(start, start + ROWS)
        yield place, prepare(left[place], compute) @ right


@functools.cache
def _cpu_keeps_sums() -> bool:
    """Return whether this processor heeds `products_in`; one without AMX multiplies in float32 all the same."""
    import torch

    factor = torch.full((256, 256), 1 + 2**-12)  # 1 in bfloat16
    with products_in("bfloat16"):
        return float((factor @ factor)[0, 0]) == len(factor)


@contextlib.contextmanager
def products_in(compute: Compute) -> Iterator[None]:
    """Let products of float32 matrices round what they multiply to `compute` while open; sums stay float32.

    On GPUs, whose float32 units know no bfloat16, that is TF32.
    """
    import torch

    if compute == "float32":
        yield
        return
    on_cpu: Any = torch.backends.mkldnn  # its types lack `matmul`
    backends = ((on_cpu.matmul, "bf16"), (torch.backends.cuda.matmul, "tf32"))
    before = [backend.fp32_precision for backend, _ in backends]
    try:
        for backend, precision in backends:
            backend.fp32_precision = precision
        yield
    finally:
        for (backend, _), precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
