"""Whole blocks taken out of a module: out of the list that holds them, or with an identity in their place. Torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from compress.blocks.materialise import plain

KEPT = "_kept_blocks"
"""Attribute of a list that has lost blocks: the numbers that those still in it had as the model's code built it."""


def numbers_of(blocks: nn.ModuleList) -> tuple[int, ...]:
    """Of the blocks in a list, as the model's code counts them."""
    return getattr(blocks, KEPT, None) or tuple(range(len(blocks)))


def is_listed(module: nn.Module, name: str) -> bool:
    """True if the module of that name lies in a list that the model's code goes through."""
    return isinstance(_parent(module, name)[0], nn.ModuleList)


def remove_blocks(module: nn.Module, names: Sequence[str]) -> None:
    """Take blocks out of `module`, in place, all named as they are before the first goes.

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
    for blocks, gone in lists.items():
        keep_blocks(blocks, [number for key, number in enumerate(numbers_of(blocks)) if str(key) not in gone])


def put_identity(module: nn.Module, name: str) -> None:
    """In place of a module inside `module`."""
    parent, key = _parent(module, name)
    setattr(parent, key, nn.Identity())


def _parent(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """What holds the module of that (plain) name, and under which key."""
    path, _, key = name.rpartition(".")
    modules = {plain(own): part for own, part in module.named_modules()}
    parent = modules[path] if path else getattr(module, "wrapped", module)
    return parent, key


def keep_blocks(blocks: nn.ModuleList, wanted: Sequence[int]) -> None:
    """Leave the blocks of these numbers (see `numbers_of`) in the list, in place.

    A list that is as short already, because a configuration says so, is only told what its blocks are.
    """
    known = numbers_of(blocks)
    if len(known) != len(wanted):
        own = _own_numbers(blocks)
        for key in sorted(set(range(len(known))) - {known.index(number) for number in wanted}, reverse=True):
            del blocks[key]
        for key, block in enumerate(blocks):
            for path, attribute, offset in own:
                setattr(block.get_submodule(path), attribute, key + offset)
    setattr(blocks, KEPT, tuple(wanted))


def _own_numbers(blocks: nn.ModuleList) -> list[tuple[str, str, int]]:
    """(module inside a block, attribute, offset) of what holds the block's own place in the list, in every block.

    Attention finds its keys and values in the cache by such a number.
    """
    found = [_whole_numbers(block, place) for place, block in enumerate(blocks)]
    return sorted(set.intersection(*found)) if len(found) > 1 else []


def _whole_numbers(block: nn.Module, place: int) -> set[tuple[str, str, int]]:
    return {
        (path, key, value - place)
        for path, part in block.named_modules()
        for key, value in vars(part).items()
        if type(value) is int and not key.startswith("_")
    }
