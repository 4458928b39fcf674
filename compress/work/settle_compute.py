"""How this machine multiplies large matrices sooner: `compute: auto`'s precision, and in float32 the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch
from torch.nn import functional as F

from compress.blocks.activations import count_rows
from compress.blocks.sharing import from_main
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext
from compress.facts import Note
from compress.passes.calibrated import CalibratedWeightPass
from compress.rounding.layer_products import LayersBy, layers_in, multiply_by_onednn
from compress.rounding.products import Compute
from compress.work.block_layers import list_layers
from compress.work.settled import Settled, keep, recall
from runtime.clock.turns import time_in_turns

FILE = "compute.json"
"""In a pass's folder of unfinished work: what was chosen, so that a killed run goes on in it."""
WORTH = 1e12
"""Multiplications of a forward pass of all data, or of all trials, from which on it is asked: some 15 seconds of a
core. Below that the same recipe gives the same bytes on every machine."""
GAIN = 0.7
"""Of the float32 time, that bfloat16 must stay below: 0.5 with AMX or an EPYC's AVX-512 for bfloat16."""
GAIN_OF_LIBRARY = 0.9
"""Of the time by the library that torch takes, that another one's must stay below: on an EPYC 0.75 to
0.85 for the layers of Qwen2.5-Coder 0.5B."""
WIDTH = 1024
"""Of the matrices that are multiplied to see."""
Pass = TypeVar("Pass", bound=CalibratedWeightPass)


def settle_compute(config: Pass, model: StreamedModel, context: PassContext) -> tuple[Pass, Settled]:
    """Return the pass with what its products are computed in, where its recipe leaves that open; else as it is."""
    if config.compute != "auto":
        return config, Settled()
    record = recall(context, FILE) or {"compute": find_faster(count_multiplications(model, context), context.device)}
    compute: Compute | None = record["compute"]
    if compute is None:
        return config, Settled()
    keep(context, FILE, record)
    note = Note("info", f"{config.kind}: compute: {compute}, the sooner here")
    return config.model_copy(update={"compute": compute}), Settled({"compute": compute}, (note,))


def count_multiplications(model: StreamedModel, context: PassContext) -> float:
    """Return those of the model's layers in a forward pass of all data."""
    n_weights = sum(layer.n_weights for layer in list_layers(model) if layer.role != "table")
    return float(count_rows(context.batches) * n_weights)


def find_faster(work: float, device: str) -> Compute | None:
    """Return what this machine multiplies large matrices sooner in; None where `work` multiplications are few."""
    if work < WORTH:
        return None
    factor = torch.ones(WIDTH, WIDTH, device=device)

    def multiply(compute: Compute) -> None:
        with layers_in(compute, device):
            float(F.linear(factor, factor)[0, 0])  # a GPU has done it when the number is there

    ratio = _time_beside(lambda: multiply("float32"), lambda: multiply("bfloat16"))
    chosen: Compute = from_main("bfloat16" if ratio < GAIN else "float32")
    return chosen


@contextmanager
def sooner_layers(work: float, device: str) -> Iterator[None]:
    """Let linear layers of float32 multiply by oneDNN while open, where that is sooner than what torch takes.

    Where `work` multiplications are few, or on another `device` than the CPU, all stays. MKL gives two cores of an EPYC
    150 to 175 GFLOP/s, oneDNN 200 to 210; of square matrices 165 and 185.
    """
    if work < WORTH or device != "cpu":
        yield
        return
    rows, weight = torch.ones(WIDTH // 2, WIDTH), torch.ones(4 * WIDTH, WIDTH)
    try:
        ratio = _time_beside(lambda: F.linear(rows, weight), lambda: multiply_by_onednn(rows, weight, None))
    except (AttributeError, RuntimeError):  # torch's own name, which another build may do without
        ratio = 1.0
    with LayersBy(multiply_by_onednn) if ratio < GAIN_OF_LIBRARY else nullcontext():
        yield


def _time_beside(one: Callable[[], object], other: Callable[[], object]) -> float:
    """Return the time that `other` takes, of `one`'s."""
    calls = [lambda _: one(), lambda _: other()]
    before, after = time_in_turns(calls, 10, budget_s=2.0, one_thread=torch.get_num_threads() == 1).typical_ms
    return after / before
