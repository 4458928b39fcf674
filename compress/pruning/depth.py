"""Tell what each whole block is worth, the error of the outputs without it, and take blocks out for good."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from compress.blocks.activations import MicroBatch
from compress.blocks.depth import numbers_of, remove_blocks
from compress.blocks.experts import unstack_experts
from compress.blocks.forward import name_outputs, remove_hooks_on_exit
from compress.blocks.materialise import empty_weights, plain
from compress.blocks.sizes import UNFIT_NUMBERS, rebuild_config, transformers_config
from compress.errors import PassError
from compress.rounding.outputs import model_output
from runtime.progress import Progress, no_progress

CLOSE = 1e-4
"""Largest difference of outputs, relative to the largest output, at which a model without blocks computes what one does
that skips them. A bound above float32's rounding, not measured."""
Settings = Mapping[str, Any]
Lists = Mapping[str, Sequence[int]]
ModelOutputs = Sequence[Tensor]


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
    """Blocks in the order in which they go. `errors`: of the outputs once each has gone with those before it."""

    names: tuple[str, ...]
    errors: tuple[float, ...]


def least_error(
    skipping: Skipping, n_gone: int, batches: Sequence[MicroBatch], progress: Progress = no_progress
) -> Removal:
    """Choose `n_gone` blocks one after another, each the one without which the outputs err least (`Outputs.error_of`).

    A block's error is taken not to fall as others go, so that it is told anew only when its last one is the least
    (Minoux 1978, lazy greedy): of n blocks, n passes over the batches and a few for each that goes.
    """
    whole = BlockOutputs(skipping.module, batches)
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


class BlockOutputs:
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
        out = model_output(module(**batch.feeds), batch.feeds).float()
    if batch.rows is not None and out.dim() == 3:
        return out[batch.rows]
    return out.flatten(0, -2)


def shorten(skipping: Skipping, names: Sequence[str], sample: Mapping[str, Tensor]) -> bool:
    """Remove blocks from the module, in place, and return False if its transformers configuration cannot say so.

    Numbers and lists of `config` that tell how many blocks there are, and of what kind, change with it. PassError where
    the smaller module does not give what the whole one gives when these blocks hand on what they read.

    What a configuration calls them is found by trying, not by name.
    """
    module = skipping.module
    with skipping.without(names):
        wanted = _compute_outputs(module, sample)
    before = _find_block_lists(module)
    remove_blocks(module, names)
    config = transformers_config(module)
    if config is None:
        _require_agreement(module, sample, wanted)
        return True
    tries = _list_candidates(before, _find_block_lists(module), config.to_dict())
    for changes in tries:
        with_them = _copy_with(config, changes)
        if with_them is not None and _agrees(_rebuild_model(module, with_them), sample, wanted):
            _apply_changes(config, changes)
            _require_agreement(module, sample, wanted)
            return True
    _apply_changes(config, {key: value for key, value in tries[0].items() if isinstance(value, list)})
    _require_agreement(module, sample, wanted)
    return False


def _require_agreement(module: nn.Module, sample: Mapping[str, Tensor], wanted: ModelOutputs) -> None:
    if not _agrees(module, sample, wanted):
        raise PassError(
            "the model's code fixes how many blocks there are, or computes by a block's number, so that it does not "
            "run as it should with fewer; let it go through the list of its blocks"
        )


def _agrees(module: nn.Module | None, sample: Mapping[str, Tensor], wanted: ModelOutputs) -> bool:
    """Return whether a module gives these outputs, to rounding."""
    if module is None:
        return False
    try:
        outputs = _compute_outputs(module, sample)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):  # it does not run: the answer
        return False
    if [tensor.shape for tensor in outputs] != [tensor.shape for tensor in wanted]:
        return False
    return all(
        float((a - b).abs().max()) <= CLOSE * float(b.abs().max().clamp_min(1e-30))
        for a, b in zip(outputs, wanted, strict=True)
    )


