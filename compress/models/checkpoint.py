"""Which file of a checkpoint holds which tensor of a module: one safetensors file, or the shards of an index."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.blocks.experts import ExpertPart, find_stacked_parts, is_stacked, take_part
from compress.blocks.materialise import plain
from compress.blocks.store import Entry, Sliced, Stored, WeightStore
from compress.errors import SourceError
from compress.models.checkpoint_names import file_names
from compress.models.packed import decode_weights
from compress.models.weights import safetensors_bytes, safetensors_shapes

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Parts = Mapping[str, ExpertPart]
TensorPlaces = dict[str, tuple[Path, tuple[int, ...]]]
"""Name of a tensor -> its file, and its shape."""


class NotAsNamed(Exception):
    """The files do not hold the module's tensors under the module's names."""


def open_store(
    weights: Sequence[Path],
    module: nn.Module,
    parts: Parts | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> WeightStore:
    """Return a store of the module's tensors in the files, none of them read.

    A prefix that the files have and the module lacks, or the other way round, is allowed for, and so are tied tensors
    that are stored once, and the names that transformers gives to tensors as it loads them. `parts`: where an expert's
    parameter lies, if the files hold all experts' in one. `quantization`: what config.json says of weights that lie in
    few bits; they are read as the floats that they stand for. NotAsNamed where the names do not fit; SourceError: a
    damaged or missing file, another shape.
    """
    held, parts = list_tensors(weights), parts or {}
    decoded = decode_weights(module, quantization, held) if quantization else {}
    wanted = {plain(name): tensor for name, tensor in module.state_dict(keep_vars=True).items()}
    keys = _find_keys(module, wanted, held, parts)
    groups: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        groups.setdefault(id(tensor), []).append(name)
    entries: dict[str, Entry] = {}
    tied: dict[str, str] = {}
    for names in groups.values():
        several = (decoded.get(name) or _make_entry(name, keys, held, parts) for name in names)
        entry = next((entry for entry in several if entry is not None), None)
        if entry is not None:
            entries[names[0]] = entry
            tied.update(dict.fromkeys(names[1:], names[0]))
        elif not names[0].endswith("num_batches_tracked"):
            raise NotAsNamed(f"no tensor of the files is called '{names[0]}'")
    _check_shapes(entries, held, wanted)
    return WeightStore(entries, tied)


def expert_parts(module: nn.Module) -> dict[str, ExpertPart]:
    """Return where each expert's parameter lies in a stacked one, by plain name, before `unstack_experts`."""
    parts: dict[str, ExpertPart] = {}
    for path, part in module.named_modules():
        if is_stacked(part):
            parts |= find_stacked_parts(part, plain(path))
    return parts


def find_unread_tensors(weights: Sequence[Path], module: nn.Module, parts: Parts) -> dict[str, int]:
    """Return the tensors of the files that are no part of the module -> their bytes; {} where names do not tell."""
    try:
        held = list_tensors(weights)
    except NotAsNamed:
        return {}
    wanted = {plain(name): tensor for name, tensor in module.state_dict(keep_vars=True).items()}
    keys = _find_keys(module, wanted, held, parts)
    owned = {id(tensor): name for name, tensor in wanted.items()}
    must = [name for name in owned.values() if not name.endswith("num_batches_tracked")]
    if any(name not in keys and (name not in parts or parts[name].stacked not in keys) for name in must):
        return {}
    sizes = {path: safetensors_bytes(path) for path in {path for path, _ in held.values()}}
    return {name: sizes[path][name] for name, (path, _) in held.items() if name not in set(keys.values())}


def _find_keys(module: nn.Module, wanted: Mapping[str, Tensor], held: TensorPlaces, parts: Parts) -> dict[str, str]:
    """Return the names of tensors in the files by those in the module, stacked experts' included."""
    known = {*wanted, *(part.stacked for part in parts.values())}
    prefix = getattr(getattr(module, "wrapped", module), "base_model_prefix", "")
    dotted = f"{prefix}."
    # the prefix taken off or put on, where that fits more names
    ways = [{name: name for name in held}]
    if prefix:
        ways.append({name.removeprefix(dotted): name for name in held})
        ways.append({dotted + name: name for name in held})
    best = max(ways, key=lambda way: sum(name in known for name in way))
    keys = {name: key for name, key in best.items() if name in known}
    return keys | _match_written_names(module, [name for name in wanted if name not in keys], wanted, held, parts)


def _match_written_names(
    module: nn.Module, names: Sequence[str], own: Collection[str], held: TensorPlaces, parts: Parts
) -> dict[str, str]:
    """Return module name -> file name, for those of `names` that files hold under the name that transformers writes."""
    if not names:
        return {}
    written = file_names(module, own)
    keys = {name: written.tensor(name) for name in names if name not in parts or not parts[name].transposed}
    return {name: key for name, key in keys.items() if key in held}


def _make_entry(name: str, keys: Mapping[str, str], held: TensorPlaces, parts: Parts) -> Entry | None:
    if name in keys:
        return Stored(held[keys[name]][0], keys[name])
    part = parts.get(name)
    if part is None or part.stacked not in keys:
        return None
    return Sliced(held[keys[part.stacked]][0], keys[part.stacked], part)


def _check_shapes(entries: Mapping[str, Entry], held: TensorPlaces, wanted: Mapping[str, Tensor]) -> None:
    """Raise SourceError that names every tensor of another shape than the module's."""
    problems = []
    for name, entry in entries.items():
        if not isinstance(entry, Stored | Sliced):
            continue  # its shapes are checked where it is decoded
        path, shape = held[entry.key]
        if isinstance(entry, Sliced):
            shape = tuple(take_part(torch.empty(shape, device="meta"), entry.part).shape)
        if shape != tuple(wanted[name].shape):
            problems.append(f"{path}: '{name}' is {list(shape)} in the file, {list(wanted[name].shape)} in the model")
    if problems:
        raise SourceError(problems)


def list_tensors(weights: Sequence[Path]) -> TensorPlaces:
    """Return file and shape of each tensor in the files. Where there is an index (checked by `locate`), it decides."""
    if any(path.suffix != ".safetensors" for path in weights):
        raise NotAsNamed(f"{weights[0].name} is no safetensors file")
    index = weights[0].parent / INDEX
    if not index.is_file() or [path.name for path in weights] == [SINGLE]:
        return {name: (path, shape) for path in weights for name, shape in safetensors_shapes(path).items()}
    files = {name: index.parent / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    shapes = {path: safetensors_shapes(path) for path in sorted(set(files.values()))}
    for name, path in files.items():
        if name not in shapes[path]:
            raise SourceError(f"{path}: '{name}' is missing, which {INDEX} promises; copy or download the file again")
    return {name: (path, shapes[path][name]) for name, path in files.items()}
