"""Training sets that a program holds and that draw their samples at random: each time anew, by a seed.

A recipe cannot hold an object. It names it beside a file with one draw of each sample, and whoever reads the recipe in
the process that holds the set finds it here; no other process can.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from compress.errors import SourceError

DrawRows = Callable[[np.ndarray], dict[str, Any]]
"""Row numbers int64 [n] -> the columns of these rows, as the set's file has them."""
_HELD: dict[str, DrawRows] = {}


def hold_draws(name: str, draw: DrawRows) -> None:
    """Keep what draws a set's samples, under a name."""
    _HELD[name] = draw


def check_held(name: str) -> None:
    """Raise SourceError unless this process holds a set of that name."""
    if name not in _HELD:
        raise SourceError(
            f"redraw: {name} was given as an object, which the process that it was given to alone has; give "
            "it again as train_dataset, or leave `redraw` out: `source` has one draw of each sample"
        )


def draw_held(name: str, rows: np.ndarray, seed: int) -> dict[str, Any]:
    """Draw rows of a set that this process holds."""
    with seeded(seed):
        return _HELD[name](rows)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let torch (on the CPU), numpy and random draw by a seed while the context is open, and then go on as before."""
    import torch

    generator = torch.default_generator
    states = generator.get_state(), np.random.get_state(), random.getstate()
    generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
