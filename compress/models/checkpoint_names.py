"""What a module's tensors are called in a checkpoint: transformers renames some of them when it loads a file."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from compress.blocks.experts import Experts
from compress.blocks.layers import has_own_formula, is_layer
from compress.blocks.materialise import NamedParts, copy_without_weights, plain

PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""A stacked parameter of all experts -> the layers of each that it holds, in their order."""
SPLIT_NAMES = {"input_linear": ("w1", "w3"), "output_linear": ("w2",)}
"""A stack as files call it -> what vLLM, which takes it apart, calls these layers."""


@dataclass(frozen=True)
class FileNames:
    """`tensor` and `layer` give the file's name for the module's: the module's own wherever the file's would not lead
    back to it."""

    renamings: tuple[Any, ...] = ()
    forward: tuple[Any, ...] = ()
    converters: tuple[Any, ...] = ()
    prefix: str = ""
    experts: Mapping[str, str] = field(default_factory=dict)
    one_by_one: bool = False
    """Whether files hold each expert's layers by themselves, and not in stacks."""
    own: dict[str, bool] = field(default_factory=dict)

    def layer(self, name: str) -> str:
        """Return the file's name for a module with a weight."""
        renamed = self.tensor(f"{name}.weight")
        return renamed.removesuffix(".weight") if renamed.endswith(".weight") else name

    def tensor(self, name: str) -> str:
        """Return the file's name for a parameter or buffer."""
        if not self.renamings and not self.experts:
            return name
        from transformers.core_model_loading import apply_renamings

        expert = self._rename_expert(name)
        renamed: str = apply_renamings(expert or name, list(self.renamings))
        return renamed if expert or self._find_module_name(renamed) == name else name

    def _rename_expert(self, name: str) -> str | None:
        """Return an expert's tensor under the leaf that files have: experts.3.w1.weight for experts.3.gate_proj.weight.

        None for a tensor that is no expert's.
        """
        parts = name.split(".")
        if len(parts) < 4 or parts[-4] != "experts" or not parts[-3].isdigit() or parts[-2] not in self.experts:
            return None
        return ".".join([*parts[:-2], self.experts[parts[-2]], parts[-1]])

    def _find_module_name(self, written: str) -> str:
        """Return the module's name that transformers gives to a tensor of a file."""
        from transformers.core_model_loading import rename_source_key

        forward, converters = list(self.forward), list(self.converters)
        name: str = rename_source_key(written, forward, converters, self.prefix, self.own)[0]
        return name


def file_names(module: nn.Module, own: Iterable[str]) -> FileNames:
    """Return how files call the tensors of `module`: the names that transformers' `save_pretrained` would give.

    `own`: the module's own names. A module that is none of transformers', or a transformers before 5, has no other
    names; what is stacked or split on loading keeps the module's.
    """
    wrapped: Any = getattr(module, "wrapped", module)
    if isinstance(wrapped, NamedParts):
        return FileNames(one_by_one=True)
    if not _is_pretrained(wrapped):
        return FileNames()
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming
    except ImportError:
        return FileNames()
    saved = get_model_conversion_mapping(wrapped, add_legacy=False)
    loaded = get_model_conversion_mapping(wrapped)
    back = [change.reverse_transform() for change in reversed(saved) if not isinstance(change, PrefixChange)]
    return FileNames(
        renamings=tuple(change for change in back if isinstance(change, WeightRenaming)),
        forward=tuple(change for change in loaded if isinstance(change, WeightRenaming)),
        converters=tuple(change for change in loaded if isinstance(change, WeightConverter)),
        prefix=wrapped.base_model_prefix,
        experts=_find_expert_leaves(saved) or _find_split_leaves(saved),
        one_by_one=bool(_find_expert_leaves(saved)),
        own=dict.fromkeys(own, True),
    )


def find_unpackable(module: nn.Module) -> tuple[str, ...]:
    """Return the layers, and mixtures made into layers, that transformers reads as floats alone."""
    if _takes_no_packed(getattr(module, "wrapped", module)):
        return tuple(plain(name) for name, part in module.named_modules() if is_layer(part))
    parts = {plain(name): part for name, part in module.named_modules()}
    names = [name for name, part in parts.items() if isinstance(part, Experts)]
    stacks = [] if not names or file_names(module, ()).one_by_one else names
    spelled = [name for name, part in parts.items() if is_layer(part) and has_own_formula(part)]  # reads its weight
    return (*stacks, *spelled, *_find_initialised(getattr(module, "wrapped", module)))


