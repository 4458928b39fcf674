"""What all layers of a step read, convolutions too, in the order in which a forward meets them. Torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from compress.blocks.lockstep import Tap, run_in_lockstep, tap_inputs
from compress.blocks.sharing import gather_from_processes
from compress.blocks.step import BlockStep
from compress.facts import Reading
from compress.prune.matrix import inputs_of

Visit = Callable[[Reading, Tensor], None]


def visit_inputs(step: BlockStep, convolutions: Sequence[str], visit: Visit, act: Callable[[Reading], None]) -> None:
    """Run all micro-batches once and stop before each reading: `visit` for each micro-batch, then `act`.

    Works like `BlockStep.lockstep`, but `visit` gets rows [groups, n, in] and each of `convolutions` is a reading too.
    """
    if not convolutions:
        step.lockstep(lambda reading, rows: visit(reading, rows[None]), act)
        return
    taps = _order_taps(step, convolutions)
    modules = dict(taps)

    def visit_rows(reading: Reading, x: Tensor, i: int) -> None:
        for rows in inputs_of(modules[reading], x, step.calls[i].rows):
            visit(reading, rows)

    runs = [partial(step.forward, i) for i in range(len(step.calls))]
    with torch.no_grad():
        run_in_lockstep(runs, taps, visit_rows, act, lambda go: go(), outputs=False)


def _order_taps(step: BlockStep, convolutions: Sequence[str]) -> list[Tap]:
    """Return the step's readings and the convolutions as the first micro-batch meets them, the same in all processes.

    What it does not meet comes last.
    """
    readings = (*step.readings, *(Reading((name,)) for name in convolutions))
    taps = [(reading, step.layers[reading.layers[0]]) for reading in readings]
    met: list[int] = []
    if len(step.calls):
        with torch.no_grad(), tap_inputs(taps, lambda number, _: met.append(number)):
            step.forward(0)
    order: list[int] = next((numbers for numbers in gather_from_processes(met) if numbers), [])
    return [taps[number] for number in dict.fromkeys([*order, *range(len(taps))])]
