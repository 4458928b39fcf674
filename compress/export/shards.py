"""Safetensors shards written tensor by tensor: a shard is never in memory, and a file appears only when it is whole."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compress.errors import ExportError

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""torch's types -> the names that a safetensors header has for them."""
TYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ShardUnit:
    """Tensors that are made together and lie in one file: `make` gives all of `entries`, by name."""

    entries: tuple[Entry, ...]
    make: Callable[[], Mapping[str, Tensor]]

    @property
    def n_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.entries)


def write_shards(folder: Path, units: Sequence[ShardUnit], max_bytes: int) -> tuple[Path, ...]:
    """Write `model.safetensors`, or shards of at most `max_bytes` (a larger unit: one of its own) and their index.

    Peak memory is one unit's tensors. A file has a temporary name until all of it is on disk. Same in, same bytes.
    Raises ExportError where `make` gives another shape or type than its entries say.
    """
    shards: list[list[ShardUnit]] = [[]]
    size = 0
    for unit in units:
        if shards[-1] and size + unit.n_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(unit)
        size += unit.n_bytes
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    names = ["model.safetensors"] if len(shards) == 1 else names
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard)
    if len(shards) > 1:
        weight_map = {e.name: name for name, shard in zip(names, shards, strict=True) for u in shard for e in u.entries}
        index = {"metadata": {"total_size": sum(unit.n_bytes for unit in units)}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return tuple(folder / name for name in names)


def _write_shard(path: Path, units: Sequence[ShardUnit]) -> None:
    """Write one shard: units are made in their order, their tensors written where the layout has them.

    Wide types lie first, so that every tensor is aligned to its type without gaps, which the format forbids.
    """
    entries = [entry for unit in units for entry in unit.entries]
    starts, end = {}, 0
    for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):
        starts[entry.name] = end
        end += entry.n_bytes
    head = _make_header(entries, starts)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(head)
        for unit in units:
            made = unit.make()
            for entry in unit.entries:
                file.seek(len(head) + starts[entry.name])
                file.write(_to_bytes(entry, made[entry.name]))
        file.truncate(len(head) + end)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _make_header(entries: Sequence[Entry], starts: Mapping[str, int]) -> bytes:
    """Return the header: its length (8 bytes), JSON, spaces up to a multiple of 8.

    Source: https://huggingface.co/docs/safetensors
    """
    record: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for entry in sorted(entries, key=lambda entry: starts[entry.name]):
        offsets = [starts[entry.name], starts[entry.name] + entry.n_bytes]
        record[entry.name] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(record, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _to_bytes(entry: Entry, tensor: Tensor) -> bytes | memoryview:
    if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
        raise ExportError(
            f"'{entry.name}' is {tensor.dtype} {list(tensor.shape)} where the model and the recipe make it "
            f"{entry.dtype} {list(entry.shape)}; the compressed weights are damaged: run the passes again"
        )
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
