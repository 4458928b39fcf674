"""The moving average of a module's state while it is trained. Torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from compress.store.training_state import Tensors, distinct, module_state, restore_module


class Average:
    """Parameters and floating-point buffers, averaged exponentially over the steps (Polyak and Juditsky 1992).

    The first steps count less, so that the start is soon forgotten: the decay of step s is at most (1 + s) / (10 + s).
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module, self.decay = module, decay
        self.tensors = {name: tensor.detach().clone() for name, tensor in _floats(module)}

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Update the average after the step of that number, from 0 on."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, tensor in _floats(self.module):
            self.tensors[name].lerp_(tensor.detach(), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the module the average's values while the context is open."""
        values = module_state(self.module)
        restore_module(self.module, self.tensors)
        try:
            yield
        finally:
            restore_module(self.module, values)

    def state(self) -> Tensors:
        """Return the average by name, on the CPU, to be saved."""
        return {name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set the average to what `state` gave."""
        for name, tensor in state.items():
            self.tensors[name].copy_(tensor)


def _floats(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in distinct(module).items() if tensor.is_floating_point())
