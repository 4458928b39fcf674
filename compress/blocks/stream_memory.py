"""How much memory a stream takes: from shapes alone, before anything is read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from compress.blocks import activations
from compress.facts import FLOAT_BYTES, InputGroup, Structure
from compress.rounding.quantized_weight import ROWS

FIXED_BYTES = 25 * 2**20
"""What libraries take at their first large product."""
SCORED_ROWS = 512
"""Tokens whose logits are held at once when a model is scored, unless one text has more."""
HELD_BYTES = 2**28
"""Of what the blocks read on the way forward, where gradients come back, that stays in memory; more goes to disk."""
JOINED = 6
"""Bytes for each weight of a tall one as it is joined: integers twice, and the floats that they stand for. Measured on
128,256 x 256: 11 for a shared table, 12 for two, with the 5 that any block holds of a weight."""
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class StreamUse:
    """How a pass uses a stream.

    `float_too`: as of `Stream` and `BlockWork`. `rounded`: the layers that it works on (None:
    all). At an input group it holds `squares` matrices [in, in] at once, and `copies` of the weights of those layers;
    the defaults are those of `gptq`. `lazy`: as of `Stream`; one copy beside the weight is right then: a folder of
    2.5 GB took 629 MiB in all, and 677 are foretold with it.
    """

    float_too: bool = False
    rounded: Collection[str] | None = None
    squares: float = 4
    copies: float = 5
    lazy: bool = False


def stream_memory(
    structure: Structure, shapes: Shapes, n_rows: int, hidden_width: int, use: StreamUse | None = None
) -> int:
    """Return the bytes that a stream takes above what the process held before: the most of any one block.

    `shapes`: of the parameters, by plain name. `n_rows`: tokens of this process's share of the calibration data (0: a
    pass without). `hidden_width`: of what a block hands to the next. Tables of embeddings stay in their file but while
    they are rounded.
    """
    how = use or StreamUse()
    at = _At(shapes, n_rows, hidden_width, how)
    inside = _group_by_block(shapes, structure)
    blocks = [at.block(block.input_groups, inside.get(block.name, [])) for block in structure.blocks]
    late = {layer for input_group in structure.after for layer in input_group.layers}
    if late:
        small = [name for name in inside.get(None, []) if len(shapes[name]) == 1]
        blocks.append(at.block(structure.after, [*small, *(f"{layer}.weight" for layer in sorted(late))]))
    early = [name for name in how.rounded or () if name not in late and structure.find_block(name) is None]
    tables = [shapes[f"{name}.weight"] for name in early if f"{name}.weight" in shapes]
    blocks += [at.rounding(shape) for shape in tables if len(shape) == 2]
    held = FLOAT_BYTES * n_rows * hidden_width * (2 if how.float_too else 1)
    return int(FIXED_BYTES + held + max(blocks, default=0))


def backward_memory(structure: Structure, shapes: Shapes, n_rows: int, hidden_width: int) -> int:
    """Return the bytes, above what the process held before, of sending gradients back through the blocks.

    The largest block with what SCORED_ROWS of the `n_rows` tokens leave in it, or the head with their logits, thrice:
    themselves, as probabilities, and their gradients; beside them what each block reads, as far as that is in memory.
    """
    held = min(FLOAT_BYTES * n_rows * hidden_width * len(structure.blocks), HELD_BYTES)
    held += 2 * FLOAT_BYTES * n_rows * hidden_width
    rows = min(SCORED_ROWS, n_rows)
    parts, by_block = [], _group_by_block(shapes, structure)
    for block in structure.blocks:
        inside = [shapes[name] for name in by_block.get(block.name, []) if len(shapes[name]) == 2]
        widths = sum(sum(shape) for shape in inside)
        squares = [
            shapes[f"{input_group.layers[0]}.weight"][-1] ** 2
            for input_group in block.input_groups
            if f"{input_group.layers[0]}.weight" in shapes
        ]
        matrices = 2 * sum(squares) + 4 * max(squares, default=0)  # sums in float64, and the work on one of them
        parts.append(FLOAT_BYTES * (sum(map(math.prod, inside)) + 2 * rows * widths + matrices))
    heads = {f"{layer}.weight" for input_group in structure.after for layer in input_group.layers}
    known = [shapes[name] for name in heads if name in shapes]
    parts.append(
        FLOAT_BYTES * (sum(map(math.prod, known)) + 4 * rows * max((max(shape) for shape in known), default=0))
    )
    return int(FIXED_BYTES + held + max(parts))


def head_memory(structure: Structure, shapes: Shapes) -> int:
    """Return the bytes, above what the process held before, of scoring two models with logits side by side.

    Their head is read for each before the second's is found to be the first's.
    """
    heads = {f"{layer}.weight" for input_group in structure.after for layer in input_group.layers}
    known = [shapes[name] for name in heads if name in shapes]
    logits = max((SCORED_ROWS * max(shape) for shape in known), default=0)
    return int(FIXED_BYTES + 2 * FLOAT_BYTES * (sum(map(math.prod, known)) + logits))


@dataclass(frozen=True)
class _At:
    """What the memory of a block depends on."""

    shapes: Shapes
    n_rows: int
    width: int
    use: StreamUse

    def block(self, input_groups: Sequence[InputGroup], names: Sequence[str]) -> float:
        """Return the bytes of one block at its largest reading, what it reads left out."""
        n_weights = sum(math.prod(self.shapes[name]) for name in names if name in self.shapes)
        known = [input_group for input_group in input_groups if self.matrices(input_group)]
        written = n_weights  # the integers, a byte each
        if self.use.lazy:  # a weight, and its levels as floats
            rounded = [
                name for name in names if self.use.rounded is None or name[: -len(".weight")] in self.use.rounded
            ]
            shapes = [self.shapes[name] for name in rounded if name in self.shapes]
            return written + max((FLOAT_BYTES * math.prod(shape) + self.rounding(shape) for shape in shapes), default=0)
        return FLOAT_BYTES * n_weights + written + max((self.count_group_bytes(each) for each in known), default=0.0)

    def count_group_bytes(self, input_group: InputGroup) -> float:
        """Return the bytes held while a forward stops at an input group: input, residual and norm, then the pass's
        work."""
        n_inputs = self.n_inputs(input_group)
        row = FLOAT_BYTES * (n_inputs + 2 * self.width)
        others = 2 * FLOAT_BYTES * n_inputs * min(self.n_rows, activations.ROWS)  # of the one that is on its way
        return row * self.n_rows + max(others, self.work(input_group))

    def work(self, input_group: InputGroup) -> float:
        """Return the bytes that the pass takes to work on the input group's layers."""
        wanted = [name for name in input_group.layers if self.use.rounded is None or name in self.use.rounded]
        shapes = [self.shapes[f"{name}.weight"] for name in wanted if f"{name}.weight" in self.shapes]
        squares = self.use.squares * self.n_inputs(input_group) ** 2 if self.n_rows and shapes else 0
        return FLOAT_BYTES * squares + sum(map(self.rounding, shapes))

    def rounding(self, shape: tuple[int, ...]) -> float:
        """Return the bytes that rounding a weight takes: copies of it, of a tall one of ROWS rows, which are joined."""
        copies = FLOAT_BYTES * self.use.copies * min(shape[0], ROWS) * math.prod(shape[1:])
        return copies + (JOINED * math.prod(shape) if shape[0] > ROWS else 0)

    def matrices(self, input_group: InputGroup) -> list[tuple[int, ...]]:
        return [self.shapes[f"{name}.weight"] for name in input_group.layers if f"{name}.weight" in self.shapes]

    def n_inputs(self, input_group: InputGroup) -> int:
        """Return the dimension that all layers of an input group have; of several the last, as torch's Linear has
        it."""
        first, *others = self.matrices(input_group)
        common = [size for size in first if all(size in other for other in others)]
        return (common or list(first))[-1]


def _group_by_block(shapes: Shapes, structure: Structure) -> dict[str | None, list[str]]:
    """Return the names of the parameters in each block, and under None of those outside."""
    grouped: dict[str | None, list[str]] = {}
    for name in shapes:
        grouped.setdefault(structure.find_block(name), []).append(name)
    return grouped
