"""The sizes of a module, and how they differ from those its code builds: what reloads a pruned model without pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.blocks.materialise import plain
from compress.errors import SourceError

Size = int | tuple[int, ...]
Attributes = dict[str, dict[str, Size]]


@dataclass(frozen=True)
class Shapes:
    """Sizes of a module: of its tensors (parameters and buffers), and attributes that hold whole numbers.

    `attributes`: module -> attribute -> value. `config`: numbers of a transformers configuration. As a record: those
    that differ from the ones its code builds.
    """

    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    attributes: Attributes = field(default_factory=dict)
    config: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tensors or self.attributes or self.config)

    def since(self, built: Shapes) -> Shapes:
        """What differs from `built`."""
        tensors = {name: shape for name, shape in self.tensors.items() if built.tensors.get(name) != shape}
        attributes: Attributes = {}
        for path, own in self.attributes.items():
            old = built.attributes.get(path, {})
            if changed := {key: value for key, value in own.items() if old.get(key) != value}:
                attributes[path] = changed
        config = {key: value for key, value in self.config.items() if built.config.get(key) != value}
        return Shapes(tensors, attributes, config)

    def then(self, later: Shapes) -> Shapes:
        """This record, and on top of it a later one."""
        attributes = {path: dict(own) for path, own in self.attributes.items()}
        for path, own in later.attributes.items():
            attributes.setdefault(path, {}).update(own)
        return Shapes(self.tensors | later.tensors, attributes, self.config | later.config)


AS_BUILT = Shapes()
"""Nothing differs."""


def write_shapes(shapes: Shapes, path: Path) -> None:
    """As JSON."""
    path.write_text(json.dumps(asdict(shapes), indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_shapes_record(path: Path | None) -> Shapes:
    """What `write_shapes` wrote, AS_BUILT without a file. SourceError if it is damaged."""
    if path is None:
        return AS_BUILT
    try:
        return shapes_from(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise SourceError(f"{path}: is not a record of shapes: {error}; copy it again") from error


def shapes_from(record: Mapping[str, Any]) -> Shapes:
    """Of JSON values."""
    tensors = {name: tuple(int(size) for size in shape) for name, shape in record["tensors"].items()}
    attributes = {
        path: {key: tuple(value) if isinstance(value, list) else int(value) for key, value in own.items()}
        for path, own in record["attributes"].items()
    }
    return Shapes(tensors, attributes, {key: int(value) for key, value in record["config"].items()})


def shapes_of(module: nn.Module) -> Shapes:
    """All of them."""
    tensors = {name: tuple(tensor_at(*held[0]).shape) for name, held in tensor_holders(module).items()}
    attributes = {plain(path): _attributes(part) for path, part in module.named_modules()}
    config = transformers_config(module)
    numbers = {} if config is None else {key: value for key, value in config.to_dict().items() if type(value) is int}
    return Shapes(tensors, {path: own for path, own in attributes.items() if own}, numbers)


def fit(module: nn.Module, shapes: Shapes) -> None:
    """Make a module as built take the tensors of a record, in place: sizes alone, values are still to be loaded.

    SourceError where the module has nothing of that name.
    """
    held = tensor_holders(module)
    modules = {plain(path): part for path, part in module.named_modules()}
    missing = [*(shapes.tensors.keys() - held.keys()), *(shapes.attributes.keys() - modules.keys())]
    if missing:
        raise SourceError(f"the record of shapes is of another model: this one has no {', '.join(sorted(missing)[:5])}")
    for name, shape in shapes.tensors.items():
        old = tensor_at(*held[name][0])
        put_tensor(held[name], torch.zeros(shape, dtype=old.dtype, device=old.device))
    for path, changed in shapes.attributes.items():
        for key, value in changed.items():
            setattr(modules[path], key, value)
    for key, number in shapes.config.items():
        setattr(transformers_config(module), key, number)


def transformers_config(module: nn.Module) -> Any:
    """Of a transformers model, wrapped or not; None for another module."""
    config = getattr(getattr(module, "wrapped", module), "config", None)
    return config if hasattr(config, "to_dict") else None


Held = list[tuple[nn.Module, str]]


def tensor_holders(module: nn.Module) -> dict[str, Held]:
    """Plain name of each parameter and stored buffer -> the modules that hold it, and its name in each."""
    names: dict[int, str] = {}
    found: dict[str, Held] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                name = names.setdefault(id(tensor), plain(f"{path}.{key}" if path else key))
                found.setdefault(name, []).append((part, key))
    return found


def tensor_at(part: nn.Module, key: str) -> Tensor:
    """A parameter or buffer."""
    found: Tensor | None = part._parameters.get(key)
    if found is None:
        found = part._buffers[key]
    assert found is not None
    return found


def put_tensor(held: Held, values: Tensor) -> None:
    """One tensor for all that hold it."""
    made = (
        nn.Parameter(values.detach().contiguous(), requires_grad=False)
        if held[0][1] in held[0][0]._parameters
        else values
    )
    for part, key in held:
        if key in part._parameters:
            part._parameters[key] = made  # type: ignore[assignment]
        else:
            part._buffers[key] = made


def _attributes(part: nn.Module) -> dict[str, Size]:
    """Whole numbers, and tuples of them, that the module itself holds."""
    found = {key: value for key, value in vars(part).items() if not key.startswith("_") and key != "training"}
    return {key: value for key, value in found.items() if type(value) is int or _is_sizes(value)}


def _is_sizes(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(type(one) is int for one in value)
