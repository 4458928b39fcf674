"""Whole blocks taken out for good, and a transformers configuration that says so: found by trying, not by name."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from compress.blocks.depth import numbers_of, remove_blocks
from compress.blocks.experts import unstack_experts
from compress.blocks.materialise import empty_weights, plain
from compress.blocks.sizes import transformers_config
from compress.blocks.trace import named_outputs
from compress.errors import PassError
from compress.prune.configuration import UNFIT_NUMBERS
from compress.prune.depth import Skipping

CLOSE = 1e-4
"""Largest difference of outputs, relative to the largest output, that leaves two models the same."""
Settings = Mapping[str, Any]
Lists = Mapping[str, Sequence[int]]
Outputs = Sequence[Tensor]


def shorten(skipping: Skipping, names: Sequence[str], sample: Mapping[str, Tensor]) -> bool:
    """Take blocks out of the module, in place; False if it is a transformers model whose configuration cannot say it.

    Numbers and lists of `config` that tell how many blocks there are, and of what kind, change with it. PassError where
    the smaller module does not give what the whole one gives when these blocks hand on what they read.
    """
    module = skipping.module
    with skipping.without(names):
        wanted = _outputs(module, sample)
    before = _lists(module)
    remove_blocks(module, names)
    config = transformers_config(module)
    if config is None:
        _require(module, sample, wanted)
        return True
    tries = _candidates(before, _lists(module), config.to_dict())
    for changes in tries:
        with_them = _changed(config, changes)
        if with_them is not None and _agrees(_rebuilt(module, with_them), sample, wanted):
            _apply(config, changes)
            _require(module, sample, wanted)
            return True
    _apply(config, {key: value for key, value in tries[0].items() if isinstance(value, list)})
    _require(module, sample, wanted)
    return False


def _require(module: nn.Module, sample: Mapping[str, Tensor], wanted: Outputs) -> None:
    if not _agrees(module, sample, wanted):
        raise PassError(
            "the model's code fixes how many blocks there are, or computes by a block's number, so that it does not "
            "run as it should with fewer; let it go through the list of its blocks"
        )


def _agrees(module: nn.Module | None, sample: Mapping[str, Tensor], wanted: Outputs) -> bool:
    """True if it gives these outputs, to rounding."""
    if module is None:
        return False
    try:
        found = _outputs(module, sample)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):  # it does not run: the answer
        return False
    if [one.shape for one in found] != [one.shape for one in wanted]:
        return False
    return all(
        float((a - b).abs().max()) <= CLOSE * float(b.abs().max().clamp_min(1e-30))
        for a, b in zip(found, wanted, strict=True)
    )


def _outputs(module: nn.Module, sample: Mapping[str, Tensor]) -> Outputs:
    with torch.no_grad():
        return list(named_outputs(module(**sample)).values())


def _lists(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """List of blocks -> their numbers."""
    return {plain(path): numbers_of(part) for path, part in module.named_modules() if isinstance(part, nn.ModuleList)}


def _candidates(before: Lists, after: Lists, config: Settings) -> list[dict[str, Any]]:
    """Changes to try, the likeliest first: lists with an entry for each block, and one or two numbers of blocks."""
    found: list[dict[str, Any]] = []
    for path, numbers in after.items():
        if len(numbers) < len(before[path]):
            found += _settings(config, len(before[path]), [before[path].index(number) for number in numbers])
    return found or [{}]


def _settings(config: Settings, n_before: int, kept: Sequence[int]) -> list[dict[str, Any]]:
    lists = {
        key: [value[place] for place in kept]
        for key, value in config.items()
        if isinstance(value, list) and len(value) == n_before
    }
    counts = [key for key, value in config.items() if type(value) is int and value == n_before]
    counts.sort(key=lambda key: "layer" not in key)
    singles = [{key: len(kept)} for key in counts]
    pairs = [{a: len(kept), b: len(kept)} for i, a in enumerate(counts) for b in counts[i + 1 :]]
    return [lists | one for one in (*singles, *pairs)] or [lists]


def _apply(config: Any, changes: Settings) -> None:
    """Lists first: a number of layers is checked against them."""
    for key, value in sorted(changes.items(), key=lambda one: not isinstance(one[1], list)):
        setattr(config, key, value)


def _changed(config: Any, changes: Settings) -> Any:
    """A changed copy; None where a field does not take such a value."""
    made = copy.deepcopy(config)
    try:
        _apply(made, changes)
    except (StrictDataclassError, TypeError, ValueError, AttributeError):
        return None
    return made


def _rebuilt(module: nn.Module, config: Any) -> nn.Module | None:
    """What the configuration builds, with the module's values; None where it builds none, or other tensors.

    Parts that the module was loaded without (a pooler that nothing reads) hold zeros.
    """
    model = getattr(module, "wrapped", module)
    try:
        with empty_weights(), torch.random.fork_rng(devices=[]):
            made: nn.Module = type(model)(config).eval()
            unstack_experts(made)
    except UNFIT_NUMBERS:
        return None
    own, new = dict(model.named_parameters()), dict(made.named_parameters())
    lengths = [{path: len(numbers) for path, numbers in _lists(one).items()} for one in (model, made)]
    if lengths[0] != lengths[1] or any(name not in new or new[name].shape != one.shape for name, one in own.items()):
        return None
    _take_values(made, model)
    if model is module:
        return made
    wrapper = copy.copy(module)
    wrapper._modules = {**module._modules, "wrapped": made}
    return wrapper


def _take_values(made: nn.Module, model: nn.Module) -> None:
    """Parameters and stored buffers of one name become one tensor; others are filled with zeros."""
    own = model.state_dict(keep_vars=True)
    for path, part in made.named_modules():
        for key, old in [*part._parameters.items(), *part._buffers.items()]:
            values = own.get(f"{path}.{key}" if path else key)
            if old is not None and key in part._parameters:
                part._parameters[key] = _parameter(torch.zeros(old.shape) if values is None else values)
            elif values is not None:
                part._buffers[key] = values


def _parameter(values: Tensor) -> nn.Parameter:
    return values if isinstance(values, nn.Parameter) else nn.Parameter(values, requires_grad=False)
