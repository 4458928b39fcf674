"""The torch module that passes left, kept in a bundle as tensors and sizes: no code, no pickle."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path

from torch import nn

from compress.blocks.materialise import plain
from compress.blocks.sizes import write_shapes
from compress.models.factory import make_fit, run_factory
from compress.models.live import digest_code
from compress.models.load import TorchModel
from compress.models.source import SHAPES, read_object
from compress.models.weights import load_state, write_state
from runtime.bundle.files import sha256_of
from runtime.errors import UsageError
from runtime.tasks.manifest import read_manifest

FOLDER, WEIGHTS, CODE = "module", "model.safetensors", "code.json"


def write_module(bundle: Path, model: TorchModel) -> None:
    """Write a module's tensors, its sizes where they are not those that its code builds, and a digest of that code."""
    folder = bundle / FOLDER
    folder.mkdir()
    write_state({plain(name): tensor for name, tensor in model.module.state_dict().items()}, folder / WEIGHTS)
    write_shapes(model.shapes, folder / SHAPES)
    module = getattr(model.module, "wrapped", model.module)
    said = {"class": type(module).__qualname__, "code": digest_code(module)}
    (folder / CODE).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def load_torch(bundle: Path | str, factory: Callable[[], nn.Module] | nn.Module) -> nn.Module:
    """Return the compressed torch module of a bundle, in eval mode on the CPU: to train on, or to export elsewhere.

        smaller = compress.load_torch("bundles/resnet-pruned", ResNet)

    `factory`: builds the model as it was before it was compressed, or is such a model, of which a copy is taken; its
    weights are not used. Of a model that was rounded the module holds what the integers stand for. A warning is given
    where the code is not that of the build. UsageError: the bundle keeps no module (`keep_module: true` in its recipe),
    or a file is not as it was written; SourceError: what the factory gives is another model.
    """
    root = Path(bundle)
    folder, manifest = root / FOLDER, read_manifest(root)
    records = {name: record for name, record in manifest.files.items() if name.startswith(f"{FOLDER}/")}
    if not records:
        raise UsageError(
            f"{root}: keeps no torch module; its recipe says so by keep_module: true, and what rounds the ONNX graph, "
            "such as int8, leaves the module as it was"
        )
    for name, record in records.items():
        if not (root / name).is_file() or sha256_of(root / name) != record.sha256:
            raise UsageError(f"{root / name}: is not as it was written; build the bundle again")
    given = copy.deepcopy(factory) if isinstance(factory, nn.Module) else run_factory(factory, {}, str(root))
    module = given.float().cpu()
    changed = digest_code(module) != read_object(folder / CODE)["code"]
    make_fit(module, (folder / WEIGHTS,), folder / SHAPES)
    load_state(module, folder / WEIGHTS)
    if changed:
        warnings.warn(f"{root}: the code of {type(module).__name__} is not that of the build", stacklevel=2)
    return module
