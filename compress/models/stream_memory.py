"""How much memory a stream takes: from shapes alone, before anything is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from compress.facts import BlockFacts, Reading, Structure
from compress.models import activations

FLOAT = 4
"""Bytes of a float32."""
SQUARES = 6
"""Matrices [in, in] alive at once while a reading's Hessian is factored: the sum, its mean, damped, two of the
factorization, the factor."""
COPIES = 5
"""Copies of a reading's weights, put together, alive at once while they are rounded."""
FIXED_BYTES = 40 * 2**20
"""What libraries take at their first product."""
Shapes = Mapping[str, tuple[int, ...]]


def stream_memory(
    structure: Structure,
    shapes: Shapes,
    n_rows: int,
    hidden_width: int,
    lockstep: bool = True,
    float_too: bool = False,
    squares: float = SQUARES,
    copies: float = COPIES,
) -> int:
    """Bytes above what the process holds before: the most that any one step takes.

    `shapes`: of the parameters, by plain name. `n_rows`: tokens of the calibration data (0: a pass without data) of
    this process. `hidden_width`: of what blocks hand on. `squares`, `copies`: of the pass's own work at one reading
    (`SQUARES`, `COPIES` are GPTQ's). A table of embeddings whose weight nothing else shares stays in its file.
    """
    names = [block.name for block in structure.blocks]
    outside = _n_outside(structure, shapes, names)
    steps = [_step(block.readings, _n_inside(block, shapes), shapes, n_rows, hidden_width, lockstep, squares, copies)
             for block in structure.blocks]  # fmt: skip
    if structure.after:
        steps.append(_step(structure.after, outside, shapes, n_rows, hidden_width, lockstep, squares, copies))
    held = 3 if float_too else 1  # the float path's inputs, too, and the float block's outputs
    return int(FIXED_BYTES + FLOAT * n_rows * hidden_width * held + max(steps, default=0))


def _step(
    readings: Sequence[Reading],
    n_weights: int,
    shapes: Shapes,
    n_rows: int,
    width: int,
    lockstep: bool,
    squares: float,
    copies: float,
) -> int:
    """Bytes of one step at its largest reading, its inputs left out."""
    weights = FLOAT * n_weights + n_weights  # and the integers that are to be written
    together = n_rows if lockstep else min(n_rows, activations.ROWS)
    work = [_at(reading, shapes, together, width, n_rows > 0, squares, copies) for reading in readings]
    return int(weights + max(work, default=0))


def _at(
    reading: Reading, shapes: Shapes, together: int, width: int, data: bool, squares: float, copies: float
) -> float:
    """Bytes while the forward stands before a reading: what it reads, the residual and its norm, and the pass's work."""
    matrices = [shapes[f"{layer}.weight"] for layer in reading.layers if f"{layer}.weight" in shapes]
    if not matrices:
        return 0
    n_inputs = n_reads(reading, shapes)
    rows = together * (n_inputs + 2 * width)
    own = squares * n_inputs**2 * data + copies * sum(map(math.prod, matrices))
    return FLOAT * (rows + own)


def n_reads(reading: Reading, shapes: Shapes) -> int:
    """Inputs of a reading's layers: the dimension that all of them have."""
    first, *others = [shapes[f"{layer}.weight"] for layer in reading.layers if f"{layer}.weight" in shapes]
    common = [size for size in first if all(size in other for other in others)]
    return common[-1] if common else first[-1]


def _n_inside(block: BlockFacts, shapes: Shapes) -> int:
    return _sum(name for name in shapes if not block.name or name.startswith(f"{block.name}.")) and sum(
        math.prod(shape) for name, shape in shapes.items() if not block.name or name.startswith(f"{block.name}.")
    )


def _sum(names: Iterable[str]) -> int:
    return sum(1 for _ in names)


def _n_outside(structure: Structure, shapes: Shapes, names: Sequence[str]) -> int:
    """Weights outside the blocks that the last step reads."""
    return 0
