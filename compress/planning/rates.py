"""What this machine does in a second, measured as a plan is made: each rate in milliseconds, only those asked for.

A forecast counts work (products, weights, bytes); these say how fast such work goes here, on the threads that the run
will have. Where a pass's own arithmetic is more than products, that arithmetic is timed itself, on a small weight, with
the bits and groups of the recipe: no constant of another machine stands for it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from compress.blocks import heap
from compress.blocks.activations import ROWS
from compress.blocks.store import Stored, WeightStore
from compress.formats.schemes import SUPER_BLOCK, WeightScheme
from compress.quantize.autoround import autoround_block
from compress.quantize.gptq import BLOCK, Rules, invert_hessian
from compress.quantize.gram import Compute, Gram
from compress.quantize.grid import CHUNK, fit_grid, round_to_grid
from compress.quantize.hqq import hqq_round
from compress.quantize.learn import RoundingCourse
from compress.quantize.lessons import BlockLesson, Together
from compress.quantize.weights import gptq_round_weights, round_weight
from runtime.decode.scoring import REDUCED_AT_ONCE, reduce_sample
from runtime.measure.benchmark import USUAL
from runtime.processes.isolated import start_python

SIDE = 1024
"""Rows and columns of the matrices whose product is timed."""
TIMED_ROWS, TIMED_INPUTS = 256, 512
"""Of the weight on which rounding is timed; of GPTQ's loops a wide and a narrow one tell columns from rows."""
COMPARED = 1 << 15
"""Logits of a token that are compared, at most."""
PIECE_BYTES = 8 << 20
"""Of what is copied, hashed and written."""
TRACED = 50
"""Operators whose shapes are computed, to time one."""
LARGE_BYTES = 64 << 20
"""Of a tensor that no cache holds."""
START_SECONDS = 20.0
"""The most that a process takes to begin: one that is older (a notebook's) has done other things."""


@dataclass(frozen=True)
class Columns:
    """What GPTQ's loops take beside their products: seconds for each column, and for each weight."""

    a_column: float
    a_weight: float

    def seconds(self, inputs: int, outputs: int) -> float:
        """Return the seconds for one weight [outputs, inputs]."""
        return inputs * self.a_column + inputs * outputs * self.a_weight


