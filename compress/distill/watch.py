"""What modules inside a model give while it runs: hidden states and attention maps, by the module's name. Torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compress.blocks.forward import name_outputs, remove_hooks_on_exit
from compress.blocks.materialise import plain
from compress.distill.vocabulary import Head
from compress.errors import PassError

Feeds = Mapping[str, Tensor]


@dataclass(frozen=True)
class Seen:
    """One forward pass: the model's outputs by name, and by module what it gave and its attention map [b, h, T, T].

    `head`: makes logits of the first output, hidden states [b, T, D]; None where that is the logits.
    """

    outputs: dict[str, Tensor]
    hidden: dict[str, Tensor] = field(default_factory=dict)
    maps: dict[str, Tensor] = field(default_factory=dict)
    head: Head | None = None

    @property
    def first(self) -> Tensor:
        """Return the first output: logits where there are any."""
        return next(iter(self.outputs.values()))


class Watched(AbstractContextManager["Watched"]):
    """A module that tells what the named parts of it gave at each call. Inside `with` only.

    `kind`: the pass that watches, for messages. `head`: the output layer, which is left out.
    """

    def __init__(
        self,
        kind: str,
        module: nn.Module,
        hidden: Sequence[str] = (),
        maps: Sequence[str] = (),
        head: Head | None = None,
    ) -> None:
        self.kind, self.module, self.hidden, self.maps = kind, module, tuple(hidden), tuple(maps)
        self.head = head
        self.handles: list[RemovableHandle] = []
        self.given: dict[str, Any] = {}

    def __enter__(self) -> Watched:
        parts = module_names(self.module)
        wanted = dict.fromkeys((*self.hidden, *self.maps))
        self.handles = [parts[name].register_forward_hook(self._make_hook(name)) for name in wanted]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()
        self.given.clear()

    def __call__(self, feeds: Feeds) -> Seen:
        """Run the module and return what it gave. PassError where a module that is watched was not called."""
        self.given.clear()
        with nullcontext() if self.head is None else self.head.pass_over():
            outputs = name_outputs(self.module(**feeds))
        silent = [name for name in (*self.hidden, *self.maps) if name not in self.given]
        if silent:
            raise PassError(f"{self.kind}: the model runs without calling {silent[0]}; map another module")
        hidden = {name: self._read_tensor(name) for name in self.hidden}
        seen = Seen(outputs, hidden, {name: self.given[name][1] for name in self.maps}, self.head)
        self.given.clear()
        return seen

    def _read_tensor(self, name: str) -> Tensor:
        out = self.given[name]
        item = out[0] if isinstance(out, tuple) and out else out
        if not isinstance(item, Tensor):
            raise PassError(f"{self.kind}: {name} gives {type(out).__name__}, not a tensor; map another module")
        return item

    def _make_hook(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            self.given[name] = out

        return keep


def module_names(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by plain name, in the module's order."""
    return {plain(name): part for name, part in module.named_modules()}


def attention_modules(module: nn.Module, feeds: Feeds) -> list[str]:
    """Return the modules that give (output, attention map) on these feeds, the innermost of each; in their order."""
    names: list[str] = []

    def make_hook(name: str) -> Callable[..., None]:
        def keep(part: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if _has_map(out):
                names.append(name)

        return keep

    handles = [part.register_forward_hook(make_hook(name)) for name, part in module_names(module).items()]
    with remove_hooks_on_exit(handles), torch.no_grad():
        module(**feeds)
    return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]


def _has_map(out: Any) -> bool:
    """Return whether this is a tuple whose second item holds probabilities [b, h, T, T]."""
    if not isinstance(out, tuple) or len(out) < 2 or not isinstance(out[1], Tensor) or out[1].dim() != 4:
        return False
    sums = out[1].sum(-1)
    return out[1].shape[2] == out[1].shape[3] and bool(torch.allclose(sums, torch.ones_like(sums), atol=1e-2))
