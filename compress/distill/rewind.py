"""Where the weights of a lottery ticket go back to: a module's state early in its first training. Torch.

Frankle et al. 2020, "Linear Mode Connectivity and the Lottery Ticket Hypothesis", arXiv:1912.05671: iterative magnitude
pruning with rewinding to iteration k. They go on from step k; here every training has all of its steps.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from compress.blocks.sharing import main_process
from compress.errors import OutputError
from compress.store.training_state import Tensors, module_state, read_state, restore_module, write_state

FILE = "rewind.safetensors"


class Rewind:
    """A module's state after `step` steps of its first training (0: as it is now), to which it goes back.

    `work`: a folder that outlives a killed run, in which the state is kept once it is reached; None: it is not.
    """

    def __init__(self, module: nn.Module, step: int, work: Path | None) -> None:
        self.module, self.step = module, step
        self.file = None if work is None else work / FILE
        self.state: Tensors | None = None if step else module_state(module)

    def after_step(self, step: int) -> None:
        """Keep the state at its step. To be called after each step of the first training, with its number (from 0)."""
        if step + 1 != self.step:
            return
        self.state = module_state(self.module)
        if self.file is not None and main_process():
            write_state(self.file, self.state, {})

    def restore(self) -> bool:
        """Bring the state back, in place; False if so many steps were never made. OutputError: its file is damaged."""
        if self.state is None and self.file is not None:
            kept = read_state(self.file)
            if kept is None and self.file.exists():
                raise OutputError(f"{self.file}: is damaged, and the first training is over; remove it and its folder")
            self.state = None if kept is None else kept[0]
        if self.state is None:
            return False
        restore_module(self.module, self.state)
        return True
