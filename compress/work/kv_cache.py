"""The work of the `kv_cache` pass: the largest keys and values that attention is computed from give the scales."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import numpy as np
from torch import Tensor

from compress.blocks.activations import running_rows
from compress.blocks.block import BlockWork
from compress.blocks.engine_arithmetic import exchange_keys_and_values
from compress.blocks.sharing import gather_from_processes
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.passes.kv_cache import KvCache, attentions
from compress.rounding.state import LARGEST_FLOAT8
from compress.work.block_layers import full_name

LEVELS = {"int8": 127.0, "fp8": LARGEST_FLOAT8}


def apply_kv_cache(config: KvCache, model: StreamedModel, context: PassContext) -> PassResult[StreamedModel]:
    """Record two scales for each attention of a streamed model. Raises PassError naming it."""
    stream = Stream(model, context)
    for block in stream:
        input_groups = attentions(block.input_groups)
        if not input_groups:
            continue
        peaks = {name: _Peaks() for name in input_groups}
        with _watch_attention(block, peaks):
            block.collect(lambda input_group, rows: None, list(input_groups.values()))
        for name, seen in peaks.items():
            keys, values = (_combine_peaks(name, seen.of[kind]) for kind in ("key", "value"))
            block.put_kv(name, keys / LEVELS[config.scheme], values / LEVELS[config.scheme])
            block.say(measured={name: {"key_peak": keys, "value_peak": values}})
    result = stream.result()
    return replace(result, model=replace(result.model, kv_cache=config.scheme))


class _Peaks:
    """The largest magnitudes of one attention's keys and values."""

    def __init__(self) -> None:
        self.of = {"key": 0.0, "value": 0.0}

    def see(self, kind: Literal["key", "value"], x: Tensor) -> Tensor:
        seen = drop_padding(x).abs()
        peak = float(seen.max()) if seen.numel() else 0.0
        self.of[kind] = float(np.maximum(self.of[kind], peak))  # Python's max() would drop a NaN
        return x


def drop_padding(x: Tensor) -> Tensor:
    """Return the tokens of keys or values [B, heads, T, size], those of the running batch's padding left out."""
    rows = running_rows()
    if rows is None or x.dim() != 4 or (len(x), x.shape[2]) != rows.shape:
        return x
    return x.transpose(1, 2)[rows]  # [tokens, heads, size]


def _combine_peaks(name: str, mine: float) -> float:
    """Return the largest magnitude over all processes. PassError if there is none."""
    peak = max(gather_from_processes(mine))
    if not math.isfinite(peak):
        raise PassError(f"kv_cache: {name}: NaN or Inf among its keys or values on the calibration data")
    if peak == 0.0:
        raise PassError(f"kv_cache: {name}: no keys and values other than zero were seen on the calibration data")
    return peak


@contextmanager
def _watch_attention(block: BlockWork, peaks: dict[str, _Peaks]) -> Iterator[None]:
    """Make the attention modules tell their peaks what they compute with while the context is open."""
    modules = {full_name(block, path): module for path, module in block.module.named_modules()}
    for name, seen in peaks.items():
        exchange_keys_and_values(modules[name], name, seen.see)
    try:
        yield
    finally:
        for name in peaks:
            del modules[name].forward
