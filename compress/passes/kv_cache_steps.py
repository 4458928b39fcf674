"""The steps of the `kv_cache` pass: what attention is computed from, seen where it is computed.

That is after norms and positions were put into the keys, as a cache holds them; a projection's output shows neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compress.blocks.sharing import gathered
from compress.blocks.step import BlockStep
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.blocks.trace import removed_after
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.passes.blockwork import full_name
from compress.passes.kv_cache import attentions
from compress.quantize.state import LARGEST_FLOAT8

if TYPE_CHECKING:
    from compress.passes.kv_cache import KvCache

LEVELS = {"int8": 127.0, "fp8": LARGEST_FLOAT8}


def apply_kv_cache(knobs: KvCache, model: StreamedModel, context: PassContext) -> PassResult:
    """Record two scales for each attention of a streamed model. Raises PassError naming it."""
    stream = Stream(model, context)
    for step in stream:
        found = attentions(step.readings)
        if not found:
            continue
        peaks = {name: _Peaks() for name in found}
        with _watched(step, peaks):
            step.collect(lambda reading, rows: None, list(found.values()))
        for name, seen in peaks.items():
            keys, values = (_peak(name, part) for part in (seen.keys, seen.values))
            step.put_kv(name, keys / LEVELS[knobs.scheme], values / LEVELS[knobs.scheme])
            step.say(measured={name: {"key_peak": keys, "value_peak": values}})
    result = stream.result()
    return replace(result, model=replace(result.model, kv_cache=knobs.scheme))


class _Peaks:
    """The largest magnitudes of one attention's keys and values."""

    def __init__(self) -> None:
        self.keys = self.values = 0.0
        self.products: list[Tensor] = []

    def see(self, keys: Tensor, values: Tensor) -> None:
        self.keys = max(self.keys, float(keys.abs().max()))
        self.values = max(self.values, float(values.abs().max()))

    def close(self) -> None:
        """The end of one call: two products of four dimensions are attention written out, q k^T and p v."""
        if len(self.products) == 2:
            self.see(*self.products)
        self.products = []


def _peak(name: str, mine: float) -> float:
    """Over all processes. PassError if there is none."""
    peak = max(gathered(mine))
    if not math.isfinite(peak):
        raise PassError(f"kv_cache: {name}: NaN or Inf among its keys or values on the calibration data")
    if peak == 0.0:
        raise PassError(
            f"kv_cache: {name}: no keys and values were seen; its attention is neither scaled_dot_product_attention "
            "nor two matrix products"
        )
    return peak


class _Watch(TorchFunctionMode):
    """Tells the attention that is running what it computes with."""

    def __init__(self, running: list[_Peaks]) -> None:
        super().__init__()
        self.running = running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.running:
            if func is torch.nn.functional.scaled_dot_product_attention:
                keys, values = (args[i] if len(args) > i else kwargs[name] for i, name in ((1, "key"), (2, "value")))
                self.running[-1].see(keys, values)
            elif func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and args[1].dim() == 4:
                self.running[-1].products.append(args[1])
        return func(*args, **kwargs)


@contextmanager
def _watched(step: BlockStep, peaks: dict[str, _Peaks]) -> Iterator[None]:
    running: list[_Peaks] = []
    modules = {full_name(step, path): module for path, module in step.block.named_modules()}
    handles = []
    for name, seen in peaks.items():
        handles += [
            modules[name].register_forward_pre_hook(_entering(running, seen)),
            *(
                modules[layer].register_forward_pre_hook(_leaving(running))
                for layer in attentions(step.readings)[name].layers
            ),
        ]
    with removed_after(handles), _Watch(running):
        yield


def _entering(running: list[_Peaks], seen: _Peaks) -> Callable[..., None]:
    return lambda module, args: running.append(seen)


def _leaving(running: list[_Peaks]) -> Callable[..., None]:
    """Before the layer that reads the weighted sums: attention is over."""

    def hook(module: nn.Module, args: Any) -> None:
        if running:
            running.pop().close()

    return hook
