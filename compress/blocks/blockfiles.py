"""Finished blocks of a stream: `block-00003.safetensors` with what it changed, and `.json` with what it said.

The record is written last and holds the digest of the tensors and its own, so a block is whole or it is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.blocks.store import pack_tensors
from compress.errors import OutputError
from compress.facts import LayerDecision, Note
from compress.formats.schemes import Scheme
from compress.rounding.quantized_weight import QuantizedWeight
from compress.store.durable import blame, seal, unseal
from runtime.bundle.files import put_in_place, sha256_of, write_whole
from runtime.bundle.records import from_json, to_json


@dataclass
class BlockChanges:
    """What was done to a block: float values by parameter, quantized weights by layer, and what is to be said of it."""

    replaced: dict[str, Tensor] = field(default_factory=dict)
    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    transposed: set[str] = field(default_factory=set)
    schemes: dict[str, Scheme] = field(default_factory=dict)
    activation_scales: dict[str, float] = field(default_factory=dict)
    kv_scales: dict[str, tuple[float, float]] = field(default_factory=dict)
    decisions: list[LayerDecision] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    measured: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Said:
    """What the record of a finished block tells."""

    name: str
    path: Path
    schemes: dict[str, Scheme]
    activation_scales: dict[str, float]
    kv_scales: dict[str, tuple[float, float]]
    decisions: tuple[LayerDecision, ...]
    notes: tuple[Note, ...]
    measured: dict[str, dict[str, float]]
    timing: dict[str, float]


def block_file(folder: Path, index: int) -> Path:
    """Return the path of the file that holds a block's tensors."""
    return folder / f"block-{index:05d}.safetensors"


def write_block(folder: Path, index: int, name: str, changes: BlockChanges, timing: Mapping[str, float]) -> Path:
    """Write a finished block, its record last; OutputError where the disk takes no more."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = block_file(folder, index)
    tensors = {key: tensor.detach().contiguous() for key, tensor in changes.replaced.items()}
    for layer, weight in changes.quantized.items():
        tensors |= pack_tensors(layer, weight)
    draft = path.with_suffix(".draft")
    try:
        with blame(path):
            save_file(_copy_shared_storage(tensors), draft)
            put_in_place(draft, path)
            write_whole(
                path.with_suffix(".json"), seal(_make_record(name, changes, timing) | {"sha256": sha256_of(path)})
            )
    except SafetensorError as error:
        raise OutputError(f"{path}: cannot be written: {error}; finished blocks are kept, run again") from error
    return path


def read_block(folder: Path, index: int, name: str) -> Said | None:
    """Read a finished block of that name; None if it is not there, or any byte is not as it was written."""
    path = block_file(folder, index)
    try:
        record = unseal(path.with_suffix(".json").read_bytes())
        if record is None or record["name"] != name or record["sha256"] != sha256_of(path):
            return None
        return _parse_record(path, record)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def read_finished_blocks(folder: Path, count: int | None = None) -> list[Said]:
    """Read the first `count` blocks (None: all) that a stream left in a folder, in order; tensors are not checked.

    OutputError where one is not there.
    """
    n = len(list(folder.glob("block-*.json"))) if count is None else count
    files = [block_file(folder, index) for index in range(n)]
    if not n or not all(path.is_file() and path.with_suffix(".json").is_file() for path in files):
        raise OutputError(f"{folder}: does not hold every block of a finished pass; run it again")
    records = [unseal(path.with_suffix(".json").read_bytes()) for path in files]
    if None in records:
        raise OutputError(f"{folder}: the record of a finished block is damaged; remove the folder and run again")
    return [_parse_record(path, record) for path, record in zip(files, records, strict=True) if record is not None]


def _copy_shared_storage(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, those that share memory with an earlier one copied: safetensors wants each by itself."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return separate


def _parse_record(path: Path, record: dict[str, Any]) -> Said:
    return Said(
        record["name"],
        path,
        {layer: from_json(Scheme, value, f"{path}: {layer}") for layer, value in record["schemes"].items()},
        record["activation_scales"],
        {name: (pair[0], pair[1]) for name, pair in record["kv_scales"].items()},
        tuple(LayerDecision(**decision) for decision in record["decisions"]),
        tuple(Note(**note) for note in record["notes"]),
        record["measured"],
        record["timing"],
    )


def _make_record(name: str, changes: BlockChanges, timing: Mapping[str, float]) -> dict[str, Any]:
    return {
        "name": name,
        "replaced": sorted(changes.replaced),
        "quantized": {
            layer: {
                "bits": weight.bits,
                "group_size": weight.group_size,
                "zero_points": weight.zero_points is not None,
                "transposed": layer in changes.transposed,
                "offsets": weight.offsets is not None,
                "stored": sorted(weight.stored),
            }
            for layer, weight in changes.quantized.items()
        },
        "schemes": to_json(changes.schemes),
        "activation_scales": changes.activation_scales,
        "kv_scales": to_json(changes.kv_scales),
        "decisions": to_json(changes.decisions),
        "notes": to_json(changes.notes),
        "measured": changes.measured,
        "timing": dict(timing),
    }
