"""Giving up as little int8 as the quality gates ask for: the most sensitive layers go back to float, one by one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import onnx_ir as ir

from compress.quantize.qdq import write_state
from compress.quantize.state import Flavour, GraphState


@dataclass(frozen=True)
class Restored:
    """What was given back, and what the gates still say ([]: they hold)."""

    state: GraphState
    layers: tuple[str, ...]
    shortfalls: tuple[str, ...]
    ended: str


def restore_until_held(
    state: GraphState,
    short: list[str],
    sensitivity: dict[str, float],
    flavour: Flavour,
    shortfalls: Callable[[ir.Model], list[str]],
    max_layers: int,
    max_minutes: float,
    log: Callable[[str], None],
) -> Restored:
    """Restore layers in order of falling sensitivity until `shortfalls` is empty or a budget ends.

    `short`: the shortfalls of the state as it is. The state is copied; the best that was reached is returned even when
    the gates still do not hold.
    """
    state = replace(state, weights=dict(state.weights), biases=dict(state.biases))
    order = sorted(sensitivity, key=lambda name: -sensitivity[name])
    deadline = time.monotonic() + 60 * max_minutes
    restored: list[str] = []
    for name in order:
        if not short:
            return Restored(state, tuple(restored), (), "the gates hold")
        if len(restored) == max_layers:
            return Restored(state, tuple(restored), tuple(short), f"max_layers {max_layers} reached")
        if time.monotonic() > deadline:
            return Restored(state, tuple(restored), tuple(short), f"max_minutes {max_minutes:g} used")
        state.to_float(name)
        restored.append(name)
        short = shortfalls(write_state(state, flavour))
        log(f"int8: {name} back to float32; {'the gates hold' if not short else '; '.join(short)}")
    return Restored(state, tuple(restored), tuple(short), "the gates hold" if not short else "no layer is left")
