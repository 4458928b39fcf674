"""The precision in which large products are computed; passes name it without torch, which is imported by its use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

Compute = Literal["float32", "bfloat16"]


@contextlib.contextmanager
def products_in(compute: Compute) -> Iterator[None]:
    """Let products of float32 matrices round what they multiply to `compute` while open; sums stay float32.

    On GPUs, whose float32 units know no bfloat16, that is TF32. Where products come out in bfloat16, as of autocast,
    X^T X loses what makes it positive: of Qwen2.5-Coder 0.5B, 19 layers needed 10 to 100 times the damping.
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
