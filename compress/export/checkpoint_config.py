"""What lies beside a checkpoint's tensors (configuration, tokenizer), and the types that tensors are written in."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.blocks.materialise import NamedParts
from compress.blocks.sizes import UNFIT_NUMBERS, Setting, config_settings, transformers_config
from compress.errors import ExportError
from compress.export.shards import CODES
from compress.models.packed import OF_ANOTHER_FORMAT, PARTS
from compress.models.weights import safetensors_types
from compress.store.cache import RECORD
from runtime.bundle.files import code_problem

if TYPE_CHECKING:
    from transformers import PretrainedConfig

COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
    "*processor_config.json",
    "LICENSE*",
    "NOTICE*",
)
"""Of the source's folder: all that is not weights, configuration or text about it."""
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")
"""Endings of files that hold weights, or say where they lie."""
FLOATS = {code: dtype for dtype, code in CODES.items() if dtype in (torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True)
class FloatTypes:
    """The type that each float tensor is written in: `usual`, unless its name in the file says otherwise."""

    usual: torch.dtype
    by_name: Mapping[str, torch.dtype] = field(default_factory=dict)

    def of(self, written: str) -> torch.dtype:
        return self.by_name.get(written, self.usual)


def float_types(folder: Path | None, wanted: str | None) -> FloatTypes:
    """Return `wanted` for all, or each tensor's type in the source's files; the commonest for tensors they lack."""
    if wanted is not None:
        return FloatTypes(getattr(torch, wanted))
    by_name: dict[str, torch.dtype] = {}
    for path in sorted(folder.glob("*.safetensors")) if folder is not None else ():
        numbers = {n: kind for n, kind in safetensors_types(path).items() if n.rpartition(".")[2] not in PARTS}
        by_name |= {name: FLOATS[kind] for name, kind in numbers.items() if kind in FLOATS}
    if by_name:
        return FloatTypes(Counter(by_name.values()).most_common(1)[0][0], by_name)
    config = _read_source_config(folder)
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return FloatTypes(getattr(torch, name) if name in ("float32", "float16", "bfloat16") else torch.float32)


def write_config(
    folder: Path,
    source: Path | None,
    module: nn.Module,
    quantization: Mapping[str, Any] | None,
    dtype: torch.dtype,
    untie: bool,
    sizes: Mapping[str, Setting],
    with_code: bool = False,
) -> dict[str, Any]:
    """Write config.json, from the source's or the module's own, and the source's tokenizer and generation files.

    Return what config.json holds. `untie`: the output layer has values of its own now. `sizes`: what pruning has
    changed in the source's. A module that is none of transformers' gets a config.json with nothing but
    `quantization_config`. `with_code`: the source's *.py come along. Beside a module that only its files tell of,
    nothing but `quantization_config` is changed, and all that is no weights comes along.
    """
    wrapped = getattr(module, "wrapped", module)
    if isinstance(wrapped, NamedParts) and source is not None:
        config, said = _read_source_config(source), str(dtype).removeprefix("torch.")
        if untie or said != (config.get("dtype") or config.get("torch_dtype") or said):
            config = _set_dtype(config, said, untie)
        config.pop("quantization_config", None)
        config |= {} if quantization is None else {"quantization_config": quantization}
        write_json(folder / "config.json", config)
        _copy_files(_list_beside_weights(source, with_code), source, folder)
        return config
    config, own = _read_source_config(source), transformers_config(module)
    if not config and own is not None:
        config = json.loads(own.to_json_string(use_diff=False))
    if config:
        config = _apply_sizes(config, own, sizes)
        config = _set_dtype(config, str(dtype).removeprefix("torch."), untie)
        config["architectures"] = [type(wrapped).__name__]
    config.pop("quantization_config", None)
    config |= {} if quantization is None else {"quantization_config": quantization}
    write_json(folder / "config.json", config)
    if source is not None and source.resolve() != folder.resolve():
        patterns = [*COPIED, *(["*.py"] if with_code else [])]
        _copy_files([path for pattern in patterns for path in source.glob(pattern) if path.is_file()], source, folder)
    return config


def make_config(source: Path, module: nn.Module, sizes: Mapping[str, Setting]) -> dict[str, Any] | None:
    """Return what the config.json of a folder has to say of a model from it; None: the folder has none.

    `sizes`: what pruning has changed in the source's.
    """
    config = _read_source_config(source)
    return _apply_sizes(config, transformers_config(module), sizes) if config else None


def _copy_files(paths: Iterable[Path], source: Path, folder: Path) -> None:
    for path in sorted(set(paths)):
        copy = folder / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def _list_beside_weights(source: Path, with_code: bool) -> list[Path]:
    """Return the files of a folder that hold neither weights nor configuration, nor what something would run.

    What says how the source's own weights are rounded would be untrue of others; RECORD is of the cache, in which a
    GGUF file lies unpacked.
    """
    return [
        path
        for path in source.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(WEIGHT_FILES)
        and path.name not in ("config.json", "recipe.yaml", RECORD, *OF_ANOTHER_FORMAT)
        and (not code_problem(path.name) or (with_code and path.suffix == ".py"))
    ]


def _apply_sizes(record: dict[str, Any], own: PretrainedConfig | None, sizes: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the source's configuration with what pruning has changed, and what its class would else derive from it.

    A class derives numbers that a file lacks from others (head_dim from the width and the heads), which may since have
    gone ways of their own.
    """
    record |= sizes
    if own is None or not sizes:
        return record
    wanted = config_settings(own)
    try:
        read = config_settings(type(own).from_dict(dict(record)))
    except UNFIT_NUMBERS:  # it may take them with all numbers told; what it refuses still, `config_lacks` finds
        return record | wanted
    return record | {key: value for key, value in wanted.items() if read.get(key) != value}


def _set_dtype(config: dict[str, Any], dtype: str, untie: bool) -> dict[str, Any]:
    """Return the configuration, those inside it too, with the type and whether embeddings are shared."""
    changed = {
        key: _set_dtype(value, dtype, untie) if _is_inner_config(key, value) else value for key, value in config.items()
    }
    changed.pop("torch_dtype", None)
    changed["dtype"] = dtype
    if untie:
        changed["tie_word_embeddings"] = False
    return changed


def _is_inner_config(key: str, value: Any) -> bool:
    return key.endswith("_config") and isinstance(value, dict) and "model_type" in value


def _read_source_config(folder: Path | None) -> dict[str, Any]:
    path = folder / "config.json" if folder is not None else None
    if path is None or not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExportError(f"{path}: is not JSON: {error}; copy or download it again") from error
    return dict(record)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
