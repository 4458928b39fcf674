"""Constants of a graph whose values stay in files until they are written or run, so that no model is held whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

STRIP = 512
"""Columns that are turned at once: their rows lie in a cache."""


class StoredTensor(ir.LazyTensor):
    """A constant whose values `read` gives, each time that they are asked for; nobody holds them in between.

    `origin`: of a weight that is as its file has it, its name there and whether it is transposed; None for all that is
    computed. `bits`: of an integer, what its largest values need. `straight`: reads what this is the transpose of.
    """

    def __init__(
        self,
        read: Callable[[], np.ndarray],
        dtype: ir.DataType,
        shape: Sequence[int],
        origin: tuple[str, bool] | None = None,
        bits: int = 32,
        straight: Callable[[], np.ndarray] | None = None,
    ) -> None:
        super().__init__(lambda: ir.Tensor(_make_contiguous(read()), dtype=dtype), dtype, ir.Shape(tuple(shape)))
        self.origin = origin
        self.bits = bits
        self.straight = straight


def _make_contiguous(values: np.ndarray) -> np.ndarray:
    """Return the values in order; a transpose by strips of columns, in a third of numpy's time for 151,936 x 896."""
    if values.ndim != 2 or values.flags.c_contiguous:
        return np.ascontiguousarray(values)
    turned = np.empty(values.shape, values.dtype)
    for start in range(0, values.shape[1], STRIP):
        turned[:, start : start + STRIP] = values[:, start : start + STRIP]
    return turned


def make_stored_weight(
    name: str, shape: Sequence[int], read: Callable[[str], np.ndarray], turned: bool
) -> StoredTensor:
    """Return the constant that holds a weight of that name, float32 [shape]; `turned`: its transpose."""
    if not turned:
        return StoredTensor(lambda: read(name), ir.DataType.FLOAT, shape, origin=(name, False))
    return StoredTensor(
        lambda: read(name).T, ir.DataType.FLOAT, shape[::-1], origin=(name, True), straight=lambda: read(name)
    )


def is_stored(tensor: ir.TensorProtocol | None) -> bool:
    """Return whether reading the tensor's values costs a file's."""
    return isinstance(tensor, StoredTensor)


def holds_stored(model: ir.Model) -> bool:
    """Return whether any constant of the graph stays in a file."""
    return any(is_stored(value.const_value) for value in model.graph.initializers.values())


def read_stored(model: ir.Model) -> None:
    """Hold, in place, what constants of the graph would read each time."""
    for name, value in model.graph.initializers.items():
        if is_stored(value.const_value):
            assert value.const_value is not None
            value.const_value = ir.Tensor(value.const_value.numpy(), name=name)


def join_last(tensors: Sequence[ir.TensorProtocol]) -> ir.TensorProtocol:
    """Join tensors side by side along their last axis, in the type of the first; stored ones stay in their files."""
    dtype = tensors[0].dtype

    def join() -> np.ndarray:
        return np.concatenate([tensor.numpy() for tensor in tensors], axis=-1)

    if not any(is_stored(tensor) for tensor in tensors):
        return ir.Tensor(np.ascontiguousarray(join()), dtype=dtype)
    shape = tuple(tensors[0].shape.numpy())
    width = sum(int(tensor.shape.numpy()[-1]) for tensor in tensors)
    bits = max(tensor.bits if isinstance(tensor, StoredTensor) else 32 for tensor in tensors)
    return StoredTensor(join, dtype, (*shape[:-1], width), bits=bits)