def _takes_no_packed(model: Any) -> bool:
    """Return whether transformers reads no layer of the model in few bits.

    So it is where it takes a weight of a tower's files apart into several: it has no form of that for what is stored of
    a packed weight, and refuses to load any, unless layers of such names are packed. And where it puts other experts in
    the place of the model's, which the files do not have.
    """
    if not _is_pretrained(model):
        return False
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter
    from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

    if any(type(part).__name__ in MODULES_TO_PATCH_FOR_QUANTIZATION for part in model.modules()):
        return True
    packed = "\n".join(f"{name}.weight" for name, part in model.get_decoder().named_modules() if is_layer(part))
    change: Any
    for change in get_model_conversion_mapping(model):
        sources = change._original_source_patterns if isinstance(change, WeightConverter) else []
        targets = change._original_target_patterns
        if sources and all(source.endswith(".weight") for source in sources):
            try:
                change.copy([*sources, f"{sources[0]}_scale"], targets, operations=list(change.operations))
            except ValueError:
                if not re.search(f"{targets[0]}$", packed, re.MULTILINE):
                    return True
    return False


def find_taken_apart(module: nn.Module, held: Iterable[str], own: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the tensors of files that transformers takes apart as it loads them -> the module's that it makes of each.

    `held`, `own`: the names of the files' and of the module's tensors.
    """
    names, found = file_names(module, own), dict[str, tuple[str, ...]]()
    if not names.converters:
        return found
    from transformers.core_model_loading import rename_source_key

    forward, converters = list(names.forward), list(names.converters)
    for key in held:
        renamed, pattern = rename_source_key(key, forward, converters, names.prefix, names.own)
        change = next((each for each in converters if pattern is not None and pattern in each.source_patterns), None)
        if change is not None and len(change.source_patterns) == 1 < len(change.target_patterns):
            first, *_ = change.target_patterns
            made = tuple(renamed.replace(first, target) for target in change.target_patterns)
            found |= {key: made} if set(made) <= set(own) else {}
    return found


def _is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is one of transformers', without importing that, which takes more than a second."""
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(module, loaded.PreTrainedModel)


def _find_initialised(model: nn.Module) -> list[str]:
    """Return the layers whose weights the model's own code looks at as transformers loads a checkpoint.

    A layer in few bits has no such weight yet, and loading ends with an AttributeError.
    """
    if not _is_pretrained(model):
        return []
    probe = copy_without_weights(model)
    names = {part: name for name, part in probe.named_modules() if type(part) is nn.Linear}
    seen = []

    class NotingLinear(nn.Linear):
        @property
        def weight(self) -> Any:  # type: ignore[override]
            if "weight" not in self._parameters:
                raise AttributeError("weight")
            seen.append(names[self])
            return self._parameters["weight"]

    for layer in names:
        layer.__class__ = NotingLinear
    owner: Any = probe
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for part in probe.modules():
            owner = part if _is_pretrained(part) else owner
            if part not in names:
                with suppress(Exception):  # whatever its code raises; transformers would raise it, too
                    owner._init_weights(part)
                continue
            del part._parameters["weight"]
            try:
                owner._init_weights(part)
            except AttributeError:
                seen.append(names[part])
            except Exception:  # noqa: BLE001  (as above)
                pass
    return list(dict.fromkeys(seen))


def _find_split_leaves(conversions: Iterable[Any]) -> dict[str, str]:
    """Return gate_proj -> w1, ... where files hold stacks under names of SPLIT_NAMES."""
    from transformers.core_model_loading import WeightRenaming

    leaves: dict[str, str] = {}
    for change in conversions:
        if isinstance(change, WeightRenaming):
            stacked = change._original_target_patterns[0].rpartition(".")[2]
            for name, split in SPLIT_NAMES.items():
                if name in change._original_source_patterns[0]:
                    leaves |= dict(zip(PROJECTIONS.get(stacked, ()), split, strict=False))
    return leaves


def _find_expert_leaves(conversions: Iterable[Any]) -> dict[str, str]:
    """Return gate_proj -> w1, ... where files hold each expert's layers one by one, and all of a mixture by themselves.

    Those of several mixtures in one list are told apart by their number alone, which says nothing of one mixture's.
    """
    from transformers.core_model_loading import WeightConverter

    leaves = {}
    for change in conversions:
        single = isinstance(change, WeightConverter) and len(change._original_target_patterns) == 1
        stacked = change._original_target_patterns[0].rpartition(".")[2] if single else ""
        for projection, source in zip(PROJECTIONS.get(stacked, ()), change._original_source_patterns, strict=False):
            if "experts.*." in source:
                leaves[projection] = source.partition("experts.*.")[2].removesuffix(".weight")
    return leaves
