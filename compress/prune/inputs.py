"""What all layers of a step read, convolutions too, in the order in which a forward meets them. Torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from compress.blocks.lockstep import Tap, run_in_lockstep, tapped
from compress.blocks.sharing import gathered
from compress.blocks.step import BlockStep
from compress.facts import Reading
from compress.prune.matrix import inputs_of

Visit = Callable[[Reading, Tensor], None]


def visit_inputs(step: BlockStep, convolutions: Sequence[str], visit: Visit, act: Callable[[Reading], None]) -> None:
    """One forward of all micro-batches that stops before each reading: `visit` for each micro-batch, then `act`.

    As `BlockStep.lockstep`, but `visit` gets rows [groups, n, in] and each of `convolutions` is a reading too.
    """
    if not convolutions:
        step.lockstep(lambda reading, rows: visit(reading, rows[None]), act)
        return
    taps = _in_order(step, convolutions)
    modules = dict(taps)

    def seen(reading: Reading, x: Tensor, i: int) -> None:
        for rows in inputs_of(modules[reading], x, step.calls[i].rows):
            visit(reading, rows)

    runs = [partial(step.forward, i) for i in range(len(step.calls))]
    with torch.no_grad():
        run_in_lockstep(runs, taps, seen, act, lambda go: go(), outputs=False)


def _in_order(step: BlockStep, convolutions: Sequence[str]) -> list[Tap]:
    """The step's readings and the convolutions as the first micro-batch meets them, the same in all processes.

    What it does not meet comes last.
    """
    readings = (*step.readings, *(Reading((name,)) for name in convolutions))
    taps = [(reading, step.layers[reading.layers[0]]) for reading in readings]
    met: list[int] = []
    if len(step.calls):
        with torch.no_grad(), tapped(taps, lambda number, _: met.append(number)):
            step.forward(0)
    found: list[int] = next((one for one in gathered(met) if one), [])
    return [taps[number] for number in dict.fromkeys([*found, *range(len(taps))])]
