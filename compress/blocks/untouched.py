"""A module left as it was by a run on tensors without values, which its own code may keep."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from torch import SymInt, Tensor, nn, sym_max, sym_min
from torch.utils._pytree import tree_leaves


@contextmanager
def leave_untouched(module: nn.Module) -> Iterator[None]:
    """Put back, when the context ends, the tensors that a forward keeps: in modules, and in caches of functions.

    A table of positions that is made once, or behind an `lru_cache`, would be a tensor without values in later runs.
    """
    kept = [(part, dict(vars(part)), dict(part._buffers)) for part in module.modules()]
    _clear_caches(module)
    try:
        yield
    finally:
        for part, attributes, buffers in kept:
            for name, value in list(vars(part).items()):
                # of flags nothing is put back: transformers installs hooks once, and notes so
                if value is not attributes.get(name) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                    vars(part).pop(name)
                    vars(part).update({name: attributes[name]} if name in attributes else {})
            part._buffers.clear()
            part._buffers.update(buffers)
        _clear_caches(module)


@contextmanager
def count_free_sizes(module: nn.Module) -> Iterator[None]:
    """Let `len`, `min` and `max` in the model's own code give sizes that stay free, while the context is open.

    Python's own want numbers: `batch_size = len(x)` fixed the batch of RT-DETR's graph at the example's, and
    `min(index_topk, keys.shape[-1])` a sparse attention's choice at one of the two.
    """
    exchanged = [
        (vars(file), name, function)
        for file in list_files(module)
        for name, function in FREE.items()
        if name not in vars(file)
    ]
    for names, name, function in exchanged:
        names[name] = function
    try:
        yield
    finally:
        for names, name, _ in exchanged:
            del names[name]


def _count(x: Any) -> Any:
    return x.shape[0] if isinstance(x, Tensor) else len(x)


def _choose(plain: Callable[..., Any], free: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute `free` of two sizes one of which is free, `plain` of all else."""
    return free(*args) if len(args) == 2 and any(isinstance(x, SymInt) for x in args) else plain(*args, **kwargs)


FREE = {"len": _count, "min": partial(_choose, min, sym_min), "max": partial(_choose, max, sym_max)}
"""Functions of Python, by name, that keep free sizes free."""


def list_files(module: nn.Module) -> list[ModuleType]:
    """Return the files of Python that the modules' code is in, but for torch's own."""
    return _list_files(_list_classes(module))


def _list_classes(module: nn.Module) -> set[type]:
    """Return the classes that the modules are of, but for torch's own."""
    classes = {cls for part in module.modules() for cls in type(part).__mro__}
    return {cls for cls in classes if cls.__module__.partition(".")[0] not in ("torch", "builtins", "compress")}


def _list_files(classes: Iterable[type]) -> list[ModuleType]:
    names = {cls.__module__ for cls in classes}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def _clear_caches(module: nn.Module) -> None:
    """Forget what functions of the modules' classes, and of the files of these, have cached."""
    classes = _list_classes(module)
    homes: list[type | ModuleType] = [*classes, *_list_files(classes)]
    for home in homes:
        name = home.__module__ if isinstance(home, type) else home.__name__
        for value in [getattr(value, "__func__", value) for value in vars(home).values()]:
            if getattr(value, "__module__", None) == name and not isinstance(value, type):
                cells = (cell.cell_contents for cell in getattr(value, "__closure__", None) or ())
                for cached in (value, *cells):  # transformers wraps its cached methods
                    if hasattr(cached, "cache_clear"):
                        cached.cache_clear()
