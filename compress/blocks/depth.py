"""Whole blocks taken out of a module: out of the list that holds them, or with an identity in their place. Torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from compress.blocks.materialise import plain

KEPT = "_kept_blocks"
"""Attribute of a list that has lost blocks: the numbers that those still in it had as the model's code built it."""


def numbers_of(blocks: nn.ModuleList) -> tuple[int, ...]:
    """Return the numbers of the blocks in a list, as the model's code counts them."""
    return getattr(blocks, KEPT, None) or tuple(range(len(blocks)))


def remove_blocks(module: nn.Module, names: Sequence[str]) -> None:
    """Remove the named blocks from `module`, in place; names are those before the first removal.

    Those in a `ModuleList` leave it, and the ones behind them move up; any other gets an identity in its place, so that
    names stay.
    """
    lists: dict[nn.ModuleList, set[str]] = {}
    for name in names:
        parent, key = _parent(module, name)
        if isinstance(parent, nn.ModuleList):
            lists.setdefault(parent, set()).add(key)
        else:
            put_identity(module, name)
    for blocks, removed in lists.items():
        keep_blocks(blocks, [number for key, number in enumerate(numbers_of(blocks)) if str(key) not in removed])


def put_identity(module: nn.Module, name: str) -> None:
    """Replace the submodule of that name inside `module` by an identity, in place."""
    parent, key = _parent(module, name)
    setattr(parent, key, nn.Identity())


def _parent(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds the submodule of that (plain) name, and the key under which it does."""
    path, _, key = name.rpartition(".")
    modules = {plain(inner): part for inner, part in module.named_modules()}
    parent = modules[path] if path else getattr(module, "wrapped", module)
    return parent, key


def keep_blocks(blocks: nn.ModuleList, wanted: Sequence[int]) -> None:
    """Keep only the blocks of these numbers (see `numbers_of`) in the list, in place.

    A list that is as short already, because a configuration says so, is only told what its blocks are.
    """
    known = numbers_of(blocks)
    if len(known) != len(wanted):
        index_attributes = _find_index_attributes(blocks)
        for key in sorted(set(range(len(known))) - {known.index(number) for number in wanted}, reverse=True):
            del blocks[key]
        for key, block in enumerate(blocks):
            for path, attribute, offset in index_attributes:
                setattr(block.get_submodule(path), attribute, key + offset)
    setattr(blocks, KEPT, tuple(wanted))


def _find_index_attributes(blocks: nn.ModuleList) -> list[tuple[str, str, int]]:
    """Return (module inside a block, attribute, offset) of what holds the block's place in the list, in every block.

    Attention finds its keys and values in the cache by such a number.
    """
    by_block = [_find_int_attributes(block, place) for place, block in enumerate(blocks)]
    return sorted(set.intersection(*by_block)) if len(by_block) > 1 else []


def _find_int_attributes(block: nn.Module, place: int) -> set[tuple[str, str, int]]:
    return {
        (path, key, value - place)
        for path, part in block.named_modules()
        for key, value in vars(part).items()
        if type(value) is int and not key.startswith("_")
    }
