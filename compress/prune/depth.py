"""What each whole block is worth: the error of the outputs without it, or how little it turns what goes through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from compress.blocks.activations import MicroBatch
from compress.blocks.materialise import plain
from compress.blocks.trace import remove_hooks_on_exit
from compress.errors import PassError
from compress.quantize.outputs import first_output

Progress = Callable[[Sequence[Any], str], Iterable[Any]]


class Skipping:
    """Lets a module run without some of its blocks. `blocks`: all that may be left out; `sample`: any feeds."""

    def __init__(self, module: nn.Module, blocks: Sequence[str], sample: Mapping[str, Tensor]) -> None:
        self.module, self.blocks = module, tuple(blocks)
        modules = {plain(name): part for name, part in module.named_modules()}
        self.modules = {name: modules[name] for name in blocks}
        self.in_tuples = _find_blocks_with_tuples(module, self.modules, sample)

    @contextmanager
    def without(self, names: Iterable[str]) -> Iterator[None]:
        """Make the named blocks return the tensor that they read, while the context is open.

        It comes in the type of their own output: alone, or in a tuple.
        """
        chosen = [(self.modules[name], name in self.in_tuples) for name in names]
        for block, in_tuple in chosen:
            block.forward = _forward_first_tensor_in_tuple if in_tuple else _forward_first_tensor
        try:
            yield
        finally:
            for block, _ in chosen:
                del block.forward


def _find_blocks_with_tuples(
    module: nn.Module, blocks: Mapping[str, nn.Module], sample: Mapping[str, Tensor]
) -> set[str]:
    """Return the blocks that give their tensor in a tuple, as some of transformers' do."""
    names: set[str] = set()

    def watch(name: str) -> Callable[..., None]:
        return lambda block, args, out: names.add(name) if isinstance(out, tuple) else None

    handles = [block.register_forward_hook(watch(name)) for name, block in blocks.items()]
    with remove_hooks_on_exit(handles), torch.no_grad():
        module(**sample)
    return names


def _forward_first_tensor(*args: Any, **kwargs: Any) -> Tensor:
    """Return the first tensor among the arguments: the forward of a block that is skipped."""
    return _find_first_tensor(args, kwargs)


def _forward_first_tensor_in_tuple(*args: Any, **kwargs: Any) -> tuple[Tensor]:
    return (_find_first_tensor(args, kwargs),)


def _find_first_tensor(args: Any, kwargs: Any) -> Tensor:
    return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


@dataclass(frozen=True)
class Removal:
    """Blocks in the order in which they go. `errors`: of the outputs once each has gone, those before it too."""

    names: tuple[str, ...]
    errors: tuple[float, ...]


def least_error(
    skipping: Skipping, n_gone: int, batches: Sequence[MicroBatch], progress: Progress = lambda items, text: items
) -> Removal:
    """Choose `n_gone` blocks one after another, each the one without which the outputs err least (`Outputs.error_of`).

    A block's error is taken not to fall as others go, so that it is told anew only when its last one is the least
    (Minoux 1978, lazy greedy): of n blocks, n passes over the batches and a few for each that goes.
    """
    whole = Outputs(skipping.module, batches)
    last = dict.fromkeys(skipping.blocks, 0.0)
    removed: list[str] = []
    errors: list[float] = []
    for _ in progress(range(n_gone), "blocks chosen"):
        updated: set[str] = set()
        while (best := min(last, key=last.__getitem__)) not in updated:
            with skipping.without([*removed, best]):
                last[best] = whole.error_of(skipping.module)
            updated.add(best)
        removed.append(best)
        errors.append(last.pop(best))
    return Removal(tuple(removed), tuple(errors))


def angular_distances(module: nn.Module, blocks: Sequence[str], batches: Sequence[MicroBatch]) -> dict[str, float]:
    """Return block -> 1 - cosine of what it reads and gives, the mean over tokens or pixels. Padding does not count.

    ShortGPT's block influence (Men et al. 2024, arXiv:2403.03853, equation 1).
    """
    modules = {plain(name): part for name, part in module.named_modules()}
    sums = dict.fromkeys(blocks, (0.0, 0))
    rows: list[Tensor | None] = [None]

    def watch(name: str) -> Callable[..., None]:
        def hook(block: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            read, given = _move_channels_last(_find_first_tensor(args, kwargs)), _move_channels_last(first_output(out))
            distance = 1 - functional.cosine_similarity(read, given, dim=-1)
            distance = distance if rows[0] is None else distance[rows[0]]
            total, n = sums[name]
            sums[name] = total + float(distance.double().sum()), n + distance.numel()

        return hook

    handles = [modules[name].register_forward_hook(watch(name), with_kwargs=True) for name in blocks]
    with remove_hooks_on_exit(handles), torch.no_grad():
        for batch in batches:
            rows[0] = batch.rows
            module(**batch.feeds)
    return {name: total / n for name, (total, n) in sums.items()}


def _move_channels_last(value: Tensor) -> Tensor:
    """Return the tensor with the channels of an image last."""
    return value.movedim(1, -1) if value.dim() == 4 else value


class Outputs:
    """What a model gives on calibration data, to compare others with."""

    def __init__(self, module: nn.Module, batches: Sequence[MicroBatch]) -> None:
        if not batches:
            raise PassError("there is no calibration data; give the recipe a calibration set")
        self.batches = batches
        self.whole = [_compute_rows(module, batch) for batch in batches]
        n = sum(len(rows) for rows in self.whole)
        mean = sum((rows.sum(0, dtype=torch.float64) for rows in self.whole), torch.zeros(())) / n
        self.spread = sum(float((rows - mean).square().sum()) for rows in self.whole)

    def error_of(self, module: nn.Module) -> float:
        """Return another model's squared error over the squared distance of these outputs from their mean.

        1: nothing of them is left.
        """
        pairs = zip(self.batches, self.whole, strict=True)
        squares = sum(float((_compute_rows(module, batch) - rows).double().square().sum()) for batch, rows in pairs)
        return squares / max(self.spread, 1e-300)


def _compute_rows(module: nn.Module, batch: MicroBatch) -> Tensor:
    """Return a module's first output as rows [n, width], float32, without padding."""
    with torch.no_grad():
        out = first_output(module(**batch.feeds)).float()
    if batch.rows is not None and out.dim() == 3:
        return out[batch.rows]
    return out.flatten(0, -2)
