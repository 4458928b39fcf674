"""python: and live: sources: a module from a user's factory function, or a copy of the one that was given."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from compress.blocks.parametrized import fold_computed, list_computed
from compress.errors import SourceError
from compress.models.live import copy_held
from compress.models.pruned import fit_record
from compress.models.source import Source, factory_file
from compress.models.weights import read_shapes

USER_ERRORS = (
    ImportError,
    SyntaxError,
    NameError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    RuntimeError,
    OSError,
)
"""What a user's code may raise when it is wrong; all but memory, interrupts and assertions."""


def build(source: Source) -> nn.Module:
    """Call the factory with the recipe's `args`, and make what it gives as small as a pruned model's record says.

    Of a live: source, a copy of the module that is held takes the factory's place.

    Weights that it computes from other parameters are parameters themselves where the weight files have them so; the
    others wait for what they are computed from (`fold_computed`). SourceError if it cannot be found, called, or gives
    no module.
    """
    module = copy_held(source.live) if source.live is not None else _call_factory(source)
    return make_fit(module, source.weights, source.shapes)


def make_fit(module: nn.Module, weights: Sequence[Path], shapes: Path | None) -> nn.Module:
    """Give a module as its code builds it the parameters and the sizes that weight files have; return it, in eval mode.

    Their values are still to be loaded. `shapes`: a pruned model's record. SourceError: it is of another model.
    """
    module.eval()
    if weights and list_computed(module):
        fold_computed(module, {name for path in weights for name in read_shapes(path)}.__contains__)
    fit_record(module, shapes)
    return module


def _call_factory(source: Source) -> nn.Module:
    code = source.code
    assert code is not None
    factory = load_factory(code, source.root)
    try:
        inspect.signature(factory).bind(**source.spec.args)
    except TypeError as error:
        raise SourceError(
            f"{source.name}: model.args: {error}; the factory is {code[1]}{inspect.signature(factory)}"
        ) from error
    return run_factory(factory, source.spec.args, source.name)


def run_factory(factory: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> nn.Module:
    """Call a user's factory; SourceError, led by `name`, where it fails or gives no module."""
    try:
        module = factory(**arguments)
    except USER_ERRORS as error:
        raise SourceError(f"{name}: the factory failed: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise SourceError(f"{name}: the factory gave {type(module).__name__}, not a torch.nn.Module")
    return module


def load_factory(code: tuple[str, str], root: Path) -> Callable[..., Any]:
    """Return the function that a python: source names. A file needs not be on sys.path. SourceError: there is none."""
    module = _import_file(factory_file(code, root)) if code[0].endswith(".py") else _import_module(code, root)
    factory = getattr(module, code[1], None)
    if not callable(factory):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise SourceError(f"python:{code[0]}:{code[1]}: there is no such function; the module has: {', '.join(names)}")
    return factory


def _import_module(code: tuple[str, str], root: Path) -> ModuleType:
    factory_file(code, root)
    try:
        return importlib.import_module(code[0])
    except USER_ERRORS as error:
        raise SourceError(f"python:{code[0]}:{code[1]}: importing failed: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> ModuleType:
    """Import a file as a module named by its path and contents, so that an edited file is a new module."""
    digest = hashlib.sha256(str(path.resolve()).encode() + path.read_bytes()).hexdigest()[:16]
    name = f"_compress_model_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise SourceError(f"{path}: cannot be imported as Python")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up there
    try:
        module_spec.loader.exec_module(module)
    except USER_ERRORS as error:
        del sys.modules[name]
        raise SourceError(f"{path}: importing failed: {type(error).__name__}: {error}") from error
    return module