class Rates:
    """The rates of this machine; measured when they are first asked for.

    `folder`: on the disk that is written to. `width`: inputs of the timed products, the model's own up to SIDE.
    """

    def __init__(self, folder: Path | None = None, width: int = SIDE) -> None:
        self._folder, self._width = folder, min(max(width, BLOCK), SIDE)

    @property
    def threads(self) -> int:
        """Return how many threads the rates are those of."""
        return torch.get_num_threads()

    def product(self, compute: Compute) -> float:
        """Return FLOP/s of a matrix product in torch in that type, summed as passes sum it."""
        return self._bfloat16 if compute == "bfloat16" else self._float32

    @cached_property
    def _float32(self) -> float:
        return _time_product(torch.float32, self._width)

    @cached_property
    def _bfloat16(self) -> float:
        return _time_product(torch.bfloat16, self._width)

    def update(self, compute: Compute) -> float:
        """Return FLOP/s of products with few inputs, a block of columns, that are taken off a large matrix."""
        return self._update_bfloat16 if compute == "bfloat16" else self._update_float32

    @cached_property
    def _update_float32(self) -> float:
        return _time_update(torch.float32)

    @cached_property
    def _update_bfloat16(self) -> float:
        return _time_update(torch.bfloat16)

    @cached_property
    def touch(self) -> float:
        """Return bytes/s, read and written, of an operation on each number of a large tensor that gives a new one."""
        values = torch.ones(LARGE_BYTES // 4)
        return 2 * LARGE_BYTES / _time_mean(lambda: values * 1.5, 1)

    def pass_over(self, n_bytes: int) -> float:
        """Return bytes/s as `touch` does, of tensors of this size: small ones stay in a cache and need no new pages."""
        return self.touch if n_bytes >= heap.LARGE else self._touch_small

    @cached_property
    def _touch_small(self) -> float:
        values = torch.ones(heap.LARGE // 8)
        return heap.LARGE / _time_mean(lambda: values * 1.5, 8)

    def attend(self, heads: int, head_size: int, tokens: int) -> float:
        """Return the seconds of fused attention between the tokens of one text."""
        return _time_attention(heads, head_size, tokens)

    @cached_property
    def scan(self) -> float:
        """Return bytes/s that are read from memory, as a decoder reads its weights for each token."""
        values = torch.ones(LARGE_BYTES // 4)
        return LARGE_BYTES / _time_mean(values.sum, 1)

    @cached_property
    def read(self) -> float:
        """Return weights/s that a stream reads from a file that the page cache holds, bfloat16 into float32."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            path = Path(folder) / "weights.safetensors"
            save_file({"w": torch.ones(PIECE_BYTES // SIDE, SIDE, dtype=torch.bfloat16)}, path)
            store = WeightStore({"w": Stored(path, "w")})
            return PIECE_BYTES / _time_mean(lambda: store.read("w"), 2)

    @cached_property
    def hash(self) -> float:
        """Return bytes/s of sha256 on one thread."""
        data = bytes(PIECE_BYTES)
        return PIECE_BYTES / _time_mean(lambda: hashlib.sha256(data).digest(), 2)

    def compare(self, width: int) -> float:
        """Return logits/s at which a float and a compressed model's are compared, of so many for each token."""
        return _time_comparing(min(width, COMPARED))

    @cached_property
    def write(self) -> float:
        """Return bytes/s that reach the disk, waited for; those that reach memory where nothing can be written."""
        data = np.random.default_rng(0).bytes(PIECE_BYTES)

        def work() -> None:
            with tempfile.NamedTemporaryFile(dir=self._folder) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        with suppress(OSError):
            return PIECE_BYTES / _time_mean(work, 2)
        return self.touch

    @cached_property
    def start(self) -> float:
        """Return the seconds from this process's start to here, which a run's process takes, too: imports and plan."""
        return min(_find_age(), START_SECONDS)

    def mark_start(self) -> None:
        """Let `start` end here."""
        _ = self.start

    @cached_property
    def trace(self) -> float:
        """Return the seconds of one operator that computes shapes alone, as an exporter traces a model with."""
        with FakeTensorMode():
            x = torch.ones(2, 3)

            def work() -> None:
                for _ in range(TRACED):
                    torch.add(x, x)

            return _time_mean(work, 2) / TRACED

    def process(self, backend: str = USUAL) -> tuple[float, int]:
        """Return what a fresh process that imports a backend takes: seconds, and the most bytes that it holds."""
        return _time_process(backend)

    def round(self, scheme: WeightScheme, weighted: bool = False, every: int = 1) -> float:
        """Return weights/s of the search for scales and rounding to them; `every`: of `fit_grid`, without rounding."""
        return _time_rounding(scheme, weighted, every)

    def solve_hqq(self, scheme: WeightScheme, steps: int) -> float:
        """Return weights/s of HQQ's solver."""
        return _time_hqq(scheme, steps)

    @cached_property
    def invert(self) -> float:
        """Return cubed inputs a second of factoring and inverting a Hessian [inputs, inputs]."""
        x = torch.randn(2 * SIDE, SIDE)
        gram = x.T @ x / len(x)
        return float(SIDE**3 / _time_mean(lambda: invert_hessian(gram, 0.01), 1))

    def columns(self, scheme: WeightScheme, rules: Rules) -> Columns:
        """Return what GPTQ's loops (and the descent after them) take beside their products."""
        found = _time_columns(scheme, rules)
        products = (1 + 2 * (rules.sweeps or 0)) * TIMED_INPUTS / self.update(rules.compute)
        return replace(found, a_weight=max(found.a_weight - products, 0.0))

    def learn(self, scheme: WeightScheme) -> float:
        """Return weights/s of a step of learned rounding, its products left out: fake rounding, gradients, update."""
        return _time_learning(scheme)


@lru_cache(maxsize=8)
def _time_process(backend: str) -> tuple[float, int]:
    code = f"from runtime.backends import BACKENDS; BACKENDS[{backend!r}].library()"
    start = time.perf_counter()
    done = start_python(f"{code}; from runtime.measure import probe; print(probe.peak_memory_bytes())")
    return time.perf_counter() - start, int(done.stdout or 0)


@lru_cache(maxsize=8)
def _time_product(dtype: torch.dtype, width: int) -> float:
    rows, weight = torch.randn(ROWS, width).to(dtype), torch.randn(width, width).to(dtype)
    return 2 * ROWS * width**2 / _time_mean(lambda: nn.functional.linear(rows, weight), 2)


@lru_cache(maxsize=8)
def _time_attention(heads: int, head_size: int, tokens: int) -> float:
    x, mask = torch.randn(1, heads, tokens, head_size), torch.zeros(1, 1, tokens, tokens)
    with torch.inference_mode():
        return _time_mean(lambda: nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask), 2)


@lru_cache(maxsize=8)
def _time_comparing(width: int) -> float:
    rows = REDUCED_AT_ONCE // width
    pair = [np.random.default_rng(n).standard_normal((rows, width), np.float32) for n in (0, 1)]
    return pair[0].size / _time_mean(lambda: reduce_sample(pair, np.zeros(rows, np.int64)), 1)


def _time_update(dtype: torch.dtype) -> float:
    """Time what GPTQ's loop does once for each block of columns: errors into all that is left."""
    left, factor, errors = torch.randn(SIDE, SIDE), torch.randn(BLOCK, SIDE), torch.randn(BLOCK, SIDE)

    def work() -> None:
        left.sub_(factor.to(dtype).T @ errors.to(dtype), alpha=1e-6)

    return 2 * BLOCK * SIDE**2 / _time_mean(work, 2)


@lru_cache(maxsize=32)
def _time_rounding(scheme: WeightScheme, weighted: bool, every: int) -> float:
    weight = _make_weight(TIMED_ROWS, scheme)
    importance = torch.rand(weight.shape[1]) if weighted else None
    if every > 1:
        return weight.numel() / _time_mean(lambda: fit_grid(weight, scheme, importance, every=every), 2)
    return weight.numel() / _time_mean(lambda: round_weight(weight, scheme, importance), 2)


@lru_cache(maxsize=32)
def _time_hqq(scheme: WeightScheme, steps: int) -> float:
    weight = _make_weight(CHUNK // TIMED_INPUTS, scheme)  # what is worked on at once: less says 20 % too slow
    return weight.numel() / _time_mean(lambda: hqq_round(weight, scheme, steps=steps), 1)


@lru_cache(maxsize=32)
def _time_columns(scheme: WeightScheme, rules: Rules) -> Columns:
    """Time a narrow and a wide weight: both have as many columns, so that the difference is that of the rows."""
    few, many = TIMED_ROWS, 6 * TIMED_ROWS
    weights = {rows: _make_weight(rows, scheme) for rows in (few, many)}
    inputs = weights[few].shape[1]
    x = torch.randn(2 * inputs, inputs)
    gram = Gram(inputs)
    gram.add(x)
    hessian = invert_hessian(gram.mean()[0], 0.01)
    times = {
        rows: _time_mean(lambda w=weight: gptq_round_weights([w], hessian, scheme, rules), 1)  # type: ignore[misc]
        for rows, weight in weights.items()
    }
    a_weight = max(times[many] - times[few], 0.0) / ((many - few) * inputs)
    return Columns(max(times[few] / inputs - few * a_weight, 0.0), a_weight)


@lru_cache(maxsize=32)
def _time_learning(scheme: WeightScheme) -> float:
    weight = _make_weight(4 * TIMED_ROWS, scheme)
    layer = nn.Linear(weight.shape[1], len(weight), bias=False)
    start = round_to_grid(weight, scheme)
    x, wanted = torch.randn(8, weight.shape[1]), torch.zeros(8, len(weight))
    lesson = BlockLesson(lambda: layer(x), lambda: wanted, None, len(x))

    def work(steps: int) -> None:
        course = RoundingCourse(steps, 0.1, 0.1, method="sign", seed=0)
        autoround_block(
            {"layer": layer},
            {"layer": start},
            [Together([lesson])],
            course,
            floats={"layer": weight},
            schemes={"layer": scheme},
        )

    short, long = (_time_mean(lambda n=n: work(n), 2) for n in (1, 4))  # type: ignore[misc]
    return 3 * weight.numel() / max(long - short, 1e-6)


def _make_weight(rows: int, scheme: WeightScheme, inputs: int = TIMED_INPUTS) -> Tensor:
    """Return a random weight with whole groups of the scheme."""
    size = SUPER_BLOCK if scheme.scales == "six-bit" else scheme.group_size if scheme.group_size > 0 else 1
    return torch.randn(rows, -(-inputs // size) * size, generator=torch.Generator().manual_seed(0))


def _find_age() -> float:
    """Return the seconds since this process began; those that it has computed where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.process_time()


def _time_mean(work: Callable[[], object], n: int) -> float:
    """Return the mean seconds of `n` calls after a first one: what others do on the machine slows the run, too."""
    work()
    return sum(time_call(work) for _ in range(n)) / n


def time_call(work: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-6)
