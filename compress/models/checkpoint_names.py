"""What a module's tensors are called in a checkpoint: transformers renames some of them when it loads a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""A stacked parameter of all experts -> the layers of each that it holds, in their order."""


@dataclass(frozen=True)
class FileNames:
    """`tensor` and `layer` give the file's name for the module's: the module's own wherever the file's would not lead
    back to it."""

    renamings: tuple[Any, ...] = ()
    forward: tuple[Any, ...] = ()
    converters: tuple[Any, ...] = ()
    prefix: str = ""
    experts: Mapping[str, str] = field(default_factory=dict)
    own: dict[str, bool] = field(default_factory=dict)

    def layer(self, name: str) -> str:
        """Of a module with a weight."""
        renamed = self.tensor(f"{name}.weight")
        return renamed.removesuffix(".weight") if renamed.endswith(".weight") else name

    def tensor(self, name: str) -> str:
        """Of a parameter or buffer."""
        if not self.renamings and not self.experts:
            return name
        from transformers.core_model_loading import apply_renamings

        expert = self._expert(name)
        renamed: str = apply_renamings(expert or name, list(self.renamings))
        return renamed if expert or self._found(renamed) == name else name

    def _expert(self, name: str) -> str | None:
        """An expert's tensor under the leaf that files have: experts.3.w1.weight for experts.3.gate_proj.weight."""
        parts = name.split(".")
        if len(parts) < 4 or parts[-4] != "experts" or not parts[-3].isdigit() or parts[-2] not in self.experts:
            return None
        return ".".join([*parts[:-2], self.experts[parts[-2]], parts[-1]])

    def _found(self, written: str) -> str:
        """The module's name that transformers gives to a tensor of a file."""
        from transformers.core_model_loading import rename_source_key

        forward, converters = list(self.forward), list(self.converters)
        found: str = rename_source_key(written, forward, converters, self.prefix, self.own)[0]
        return found


def file_names(module: nn.Module, own: Iterable[str]) -> FileNames:
    """How the tensors of `module` are called in files: the names that transformers' `save_pretrained` would give.

    `own`: the module's own names. A module that is none of transformers', or a transformers before 5, has no other
    names; what is stacked or split on loading keeps the module's.
    """
    wrapped: Any = getattr(module, "wrapped", module)
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming
    except ImportError:
        return FileNames()
    if not isinstance(wrapped, PreTrainedModel):
        return FileNames()
    saved = get_model_conversion_mapping(wrapped, add_legacy=False)
    loaded = get_model_conversion_mapping(wrapped)
    back = [one.reverse_transform() for one in reversed(saved) if not isinstance(one, PrefixChange)]
    return FileNames(
        renamings=tuple(one for one in back if isinstance(one, WeightRenaming)),
        forward=tuple(one for one in loaded if isinstance(one, WeightRenaming)),
        converters=tuple(one for one in loaded if isinstance(one, WeightConverter)),
        prefix=wrapped.base_model_prefix,
        experts=_expert_leaves(saved),
        own=dict.fromkeys(own, True),
    )


def _expert_leaves(conversions: Iterable[Any]) -> dict[str, str]:
    """gate_proj -> w1, ... where files hold each expert's layers one by one."""
    from transformers.core_model_loading import WeightConverter

    found = {}
    for one in conversions:
        stacked = one._original_target_patterns[0].rpartition(".")[2] if isinstance(one, WeightConverter) else ""
        for projection, source in zip(PROJECTIONS.get(stacked, ()), one._original_source_patterns, strict=False):
            if "experts.*." in source:
                found[projection] = source.partition("experts.*.")[2].removesuffix(".weight")
    return found
