"""A deep model looked at through its first blocks: eighty blocks of one kind tell no more than two of them.

A model's code is run for its facts with the chain of blocks cut to a beginning that has every kind of block twice; what
was found of a kept block then stands for those of its kind that were left out. Blocks are of one kind where their
modules have the same classes, parameters and settings, up to numbers that count the blocks. Where anything found ties
kept blocks together (beyond a stream that all share), or the model does not run so, the caller runs it whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from compress.blocks.experts import Experts
from compress.blocks.layers import Work, is_layer
from compress.blocks.materialise import plain
from compress.facts import BlockFacts, InputGroup, Structure

OF_EACH = 2
"""Blocks of a kind that are run: the first alone might be found otherwise than those that follow another."""
FEWEST_LEFT_OUT = 8
"""A shorter rest is run as well."""
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class CutChain:
    """A list of blocks cut to its beginning. `models`: number of a block left out -> the kept one of its kind.

    `path`: of the list in the module; `name`: its plain name, as of facts.
    """

    path: str
    name: str
    n_kept: int
    models: Mapping[int, int]

    @property
    def width(self) -> int:
        """Return how many blocks those left out are like: as many repeat in turn."""
        return len(set(self.models.values()))

    def spread(self, work: Work) -> Work:
        """Return what layers multiply, with the same for those of the blocks that were left out."""
        spread = dict(work)
        for number, model in self.models.items():
            start, like = self.prefix(model), self.prefix(number)
            inside = {name: done for name, done in work.items() if name.startswith(start)}
            spread |= {like + name.removeprefix(start): done for name, done in inside.items()}
        return spread

    def prefix(self, number: int) -> str:
        """Return how the names of what is in a block begin."""
        return f"{self.name}.{number}."

    def extend(self, structure: Structure) -> Structure | None:
        """Return the structure of the whole model; None where what was found does not say it."""
        kept = [f"{self.name}.{number}" for number in range(self.n_kept)]
        if [block.name for block in structure.blocks] != kept or self._ties_blocks(structure):
            return None
        blocks = [*structure.blocks, *(self._copy_block(structure.blocks[m], m, n) for n, m in self.models.items())]
        residual = structure.residual
        if residual is not None:
            rows = self._continue_rows([(norm, *layers) for norm, layers in residual.norms])
            residual = replace(
                residual,
                writers=self._continue(residual.writers),
                readers=self._continue(residual.readers),
                norms=tuple((row[0], row[1:]) for row in rows),
            )
        routers = self._continue(structure.routers)
        return replace(structure, blocks=tuple(blocks), residual=residual, routers=routers)

    def _find_number(self, name: str) -> int | None:
        """Return the number of the block that a module lies in; None outside of all."""
        match = re.match(re.escape(self.name) + r"\.(\d+)\.", name)
        return int(match[1]) if match else None

    def _ties_blocks(self, structure: Structure) -> bool:
        """Return whether an input group, or a norm of the stream, has modules of several blocks."""
        groups = [(*input_group.layers, input_group.source) for input_group in structure.input_groups]
        groups += [(norm, *layers) for norm, layers in (structure.residual.norms if structure.residual else ())]
        return any(len({self._find_number(name) for name in group if name}) > 1 for group in groups)

    def _copy_block(self, block: BlockFacts, model: int, number: int) -> BlockFacts:
        def rename(name: str) -> str:
            return self.prefix(number) + name.removeprefix(self.prefix(model)) if name else ""

        input_groups = tuple(self._rename_input_group(input_group, rename) for input_group in block.input_groups)
        experts = tuple(tuple(map(rename, layers)) for layers in block.experts)
        return BlockFacts(f"{self.name}.{number}", input_groups, experts)

    @staticmethod
    def _rename_input_group(input_group: InputGroup, rename: Any) -> InputGroup:
        return replace(input_group, layers=tuple(map(rename, input_group.layers)), source=rename(input_group.source))

    def _continue(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return names in the order in which they run, with those of the blocks left out behind the kept blocks'."""
        return tuple(name for name, *_ in self._continue_rows([(name,) for name in names]))

    def _continue_rows(self, rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        numbers = [self._find_number(row[0]) for row in rows]
        last = max((i for i, number in enumerate(numbers) if number is not None), default=-1)
        more = [
            tuple(self.prefix(number) + name.removeprefix(self.prefix(model)) for name in row)
            for number, model in self.models.items()
            for row, of in zip(rows, numbers, strict=True)
            if of == model
        ]
        return [*rows[: last + 1], *more, *rows[last + 1 :]]


@contextmanager
def cut_chain(module: nn.Module, repeated: bool = False, within: nn.Module | None = None) -> Iterator[CutChain | None]:
    """Cut the module's one chain of blocks while the context is open; None where there is nothing to gain.

    `repeated`: what is left out repeats, in order, what the last kept blocks are: in threes, where every third block is
    of another kind. Those stand behind their like once more, and behind at least one block. `within`: the part of the
    module whose chain it is, of a model that has towers beside.
    """
    inside = set((within or module).modules())
    lists = [
        (name, part)
        for name, part in module.named_modules()
        if type(part) is nn.ModuleList and not isinstance(part, Experts) and any(map(is_layer, part.modules()))
        if part in inside
    ]
    outermost = [(name, part) for name, part in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    cut = None
    if len(outermost) == 1:
        name, blocks = outermost[0]
        kinds = _find_kinds(blocks, _list_by_block(within or module, blocks)) if len(blocks) > FEWEST_LEFT_OUT else []
        models = _find_repeats(kinds) if repeated else _find_models(kinds)
        cut = CutChain(name, plain(name), min(models), models) if len(models) >= FEWEST_LEFT_OUT else None
    if cut is None:
        yield None
        return
    whole = dict(blocks._modules)
    try:
        blocks._modules = dict(list(whole.items())[: cut.n_kept])
        yield cut
    finally:
        blocks._modules = whole


def _list_by_block(module: nn.Module, blocks: nn.ModuleList) -> list[Any]:
    """Return the lists of the configuration with an entry for each block, which the code may look up as it runs."""
    configs = [part.config for part in module.modules() if hasattr(part, "config") and hasattr(part.config, "__dict__")]
    values = [value for config in configs[:1] for value in vars(config).values()]
    return [value for value in values if isinstance(value, tuple | list) and len(value) == len(blocks)]


def _find_kinds(blocks: nn.ModuleList, by_block: list[Any]) -> list[Any]:
    """Return what each block is, equal for blocks of one kind."""
    settings = [dict(_list_settings(block)) for block in blocks]
    counts = {key for key in settings[0] if _counts_blocks([known.get(key) for known in settings])}
    return [
        (tuple((key, _describe(value)) for key, value in known.items() if key not in counts), *map(repr, values))
        for known, *values in zip(settings, *by_block, strict=True)
    ]


def _find_models(kinds: list[Any]) -> dict[int, int]:
    """Return block to leave out -> block of its kind to keep: the last of OF_EACH, which lie before all left out."""
    seen: dict[Any, list[int]] = {}
    for number, kind in enumerate(kinds):
        seen.setdefault(kind, []).append(number)
    n_kept = 1 + max((numbers[:OF_EACH][-1] for numbers in seen.values()), default=0)
    return {n: max(k for k in seen[kinds[n]] if k < n_kept) for n in range(n_kept, len(kinds))}


def _find_repeats(kinds: list[Any]) -> dict[int, int]:
    """Return block to leave out -> block of its kind to keep: the last kept ones, in order, again and again."""
    n = len(kinds)
    for n_kept in range(3, n):
        for width in range(1, (n_kept + 1) // 2):
            start = n_kept - 2 * width
            if (n - n_kept) % width == 0 and all(kinds[i] == kinds[i + width] for i in range(start, n - width)):
                return {i: n_kept - width + (i - n_kept) % width for i in range(n_kept, n)}
    return {}


def _list_settings(block: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield (path of a part, key) and value of all that decides how a block runs: classes, tensors, attributes."""
    for path, part in block.named_modules():
        yield (path, "class"), type(part)
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            yield (path, f"tensor {key}"), None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        for key, value in vars(part).items():
            if not key.startswith("_") and key != "training":
                yield (path, key), value


def _counts_blocks(values: list[Any]) -> bool:
    """Return whether a setting is the block's own number, from whatever it is counted."""
    return all(type(value) is int for value in values) and all(
        value - values[0] == number for number, value in enumerate(values)
    )


def _describe(value: Any) -> str:
    """Return a setting in words: an object is itself, where it is no function or plain value."""
    if isinstance(value, (*PLAIN, tuple, list, torch.dtype)):
        return repr(value)
    if isinstance(value, partial):
        return f"{_describe(value.func)} {value.args!r} {value.keywords!r}"
    return str(getattr(value, "__qualname__", "")) or f"{type(value).__name__} {id(value)}"
