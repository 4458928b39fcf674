"""A model that a program holds, written into files that a recipe can name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.api.datasets import Reads
from compress.errors import SourceError
from compress.models.huggingface import quiet
from compress.models.live import copy_held, hold
from compress.models.weights import write_state

if TYPE_CHECKING:
    import onnx
    from torch import nn

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class GivenModel:
    """`source` and `weights` as a recipe's `model` has them; `reads`: what its samples are called."""

    source: str
    weights: str | None = None
    reads: Reads = field(default_factory=Reads)


def write_model(model: Any, folder: Path, processing_class: Any = None) -> GivenModel:
    """Write a model under `folder` and say where it lies. A path, a hub id or a source stays as it is.

    `model` else: a transformers model, with its tokenizer or processor (`processing_class`); any `nn.Module`, whose
    code this process holds (see `compress.models.live`); an `onnx.ModelProto`. What is given is not changed.
    SourceError: it is something else, or cannot be copied.
    """
    if isinstance(model, str | os.PathLike):
        return GivenModel(os.fspath(model))
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "graph") and hasattr(model, "SerializeToString"):
        return _write_onnx(model, folder)
    from torch import nn

    if not isinstance(model, nn.Module):
        raise SourceError(
            f"model: a {type(model).__name__} is no model; give a torch.nn.Module, a transformers model, an "
            "onnx.ModelProto, a path or a hub id"
        )
    module = _unwrap(model)
    if hasattr(module, "save_pretrained") and hasattr(module, "config"):
        return _write_transformers(module, folder, processing_class)
    return _write_module(module, folder)


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of data parallelism and of `torch.compile`."""
    for name in ("module", "_orig_mod"):
        inner = getattr(model, name, None) if type(model).__module__.startswith(("torch.", "accelerate.")) else None
        if inner is not None:
            return _unwrap(inner)
    return model


def _write_module(module: nn.Module, folder: Path) -> GivenModel:
    name, path = hold(module), folder / WEIGHTS
    write_state(module.state_dict(), path)
    taken = inspect.signature(module.forward).parameters.values()
    names = tuple(p.name for p in taken if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))

    def call(inputs: Sequence[np.ndarray]) -> object:
        import torch

        tensors = (torch.from_numpy(np.ascontiguousarray(x)) for x in inputs)
        with torch.no_grad():
            return copy_held(name).float()(*(x.float() if x.is_floating_point() else x for x in tensors))

    return GivenModel(f"live:{name}", str(path), Reads(names, call))


def _write_transformers(model: Any, folder: Path, processing_class: Any) -> GivenModel:
    """Write the folder that `from_pretrained` reads; the tokenizer or processor into it."""
    place = folder / "model"
    if processing_class is None and model.main_input_name in ("input_ids", "pixel_values", "input_values"):
        raise SourceError(
            "processing_class: a transformers model is judged on texts, images or sounds as people have them; give its "
            "tokenizer or processor"
        )
    for old in (*place.glob("*.safetensors"), *place.glob("*.index.json")):  # another model's shards would be read, too
        old.unlink()
    with quiet():
        model.save_pretrained(place)
        if processing_class is not None:
            processing_class.save_pretrained(place)
    return GivenModel(f"dir:{place}")


def _write_onnx(model: onnx.ModelProto, folder: Path) -> GivenModel:
    import onnx

    path, beside = folder / "model.onnx", folder / "model.onnx.data"
    beside.unlink(missing_ok=True)  # onnx would write behind what is there
    large = model.ByteSize() >= onnx.checker.MAXIMUM_PROTOBUF
    onnx.save(model, path, save_as_external_data=large, location=beside.name)
    constants = {tensor.name for tensor in model.graph.initializer}
    return GivenModel(f"onnx:{path}", reads=Reads(tuple(v.name for v in model.graph.input if v.name not in constants)))
