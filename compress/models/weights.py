"""Weight files of python: sources: read without pickles, compared with the module, checked for NaN."""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.blocks.materialise import plain
from compress.errors import SourceError
from compress.rounding.grid import finite
from runtime.bundle.files import put_in_place

Shapes = dict[str, tuple[int, ...]]


def read_shapes(path: Path) -> Shapes:
    """Return tensor names and shapes of a weight file, from its header alone where it is safetensors."""
    if path.suffix == ".safetensors":
        return safetensors_shapes(path)
    return {name: tuple(tensor.shape) for name, tensor in _load_pickle(path, "meta").items()}


def read_state(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a weight file to the CPU."""
    if path.suffix != ".safetensors":
        return _load_pickle(path, "cpu")
    from safetensors.torch import load_file

    safetensors_shapes(path)  # a damaged file is named here
    return load_file(path)


def safetensors_shapes(path: Path) -> Shapes:
    """Return names and shapes in a safetensors header; SourceError if the file is damaged or cut short."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise SourceError(f"{path}: is not a whole safetensors file: {error}; copy or download it again") from error


def safetensors_bytes(path: Path) -> dict[str, int]:
    """Return the bytes of each tensor of a safetensors file whose header has been read before."""
    header = _read_header(path)
    return {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()}


def safetensors_types(path: Path) -> dict[str, str]:
    """Return the type of each tensor (F32, BF16, F8_E4M3, ...) of a file whose header has been read before."""
    return {name: entry["dtype"] for name, entry in _read_header(path).items()}


def _read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def check_shapes(module: nn.Module, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise SourceError that names every tensor that the file lacks, has in another shape, or has too many.

    A tensor that is tied to one in the file may be absent; so may batch norm's counter, which counts in training only.
    """
    wanted = module.state_dict(keep_vars=True)
    present = {id(tensor) for name, tensor in wanted.items() if name in shapes}
    optional = {
        name for name, tensor in wanted.items() if id(tensor) in present or name.endswith("num_batches_tracked")
    }
    missing = [name for name in wanted if name not in shapes and name not in optional]
    unexpected = [name for name in shapes if name not in wanted]
    misshaped = [
        f"'{name}' is {list(shapes[name])} in the file, {list(tensor.shape)} in the model"
        for name, tensor in wanted.items()
        if name in shapes and shapes[name] != tuple(tensor.shape)
    ]
    fit = len(shapes) - len(unexpected)
    if 2 * fit < len(shapes) and not _suggest_prefix(unexpected, wanted):
        shown = f"it has {_format_names(unexpected, 2)}, the model {_format_names(missing or list(wanted), 2)}"
        raise SourceError(f"{where}: {fit or 'none'} of {len(shapes)} names fit: weights of another model? {shown}")
    problems = [f"{where}: missing: {_format_names(missing)}"] if missing else []
    problems += (
        [f"{where}: not in the model: {_format_names(unexpected)}{_suggest_prefix(unexpected, wanted)}"]
        if unexpected
        else []
    )
    problems += [f"{where}: {problem}" for problem in misshaped]
    if problems:
        raise SourceError(problems)


def load_state(module: nn.Module, path: Path) -> None:
    """Put a weight file's tensors into `module` (changed in place). SourceError if they do not fit exactly."""
    state = read_state(path)
    check_shapes(module, {name: tuple(tensor.shape) for name, tensor in state.items()}, str(path))
    module.load_state_dict(state, strict=False)  # strictness is check_shapes'; tied tensors may be absent


def write_state(state: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as `load_state` reads them: whole, or not at all.

    Those that share memory are written one by one, and are shared again in what is built.
    """
    from safetensors.torch import save_file

    draft = path.with_name(f".{path.name}.partial")
    save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}, draft)
    put_in_place(draft, path)


def check_finite(module: nn.Module, where: str) -> None:
    """Raise SourceError that names every weight that holds NaN or infinity, and every buffer that holds NaN.

    An infinity in a buffer is common: what hides tokens from attention is one.
    """
    tensors = [(name, finite(tensor.detach())) for name, tensor in module.named_parameters()]
    tensors += [(n, not tensor.isnan().any()) for n, tensor in module.named_buffers() if tensor.is_floating_point()]
    _refuse_bad([plain(name) for name, fits in tensors if not fits], where)


def check_finite_file(path: Path, passed_over: Collection[str], buffers: Collection[str]) -> None:
    """Raise SourceError for NaN and infinity in a weight file, as `check_finite` does, one tensor in memory at a time.

    `passed_over`: tensors that are no part of the model; `buffers`: plain names of the module's.
    """
    state = _load_pickle(path, "cpu").items() if path.suffix != ".safetensors" else _iter_tensors(path)
    bad = []
    for name, tensor in state:
        if name in passed_over or not tensor.is_floating_point():
            continue
        values = tensor.float() if tensor.element_size() == 1 else tensor
        may_be_infinite = any(buffer == name or buffer.endswith(f".{name}") for buffer in buffers)
        if (may_be_infinite and values.isnan().any()) or not (may_be_infinite or finite(values)):
            bad.append(name)
    _refuse_bad(bad, str(path))


def _iter_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def _refuse_bad(names: list[str], where: str) -> None:
    if names:
        raise SourceError(f"{where}: NaN or infinity in {_format_names(names)}; the weights are not usable")


def _load_pickle(path: Path, device: str) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise SourceError(
            f"{path}: holds Python objects beside tensors, which could run code, so it is refused; where you trust it, "
            "convert it once: safetensors.torch.save_file(torch.load(FILE, weights_only=False).state_dict(), "
            "'weights.safetensors')"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise SourceError(f"{path}: cannot be read as torch weights: {error}") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise SourceError(f"{path}: is not a state dict (name -> tensor); save model.state_dict() alone")
    return state


def _format_names(names: list[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"'{name}'" for name in names[:most]) + more


def _suggest_prefix(unexpected: list[str], wanted: Mapping[str, Tensor]) -> str:
    prefixes = {name.partition(".")[0] for name in unexpected}
    if len(prefixes) == 1 and all(name.partition(".")[2] in wanted for name in unexpected):
        return f"; save the file without the prefix '{prefixes.pop()}.'"
    return ""
