"""What a mask and a table of rotary angles are, known by running the nodes that make them, whatever those are."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compress.graph.attention_parts import NotMatched
from compress.graph.cache import POSITIONS, n_cached_layers, past_name
from compress.graph.evaluate import evaluate

LONGEST_TABLE = 2**25
"""Numbers of a rotary table up to which it is written into the file (128 MiB)."""
VISIBLE = -1e4
"""What a mask adds where a token may not look lies below this."""


def mask_window(model: ir.Model, mask: ir.Value, length: int) -> int:
    """Return how many tokens back a token may look, itself included; -1: all. Known by running what makes the mask.

    Raises NotMatched for a mask that is not causal, or lets padding through.
    """
    far, near = max(length, 16), (5, 4)
    row = _evaluate_mask(model, mask, far - 1, 1)[0]
    window = int(row.sum())
    small = _evaluate_mask(model, mask, *near)
    positions = np.arange(sum(near))
    distance = positions[-near[1] :, None] - positions
    if not (row[far - window :].all() and np.array_equal(small, (distance >= 0) & (distance < window))):
        raise NotMatched(f"the mask {mask.name} is not that of tokens that look back")
    padded = _evaluate_mask(model, mask, *near, padding=2)
    if not np.array_equal(padded, small & (positions >= 2)):
        raise NotMatched(f"the mask {mask.name} lets padding through")
    return -1 if window == far else window


def _evaluate_mask(model: ir.Model, mask: ir.Value, past: int, sequence: int, padding: int = 0) -> np.ndarray:
    """Return which of past + sequence tokens each new one may look at: bool [sequence, past + sequence]."""
    kept = np.zeros((1, 1, past, 1), np.float32)
    count = n_cached_layers(model)
    tokens = np.ones((1, past + sequence), np.int64)
    tokens[:, :padding] = 0
    feeds: dict[str, np.ndarray] = {past_name(i, kind): kept for i in range(count) for kind in ("key", "value")}
    feeds |= {"input_ids": np.zeros((1, sequence), np.int64), "attention_mask": tokens}
    results = evaluate(model, [mask.name or ""], feeds)
    if results is None or results[0].size != sequence * (past + sequence):
        raise NotMatched(f"the mask {mask.name} needs more than the sizes and the attention mask")
    values = results[0].reshape(sequence, past + sequence)
    if not np.isin(values[values > VISIBLE], (0,)).all():
        raise NotMatched(f"the mask {mask.name} adds more than 0 and very negative numbers")
    visible: np.ndarray = values > VISIBLE
    return visible


def angle_table(model: ir.Model, angle: ir.Value, length: int) -> np.ndarray | None:
    """Return cos or sin for each position, [length, channels / 2]; None if it is no function of the position alone."""
    width = angle.shape[-1] if angle.shape else None
    if not isinstance(width, int) or length * width // 2 > LONGEST_TABLE or width % 16:
        return None  # the kernel takes a multiple of 8 angles
    few = np.array([[0, 3 % length, length - 1]], np.int64)
    names = [angle.name or ""]
    whole = evaluate(model, names, {POSITIONS: np.arange(length, dtype=np.int64)[None]})
    parts = [evaluate(model, names, {POSITIONS: few[:, i : i + 1]}) for i in range(few.shape[1])]
    if whole is None or any(part is None or part[0].size != width for part in parts) or whole[0].size != length * width:
        return None
    table = whole[0].reshape(length, width)
    alone = np.concatenate([part[0].reshape(1, width) for part in parts if part is not None])
    first, second = np.split(table, 2, axis=1)
    if not np.allclose(table[few[0]], alone, rtol=0, atol=1e-5) or not np.array_equal(first, second):
        return None
    return np.ascontiguousarray(first)
