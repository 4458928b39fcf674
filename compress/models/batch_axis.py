"""Which axis a model takes its samples along: two samples are run together and alone, and their answers compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from compress.facts import SampleShapes
from compress.rounding.measure import relative_difference, share_of_strangers

Arrays = dict[str, np.ndarray]
Run = Callable[[Arrays], Arrays]
TOLERANCE, SMALLEST, MOST_CHOICES = 1e-4, 1e-2, 0.01
"""Of an output's largest magnitude, or of SMALLEST where all of it is less; of whole numbers the share that may differ.
Exports are held to the same: kernels that sum in another order stay ten times below."""


@dataclass(frozen=True)
class BatchAxis:
    """`together`: samples may share a call; else each is run by itself. `problem`: why neither can be; a way out."""

    together: bool
    problem: str = ""
    rowless: tuple[str, ...] = ()
    """Outputs that have no row for a sample that is run by itself: a number, or a row for each token or step."""


def find_batch_axis(
    run: Run,
    samples: Sequence[Arrays],
    fixed: int | None,
    failures: tuple[type[Exception], ...],
    close: float = TOLERANCE,
) -> BatchAxis:
    """Find out whether a model's answer for a sample is the same beside others, along the first axis.

    `run`: feeds with their batch -> outputs, raising one of `failures` for sizes that it does not take. `samples`: two,
    without a batch, that differ. `fixed`: samples of a call, where the model takes no other number.
    """
    one, other = samples
    if fixed is not None:
        alone, beside = run(_stack([one] * fixed, 0)), run(_stack([one] + [other] * (fixed - 1), 0))
        rowless = _list_rowless(alone, fixed)
        if rowless and fixed > 1:
            given = list(alone[rowless[0]].shape)
            return BatchAxis(
                False,
                f"output '{rowless[0]}' {given} has no row for each of the {fixed} samples of a call; export it with a "
                "batch of 1, or leave that output out",
            )
        if fixed == 1 or all(is_close(alone[name][:1], beside[name][:1], close) for name in alone):
            return BatchAxis(False, rowless=rowless)
        return BatchAxis(
            False,
            f"its answer for a sample is another beside other samples, and it takes {fixed} at once; export it with a "
            "batch of 1, or of any size",
        )

    def find_axes(axis: int) -> dict[str, list[int]] | None:
        """Return the axes of each output along which two samples' answers lie; None where they cannot be run so."""
        try:
            alone = [run(_stack([sample], axis)) for sample in samples]
            doubled = [run(_stack([sample, sample], axis)) for sample in samples]
            together = run(_stack(samples, axis))
        except failures:
            return None
        return {
            name: _find_joined(values, [part[name] for part in alone], [part[name] for part in doubled], close)
            for name, values in together.items()
        }

    alone = run(_stack([one], 0))
    found = find_axes(0) or {}
    if found and all(0 in axes for axes in found.values()) and not _list_rowless(alone):
        return BatchAxis(True)
    if not found or not all(found.values()):
        most = max(values.ndim for values in one.values())
        axis = next((k for k in range(1, most + 1) if (axes := find_axes(k)) and all(axes.values())), None)
        if axis is not None:
            name = next(name for name, values in one.items() if values.ndim >= axis)
            shape: list[int | str] = list(one[name].shape)
            shape.insert(axis, "batch")
            shown = ", ".join(map(str, shape))
            return BatchAxis(
                False,
                f"its answers depend on other samples along axis 0, and do not along axis {axis}: it takes '{name}' as "
                f"[{shown}]; export it batch-first (of torch's recurrent layers: batch_first=True), or put a Transpose "
                "behind each input and before each output",
            )
    return BatchAxis(False, rowless=_list_rowless(alone))


def is_close(expected: np.ndarray, got: np.ndarray, close: float = TOLERANCE) -> bool:
    """Return whether two arrays are the same but for rounding; of whole numbers one in a hundred may differ.

    Rows of one sample may have changed places, as those that a detector puts in order by nearly equal scores do.
    """
    if expected.shape != got.shape:
        return False
    if expected.dtype.kind not in "fc":
        return not expected.size or float(np.mean(expected != got)) <= MOST_CHOICES
    return (
        relative_difference(expected, got, SMALLEST) <= close
        or share_of_strangers(expected, got, close, MOST_CHOICES, SMALLEST) <= MOST_CHOICES
    )


def _stack(samples: Sequence[Arrays], axis: int) -> Arrays:
    """Return one call's feeds; an input with fewer axes has its samples along its last."""
    return {
        name: np.stack([sample[name] for sample in samples], min(axis, values.ndim))
        for name, values in samples[0].items()
    }


def _find_joined(
    together: np.ndarray, alone: Sequence[np.ndarray], doubled: Sequence[np.ndarray], close: float
) -> list[int]:
    """Return the axes along which two samples' answers lie in that given together, one behind the other.

    Each is that beside a copy of itself (`doubled`), and nearly that given alone.
    """

    def lies_along(axis: int) -> bool:
        both, one, other, ones, others = (np.moveaxis(values, axis, 0) for values in (together, *alone, *doubled))
        beside = np.concatenate([ones[: len(one)], others[len(others) - len(other) :]])
        # Kernels sum in another order, and the model enlarges that: magika, whose norms divide by nearly nothing on
        # samples of one number, is 9e-3 off in a batch of two, be the other the same sample.
        near = is_close(np.concatenate([one, other]), both, max(close, 2e-2))
        return near and is_close(beside, both, close)

    shapes = [values.shape for values in (*alone, *doubled)]
    return [
        axis
        for axis in range(together.ndim)
        if all(len(shape) == together.ndim for shape in shapes) and _shapes_join(shapes, axis) and lies_along(axis)
    ]


def _shapes_join(shapes: Sequence[tuple[int, ...]], axis: int) -> bool:
    return len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) == 1


def _list_rowless(outputs: Arrays, n: int = 1) -> tuple[str, ...]:
    """Return the outputs of a call of `n` samples that have not as many rows."""
    return tuple(name for name, values in outputs.items() if values.shape[:1] != (n,))


def draw_sample(feeds: SampleShapes, number: int, seed: int) -> Arrays:
    """Return normal numbers; of whole ones `number`, but for a 0 before the others in the second sample's."""
    random, drawn = np.random.default_rng(seed), {}
    for name, (shape, dtype) in feeds.items():
        values = random.standard_normal(shape) if np.dtype(dtype).kind == "f" else np.full(shape, number)
        if seed and np.dtype(dtype).kind != "f" and values.ndim and values.shape[-1] > 1:
            values[..., 0] = 0
        drawn[name] = values.astype(dtype)
    return drawn
