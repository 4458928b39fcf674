"""A bundle's checkpoint in torch with a switch for each layer: its rounded weights, or those of the recipe's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from compress.blocks.forward import run
from compress.blocks.layers import is_layer
from compress.blocks.materialise import plain
from compress.commands.inspect import read_json
from compress.commands.reproduce import check_model, recall_recipe
from compress.commands.switched import SwitchedModel, Vector
from compress.errors import ExportError
from compress.graph.switches import Unit
from compress.models.checkpoint_names import file_names
from compress.models.load import TorchModel, load_torch_model
from compress.models.packed import Files, decode_weights, quantization_of
from compress.models.source import locate
from compress.store.cache import default_root
from compress.store.digests import FileDigests
from runtime.backends.base import Feeds, choose_outputs
from runtime.bundle.tensors import TensorSpec
from runtime.judge.findings import Case

SHAPES = {"input_ids": ((8,), "int64"), "attention_mask": ((8,), "int64")}
"""Of one sample, for a look at the model's outputs."""


@dataclass(frozen=True)
class _Layer:
    """A layer of the float module and its two weights."""

    module: nn.Module
    rounded: Tensor
    exact: Tensor


@dataclass(frozen=True)
class TorchSession:
    """A torch language model as the runtime's sessions are: each call sets the layers' weights first."""

    loaded: TorchModel
    layers: tuple[_Layer, ...]
    vector: Vector

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.loaded.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.loaded.outputs

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> Feeds:
        for layer, rounded in zip(self.layers, self.vector, strict=True):
            layer.module.weight.data = layer.rounded if rounded else layer.exact
        tensors = {self.loaded.parameters[name]: torch.from_numpy(np.asarray(feeds[name])) for name in feeds}
        given = run(self.loaded.module, tensors)
        arrays = {name: part.numpy() for name, part in zip(self.loaded.output_names, given.values(), strict=True)}
        return {name: arrays[name] for name in choose_outputs(self.outputs, outputs)}

    def close(self) -> None:
        """Keep the module: others share it."""


def open_checkpoint(case: Case) -> SwitchedModel:
    """Open a bundle whose candidate is a checkpoint, in torch, beside the float model that its recipe names.

    What an engine rounds as it runs (activations, keys and values) is not part of it. Raises PlanError where the
    recipe's model is not there or another one, ExportError where passes have changed more than the layers' weights.
    """
    artifact = case.manifest.artifact("candidate")
    if artifact.remote_code or not case.manifest.generates:
        raise ExportError(
            f"{case.root}: a checkpoint is compared here if it is a language model without code of its own"
        )
    recipe = recall_recipe(case.root)
    check_model(recipe, read_json(case.root / "lock.json") or {}, FileDigests(default_root()))
    loaded = load_torch_model(locate(recipe.model, recipe.root), SHAPES)
    folder = (case.root / artifact.path).parent
    files = _list_tensors(folder)
    decoded = decode_weights(loaded.module, quantization_of(folder), files)
    _check_others(case, loaded.module, set(decoded), files)
    modules = {plain(name): part for name, part in loaded.module.named_modules() if is_layer(part)}
    names = file_names(loaded.module, [plain(name) for name in loaded.module.state_dict()])
    layers, units = [], []
    for name, weight in decoded.items():
        module = modules[name.removesuffix(".weight")]
        exact = module.weight.data
        rounded = weight.read().to(exact.dtype)
        layers.append(_Layer(module, rounded, exact))
        layer = name.removesuffix(".weight")
        stored = _count_bytes(files, f"{names.layer(layer)}.")
        units.append(Unit(layer, type(module).__name__, rounded_bytes=stored, float_bytes=exact.nbytes))
    if not units:
        raise ExportError(f"{case.root}: no layer of the checkpoint is rounded")
    opened = tuple(layers)
    source = f"{recipe.model.source}; in torch, without what an engine rounds as it runs"
    return SwitchedModel(
        case, tuple(units), lambda vector: TorchSession(loaded, opened, vector), artifact.size_bytes, source
    )


def _list_tensors(folder: Path) -> Files:
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: (path, tuple(file.get_slice(name).get_shape())) for name in file.keys()}  # noqa: SIM118
    return found


def _count_bytes(files: Files, prefix: str) -> int:
    """Return the bytes of a layer's tensors but its bias."""
    names = [name for name in files if name.startswith(prefix) and name != f"{prefix}bias"]
    return sum(_read(files, name).nbytes for name in names)


def _check_others(case: Case, module: nn.Module, decoded: set[str], files: Files) -> None:
    """Raise ExportError where a tensor that is not rounded is another one than the float model's."""
    held = {plain(name): value for name, value in module.state_dict().items()}
    names = file_names(module, held)
    for name, value in held.items():
        if name in decoded:
            continue
        key = names.tensor(name)
        if key not in files:  # tied to another, or made by the code
            continue
        stored = _read(files, key).to(value.dtype)
        if stored.shape != value.shape or not torch.allclose(stored, value, rtol=1e-2, atol=1e-5):
            raise ExportError(
                f"{case.root}: {name} of the checkpoint is not what the recipe's model has: passes have changed more "
                "than the layers' weights, so that these cannot be put back one by one. Export {kind: onnx} beside it, "
                "and ask that bundle with the cache of its build"
            )


def _read(files: Files, name: str) -> Tensor:
    with safe_open(files[name][0], framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor
