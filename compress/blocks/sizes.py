"""The sizes of a module, and how they differ from those its code builds: what reloads a pruned model without pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from operator import index
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from compress.blocks.depth import keep_blocks, numbers_of, put_identity
from compress.blocks.materialise import plain
from compress.errors import SourceError

UNFIT_NUMBERS = (
    *(ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, AssertionError, AttributeError),
    StrictDataclassError,
)
"""What building a configuration, or a model of it, raises where its numbers do not go together."""
Size = int | tuple[int, ...]
Attributes = dict[str, dict[str, Size]]
Setting = int | list[Any]


@dataclass(frozen=True)
class Shapes:
    """Sizes of a module: of its tensors (parameters and buffers), and attributes that hold whole numbers.

    `attributes`: module -> attribute -> value. `config`: numbers, and lists of them or of words, of a transformers
    configuration. `blocks`: list of blocks -> the numbers that those in it have as the code counts. `skipped`: modules
    that do nothing. As a record: those that differ from the ones its code builds.
    """

    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    attributes: Attributes = field(default_factory=dict)
    config: dict[str, Setting] = field(default_factory=dict)
    blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tensors or self.attributes or self.config or self.blocks or self.skipped)

    def since(self, built: Shapes) -> Shapes:
        """Return the record of what differs from `built`."""
        tensors = {name: shape for name, shape in self.tensors.items() if built.tensors.get(name) != shape}
        attributes: Attributes = {}
        for path, values in self.attributes.items():
            old = built.attributes.get(path, {})
            if changed := {key: value for key, value in values.items() if old.get(key) != value}:
                attributes[path] = changed
        config = {key: value for key, value in self.config.items() if built.config.get(key) != value}
        blocks = {name: numbers for name, numbers in self.blocks.items() if built.blocks.get(name) != numbers}
        skipped = tuple(name for name in self.skipped if name not in built.skipped)
        return Shapes(tensors, attributes, config, blocks, skipped)

    def then(self, later: Shapes) -> Shapes:
        """Return this record with a later one on top of it."""
        tensors = {name: shape for name, shape in self.tensors.items() if not later.lacks(name)}
        attributes = {path: dict(values) for path, values in self.attributes.items() if not later.lacks(path)}
        for path, changed in later.attributes.items():
            attributes.setdefault(path, {}).update(changed)
        skipped = (*(name for name in self.skipped if not later.lacks(name)), *later.skipped)
        blocks = {name: numbers for name, numbers in self.blocks.items() if not later.lacks(name)} | later.blocks
        return Shapes(tensors | later.tensors, attributes, self.config | later.config, blocks, skipped)

    def lacks(self, name: str) -> bool:
        """Return whether what has that name lies in a removed block: behind a list's end, or inside an identity."""
        places = ((path, len(numbers)) for path, numbers in self.blocks.items() if name.startswith(f"{path}."))
        behind = any(int(name.removeprefix(f"{path}.").partition(".")[0]) >= length for path, length in places)
        return behind or any(name == path or name.startswith(f"{path}.") for path in self.skipped)


AS_BUILT = Shapes()
"""Nothing differs."""


def write_shapes(shapes: Shapes, path: Path) -> None:
    """Write a record of shapes as JSON."""
    path.write_text(json.dumps(asdict(shapes), indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_shapes_record(path: Path | None) -> Shapes:
    """Read what `write_shapes` wrote, or return AS_BUILT where `path` is None. SourceError if it is damaged."""
    if path is None:
        return AS_BUILT
    try:
        return shapes_from(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise SourceError(f"{path}: is not a record of shapes: {error}; copy it again") from error


def shapes_from(record: Mapping[str, Any]) -> Shapes:
    """Return the shapes that a record of JSON values holds."""
    tensors = {name: tuple(index(size) for size in shape) for name, shape in record["tensors"].items()}
    attributes = {
        path: {key: tuple(value) if isinstance(value, list) else index(value) for key, value in own.items()}
        for path, own in record["attributes"].items()
    }
    config = {key: value if isinstance(value, list) else index(value) for key, value in record["config"].items()}
    blocks = {name: tuple(index(number) for number in own) for name, own in record.get("blocks", {}).items()}
    return Shapes(tensors, attributes, config, blocks, tuple(str(name) for name in record.get("skipped", ())))


def shapes_of(module: nn.Module) -> Shapes:
    """Return all sizes of a module."""
    tensors = {name: tuple(tensor_at(*held[0]).shape) for name, held in tensor_holders(module).items()}
    attributes = {plain(path): _collect_int_attributes(part) for path, part in module.named_modules()}
    config = transformers_config(module)
    settings = {} if config is None else config_settings(config)
    parts = {plain(path): part for path, part in module.named_modules()}
    blocks = {path: numbers_of(part) for path, part in parts.items() if isinstance(part, nn.ModuleList)}
    skipped = tuple(path for path, part in parts.items() if isinstance(part, nn.Identity))
    return Shapes(tensors, {path: values for path, values in attributes.items() if values}, settings, blocks, skipped)


def fit(module: nn.Module, shapes: Shapes) -> None:
    """Make a module as built take the tensors of a record, in place: sizes alone, values are still to be loaded.

    SourceError where the module has nothing of that name.
    """
    _fit_depth(module, shapes)
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
    for key, setting in shapes.config.items():
        setattr(transformers_config(module), key, setting)


def _fit_depth(module: nn.Module, shapes: Shapes) -> None:
    """Remove, in place, the blocks that a record says are removed. SourceError: the record is another model's."""
    modules = {plain(path): part for path, part in module.named_modules()}
    for name, numbers in shapes.blocks.items():
        blocks = modules.get(name)
        if not isinstance(blocks, nn.ModuleList) or len(numbers) > len(blocks):
            raise SourceError(f"the record of shapes is of another model: this one has no {len(numbers)} blocks {name}")
        keep_blocks(blocks, numbers)
    for name in shapes.skipped:
        if name not in modules:
            raise SourceError(f"the record of shapes is of another model: this one has no {name}")
        put_identity(module, name)


def transformers_config(module: nn.Module) -> Any:
    """Return the configuration of a transformers model, wrapped or not; None for another module."""
    config = getattr(getattr(module, "wrapped", module), "config", None)
    return config if hasattr(config, "to_dict") else None


def config_settings(config: Any) -> dict[str, Setting]:
    """Return the numbers of a transformers configuration, and its lists of them or of words."""
    return {key: value for key, value in config.to_dict().items() if _is_setting(value)}


def rebuild_config(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a transformers configuration with `changes` as a reader of its file gets it: built anew and checked.

    Raises UNFIT_NUMBERS where its class refuses them.
    """
    # not by way of JSON: that has no word for infinity, which some recurrent models' time_step_limit is
    return type(config).from_dict({**config.to_dict(), **changes})


TensorHolders = list[tuple[nn.Module, str]]


def tensor_holders(module: nn.Module) -> dict[str, TensorHolders]:
    """Return the modules that hold each parameter and stored buffer, and its name in each, by its plain name."""
    names: dict[int, str] = {}
    held: dict[str, TensorHolders] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                name = names.setdefault(id(tensor), plain(f"{path}.{key}" if path else key))
                held.setdefault(name, []).append((part, key))
    return held


def tensor_at(part: nn.Module, key: str) -> Tensor:
    """Return the parameter or buffer that a module holds under `key`."""
    tensor: Tensor | None = part._parameters.get(key)
    if tensor is None:
        tensor = part._buffers[key]
    assert tensor is not None
    return tensor


def put_tensor(held: TensorHolders, values: Tensor) -> None:
    """Put one tensor in the place of all that hold it; a contiguous Parameter where the first holder has one."""
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


def _collect_int_attributes(part: nn.Module) -> dict[str, Size]:
    """Return the whole numbers, and tuples of them, that the module itself holds, by attribute."""
    public = {key: value for key, value in vars(part).items() if not key.startswith("_") and key != "training"}
    return {key: value for key, value in public.items() if type(value) is int or _is_sizes(value)}


def _is_sizes(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(type(item) is int for item in value)


def _is_setting(value: object) -> bool:
    """Return whether a value is a number, or a list of numbers or words (perhaps one for each block)."""
    return type(value) is int or (isinstance(value, list) and all(type(item) in (int, str, bool) for item in value))
