"""A model's tensors, read when they are asked for: from safetensors shards, from memory, from what passes wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from compress.blocks.experts import ExpertPart, take_part
from compress.errors import SourceError
from compress.facts import FLOAT_BYTES
from compress.rounding.grid import finite
from compress.rounding.quantized_weight import QuantizedWeight

VALUES, SCALES, ZERO_POINTS, OFFSETS, STORED = ":values", ":scales", ":zero_points", ":offsets", ":stored:"
"""Endings of a quantized layer's tensors in a file of finished work."""
PIECE_BYTES = 16 << 20
"""Of a tensor that are read from its file at once."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file. `key`: its name there."""

    path: Path
    key: str


@dataclass(frozen=True)
class Sliced:
    """One expert's part of a tensor that holds those of all."""

    path: Path
    key: str
    part: ExpertPart


@dataclass(frozen=True)
class Packed:
    """A quantized layer of a file of finished work. `transposed`: the module holds the weight as [in, out]."""

    path: Path
    layer: str
    bits: int
    group_size: int
    zero_points: bool
    transposed: bool
    offsets: bool = False
    stored: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeldLayer:
    """A quantized layer in memory. `transposed`: as of `Packed`."""

    weight: QuantizedWeight
    transposed: bool


@dataclass(frozen=True)
class Decoded:
    """A weight that a quantized checkpoint holds in few bits. `read`: the floats that it stands for."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


Entry = Stored | Sliced | Packed | HeldLayer | Decoded | Tensor


class WeightStore:
    """Named tensors: parameters and persistent buffers, under the plain names of the model's modules.

    `tied`: parameter -> the one that holds its values, until it gets values of its own. `keep`: held as long as the
    store is (the owner of a temporary folder).
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        tied: Mapping[str, str] | None = None,
        floats: Mapping[str, Entry] | None = None,
        keep: tuple[Any, ...] = (),
    ) -> None:
        self._entries = dict(entries)
        self._floats = dict(entries if floats is None else floats)
        self._tied = {name: owner for name, owner in (tied or {}).items() if name not in self._entries}
        self._keep = keep

    @property
    def tied(self) -> Mapping[str, str]:
        """Return the parameters without values of their own -> the one that holds theirs."""
        return self._tied

    def names(self) -> tuple[str, ...]:
        """Return all names, the tied ones last."""
        return (*self._entries, *self._tied)

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self._tied

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as the module holds it, read from the file's header alone."""
        entry = self._find_entry(name, self._entries)
        if isinstance(entry, Tensor | Decoded):
            return tuple(entry.shape)
        if isinstance(entry, Stored):
            return _read_shape(entry.path, entry.key)
        if isinstance(entry, Sliced):
            return tuple(take_part(torch.empty(_read_shape(entry.path, entry.key), device="meta"), entry.part).shape)
        if isinstance(entry, HeldLayer):
            shape = entry.weight.values.shape
        else:
            shape = _read_shape(entry.path, entry.layer + VALUES)
        return shape[::-1] if entry.transposed else shape

    def read(self, name: str) -> Tensor:
        """Read a copy to the CPU, float32 (integers stay), dequantized. SourceError: damaged file, NaN, infinity."""
        return self._read_entry(name, self._entries)

    def read_float(self, name: str) -> Tensor:
        """Return a copy like `read`, or, of a quantized layer, of the values from which it was rounded."""
        return self._read_entry(name, self._floats)

    def view(self, name: str, floats: bool = False) -> Tensor | None:
        """Return the tensor as it lies in its file or memory, in its own type, no bytes read yet; None if it is packed.

        `floats`: as `read_float`. Not to be written to.
        """
        entry = self._find_entry(name, self._floats if floats else self._entries)
        if isinstance(entry, Stored):
            return _read_tensor(entry.path, entry.key)
        return entry.detach() if isinstance(entry, Tensor) else None

    def quantized(self, layer: str) -> QuantizedWeight | None:
        """Return the integers of a quantized layer (a module's path); None where it is not quantized."""
        name = f"{layer}.weight"
        entry = self._find_entry(name, self._entries) if name in self else None
        return _unpack_weight(entry) if isinstance(entry, Packed | HeldLayer) else None

    def same_floats(self, other: WeightStore) -> bool:
        """Return whether no float value differs from that store's: what was done since is rounding alone."""
        return self._floats.keys() == other._floats.keys() and all(
            _is_same_entry(mine, other._floats[name]) for name, mine in self._floats.items()
        )

    def same(self, name: str, other: WeightStore) -> bool:
        """Return whether a tensor is the same one in that store."""
        return (
            name in self
            and name in other
            and _is_same_entry(self._find_entry(name, self._entries), other._find_entry(name, other._entries))
        )

    def is_quantized(self, layer: str) -> bool:
        name = f"{layer}.weight"
        return name in self and isinstance(self._find_entry(name, self._entries), Packed | HeldLayer)

    def over(self, files: Sequence[Path], keep: Any = None) -> WeightStore:
        """Return this store with the tensors of files that a stream wrote in place of those here; later files win."""
        entries, floats = dict(self._entries), dict(self._floats)
        for path in files:
            for name, written in make_entries(path).items():
                entries[name] = written[-1]
                if isinstance(written[0], Stored):
                    floats[name] = written[0]
                elif name in self._tied:
                    floats.setdefault(name, floats[self._tied[name]])
        return WeightStore(entries, self._tied, floats, (*self._keep, *([] if keep is None else [keep])))

    def holding(self, layers: Mapping[str, HeldLayer]) -> WeightStore:
        """Return this store with these layers quantized; `read_float` goes on giving what it gave of them."""
        quantized = {f"{layer}.weight": held for layer, held in layers.items()}
        return WeightStore(self._entries | quantized, self._tied, self._floats, self._keep)

    def _find_entry(self, name: str, among: Mapping[str, Entry]) -> Entry:
        try:
            return among[name] if name in among else among[self._tied[name]]
        except KeyError:
            raise KeyError(f"the model has no tensor {name!r}") from None

    def _read_entry(self, name: str, among: Mapping[str, Entry]) -> Tensor:
        entry = self._find_entry(name, among)
        if isinstance(entry, Packed | HeldLayer):
            weight = torch.from_numpy(_unpack_weight(entry).dequantize())
            return weight.t().contiguous() if entry.transposed else weight
        if isinstance(entry, Stored):
            tensor = _copy_by_pieces(entry.path, entry.key)
        elif isinstance(entry, Decoded):
            tensor = _copy_as_float(entry.read())
        else:
            tensor = _copy_as_float(_read_expert(entry) if isinstance(entry, Sliced) else entry.detach())
        if tensor.is_floating_point() and not finite(tensor):
            where = "" if isinstance(entry, Tensor | Decoded) else f" ({entry.path})"
            raise SourceError(f"NaN or infinity in '{name}'{where}; the weights are not usable: get them again")
        return tensor


