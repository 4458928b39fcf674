"""What a model takes and gives: named tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a model."""

    name: str
    dtype: str
    """numpy's name: float32, int64, ..."""
    shape: tuple[int | str, ...]
    """A number where the size is fixed, a name where it is free: ("batch", 3, 32, 32)."""


@dataclass(frozen=True)
class State:
    """What a call hands on to the next: the values of `output` are what `input` reads.

    `input`: with the shape that it has in every call of one sequence. `initial`: its value before the first call.
    """

    output: str
    input: TensorSpec
    initial: float = 0.0

    def __post_init__(self) -> None:
        if not all(isinstance(size, int) for size in self.input.shape):
            raise ValueError(f"state '{self.input.name}' {self.input.shape}: its sizes must be numbers")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(size) for size in self.input.shape)


def as_sequence(spec: TensorSpec) -> TensorSpec:
    """Return the spec of what the calls of one sequence read or give, [1, time, ...], from that of one call.

    What has no batch of its own in a call, such as a number, gets one in front.
    """
    rest = spec.shape[1:] if has_batch(spec) else spec.shape
    return replace(spec, shape=(1, "time", *rest))


def has_batch(spec: TensorSpec) -> bool:
    """Return whether the first axis of a call's tensor is that of its one sequence."""
    return bool(spec.shape) and (isinstance(spec.shape[0], str) or spec.shape[0] == 1)