def _compute_outputs(module: nn.Module, sample: Mapping[str, Tensor]) -> ModelOutputs:
    with torch.no_grad():
        return list(name_outputs(module(**sample)).values())


def _find_block_lists(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return list of blocks -> their numbers."""
    return {plain(path): numbers_of(part) for path, part in module.named_modules() if isinstance(part, nn.ModuleList)}


def _list_candidates(before: Lists, after: Lists, config: Settings) -> list[dict[str, Any]]:
    """Return changes to try, the likeliest first: lists with one entry a block, and one or two numbers of blocks."""
    candidates: list[dict[str, Any]] = []
    for path, numbers in after.items():
        if len(numbers) < len(before[path]):
            candidates += _list_settings(config, len(before[path]), [before[path].index(number) for number in numbers])
    return candidates or [{}]


def _list_settings(config: Settings, n_before: int, kept: Sequence[int]) -> list[dict[str, Any]]:
    lists = {
        key: [value[place] for place in kept]
        for key, value in config.items()
        if isinstance(value, list) and len(value) == n_before
    }
    counts = [key for key, value in config.items() if type(value) is int and value == n_before]
    counts.sort(key=lambda key: "layer" not in key)
    singles = [{key: len(kept)} for key in counts]
    pairs = [{a: len(kept), b: len(kept)} for i, a in enumerate(counts) for b in counts[i + 1 :]]
    return [lists | change for change in (*singles, *pairs)] or [lists]


def _apply_changes(config: Any, changes: Settings) -> None:
    """Set the changed fields, lists first: a number of layers is checked against them."""
    for key, value in sorted(changes.items(), key=lambda item: not isinstance(item[1], list)):
        setattr(config, key, value)


def _copy_with(config: Any, changes: Settings) -> Any:
    """Return a changed copy; None where a field does not take such a value, or its class refuses them together."""
    changed = copy.deepcopy(config)
    try:
        _apply_changes(changed, changes)
        rebuild_config(changed, {})
    except UNFIT_NUMBERS:
        return None
    return changed


def _rebuild_model(module: nn.Module, config: Any) -> nn.Module | None:
    """Return what the configuration builds, with the module's values; None where it builds none, or other tensors.

    Parts that the module was loaded without (a pooler that nothing reads) hold zeros.
    """
    model = getattr(module, "wrapped", module)
    try:
        with empty_weights(), torch.random.fork_rng(devices=[]):
            rebuilt: nn.Module = type(model)(config).eval()
            unstack_experts(rebuilt)
    except UNFIT_NUMBERS:
        return None
    old, new = dict(model.named_parameters()), dict(rebuilt.named_parameters())
    lengths = [{path: len(numbers) for path, numbers in _find_block_lists(one).items()} for one in (model, rebuilt)]
    if lengths[0] != lengths[1] or any(name not in new or new[name].shape != one.shape for name, one in old.items()):
        return None
    _share_values(rebuilt, model)
    if model is module:
        return rebuilt
    wrapper = copy.copy(module)
    wrapper._modules = {**module._modules, "wrapped": rebuilt}
    return wrapper


def _share_values(rebuilt: nn.Module, model: nn.Module) -> None:
    """Share parameters and stored buffers of one name between the two models; fill other parameters with zeros."""
    state = model.state_dict(keep_vars=True)
    for path, part in rebuilt.named_modules():
        for key, old in [*part._parameters.items(), *part._buffers.items()]:
            values = state.get(f"{path}.{key}" if path else key)
            if old is not None and key in part._parameters:
                part._parameters[key] = _to_parameter(torch.zeros(old.shape) if values is None else values)
            elif values is not None:
                part._buffers[key] = values


def _to_parameter(values: Tensor) -> nn.Parameter:
    return values if isinstance(values, nn.Parameter) else nn.Parameter(values, requires_grad=False)