def _is_same_entry(one: Entry, other: Entry) -> bool:
    return one is other or (not isinstance(one, Tensor) and one == other)


def make_entries(path: Path) -> dict[str, list[Entry]]:
    """Return what a file of finished work has for each tensor name: new float values, then a quantized weight."""
    record = json.loads(path.with_suffix(".json").read_text())
    entries: dict[str, list[Entry]] = {name: [Stored(path, name)] for name in record["replaced"]}
    for layer, how in record["quantized"].items():
        packed = Packed(path, layer, **{**how, "stored": tuple(how["stored"])})
        entries.setdefault(f"{layer}.weight", []).append(packed)
    return entries


def pack_tensors(layer: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors that a file holds of a quantized layer, by name; FP8 values under torch's type."""
    values = np.ascontiguousarray(weight.values)
    if values.dtype == ml_dtypes.float8_e4m3fn:
        held = torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn)
    else:
        held = torch.from_numpy(values)
    tensors = {layer + VALUES: held, layer + SCALES: torch.from_numpy(np.ascontiguousarray(weight.scales))}
    if weight.zero_points is not None:
        tensors[layer + ZERO_POINTS] = torch.from_numpy(np.ascontiguousarray(weight.zero_points))
    if weight.offsets is not None:
        tensors[layer + OFFSETS] = torch.from_numpy(np.ascontiguousarray(weight.offsets))
    for name, array in weight.stored.items():
        tensors[layer + STORED + name] = torch.from_numpy(np.ascontiguousarray(array))
    return tensors


def _unpack_weight(entry: Packed | HeldLayer) -> QuantizedWeight:
    if isinstance(entry, HeldLayer):
        return entry.weight
    held = _read_tensor(entry.path, entry.layer + VALUES)
    if held.dtype == torch.float8_e4m3fn:
        values = held.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    else:
        values = held.numpy()
    zero_points = _read_tensor(entry.path, entry.layer + ZERO_POINTS).numpy() if entry.zero_points else None
    scales = _read_tensor(entry.path, entry.layer + SCALES).numpy()
    offsets = _read_tensor(entry.path, entry.layer + OFFSETS).numpy() if entry.offsets else None
    stored = {name: _read_tensor(entry.path, entry.layer + STORED + name).numpy() for name in entry.stored}
    return QuantizedWeight(values, scales, zero_points, entry.bits, entry.group_size, offsets, stored)


def _copy_by_pieces(path: Path, key: str) -> Tensor:
    """Read a tensor of a file, floats as float32, piece by piece: pages of a file that lie open count as memory."""
    shape = _read_shape(path, key)
    if len(shape) < 2 or math.prod(shape) * FLOAT_BYTES <= PIECE_BYTES:
        return _copy_as_float(_read_tensor(path, key))
    rows = max(1, PIECE_BYTES // (FLOAT_BYTES * math.prod(shape[1:])))
    tensor: Tensor | None = None
    for start in range(0, shape[0], rows):
        with _open_file(path, key) as file:
            piece: Tensor = file.get_slice(key)[start : start + rows]
            if tensor is None:
                tensor = torch.empty(shape, dtype=torch.float32 if piece.is_floating_point() else piece.dtype)
            tensor[start : start + rows] = piece
            del piece
    assert tensor is not None
    return tensor


def _copy_as_float(tensor: Tensor) -> Tensor:
    """Return a copy; floats as float32."""
    if not tensor.is_floating_point():
        return tensor.clone()
    return tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _read_tensor(path: Path, key: str) -> Tensor:
    with _open_file(path, key) as file:
        tensor: Tensor = file.get_tensor(key)
        return tensor


def _read_expert(entry: Sliced) -> Tensor:
    """Read one expert's part alone of a tensor that holds all experts'."""
    with _open_file(entry.path, entry.key) as file:
        single = file.get_slice(entry.key)[entry.part.expert : entry.part.expert + 1]
    return take_part(single, replace(entry.part, expert=0))


def _read_shape(path: Path, key: str) -> tuple[int, ...]:
    with _open_file(path, key) as file:
        return tuple(file.get_slice(key).get_shape())


@contextmanager
def _open_file(path: Path, key: str) -> Iterator[Any]:
    """Keep a safetensors file open while the context is. SourceError, which names the tensor, if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise SourceError(f"{path}: '{key}' cannot be read: {error}; copy or download the file again") from error
