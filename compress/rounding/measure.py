"""Measure how far a quantized graph is from its float one, and restore its most sensitive layers until gates hold."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from compress.graph.edit import append, reroute, take_over, tidy, uses_of
from compress.graph.layers import find_layers, int_attribute
from compress.graph.run import TAPPED, Feeds, clone, cut_batches, open_session, run_batches, take_each, tap
from compress.graph.specs import is_cache
from compress.graph.switches import SWITCHES, add_switches
from compress.rounding.observers import Observer
from compress.rounding.qdq import placement_of, write_state
from compress.rounding.state import GraphState, Variant
from runtime.backends.onnxruntime_cpu import InferenceSession

COLLAPSE = 0.95
"""Mean cosine between quantized and float outputs below which something structural is wrong, not mere rounding."""

CHOOSERS = {"TopK": 1, "NonMaxSuppression": 0}
"""Operators that choose some of many by their scores -> which of their outputs says what is chosen."""


@dataclass(frozen=True)
class Suspect:
    """An operator kind whose quantized outputs were left out, and the mean output cosine that gave."""

    operator: str
    cosine: float
    tensors: tuple[str, ...]


def output_cosine(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    """Return the mean over samples and outputs of the cosine between two lists of outputs, flattened to [n, features].

    Equal samples count 1 (zeros too), samples that are not finite on one side only count -1: they are no likeness at
    all. An output whose size depends on what is found (boxes) is one sample, the shorter one filled up with zeros.
    """
    cosines = [_compute_cosines(left, right) for left, right in zip(a, b, strict=True)]
    return float(np.concatenate(cosines).mean()) if cosines else 0.0


def _compute_cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return one cosine for each sample, float64 [n]."""
    if left.shape != right.shape:
        size = max(left.size, right.size)
        left, right = (np.pad(values.ravel(), (0, size - values.size))[None] for values in (left, right))
    x, y = left.reshape(len(left), -1).astype(np.float64), right.reshape(len(right), -1).astype(np.float64)
    equal = np.array([np.array_equal(p, q, equal_nan=True) for p, q in zip(x, y, strict=True)], dtype=bool)
    finite = np.isfinite(np.concatenate([x, y], axis=1)).all(axis=1, keepdims=True)  # [n, 1]
    x, y = np.where(finite, x, 0.0), np.where(finite, y, 0.0)
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    cosines: np.ndarray = np.sum(x * y, axis=1) / np.maximum(norms, 1e-30)
    return np.where(equal, 1.0, np.where(finite[:, 0], cosines, -1.0))


def relative_difference(expected: np.ndarray, got: np.ndarray, smallest: float = 1e-12) -> float:
    """Return max |expected - got| / max(|expected|, smallest); infinity where either is not finite and they differ."""
    if not (np.isfinite(got).all() and np.isfinite(expected).all()):
        return 0.0 if np.array_equal(expected, got, equal_nan=True) else float("inf")
    scale = max(float(np.abs(expected).max(initial=0.0)), smallest)
    return float(np.abs(expected.astype(np.float64) - got).max(initial=0.0)) / scale


def share_of_strangers(
    expected: np.ndarray, got: np.ndarray, close: float, most: float, smallest: float = 1e-12
) -> float:
    """Return the share of rows [n, rows, ...] that no row of the same sample in `got` is like; 1 for fewer dimensions.

    Of rows that a model puts in order by scores, two of nearly equal ones change places from one kernel to another.
    Like is what differs by at most `close` of the largest magnitude, or of `smallest`. Beyond `most` none is counted.
    """
    if expected.ndim < 3 or expected.shape != got.shape or not (np.isfinite(expected).all() and np.isfinite(got).all()):
        return 1.0
    allowed = close * max(float(np.abs(expected).max(initial=0.0)), smallest)
    n_rows, strangers = len(expected) * expected.shape[1], 0
    for sample, place in np.ndindex(*expected.shape[:2]):
        row, rows = expected[sample, place], got[sample]
        if np.abs(row - rows[place]).max(initial=0.0) > allowed:
            strangers += np.abs(row - rows).reshape(len(rows), -1).max(axis=1).min() > allowed
        if strangers > most * n_rows:
            break
    return float(strangers / max(n_rows, 1))


def hold_choices(state: GraphState, batches: Sequence[Feeds]) -> tuple[GraphState, Sequence[Feeds]]:
    """Return the state and the batches with what the float graph chooses by scores as inputs, for comparisons.

    Two objects of nearly equal score that change places are no error of rounding, but each row of what follows would be
    held against another object's. What is chosen by becomes an output: beside boxes in pixels scores would not count.
    """
    names = [str(chosen.name) for _, chosen in list_choices(state.model)]
    if not names:
        return state, batches
    choices = run_batches(open_session(tap(state.model, names)), batches)
    held = [
        {**feeds, **{f"{name}/held": values for name, values in made.items()}}
        for feeds, made in zip(batches, choices, strict=True)
    ]
    model = clone(state.model)
    for node, chosen in list_choices(model):
        given = ir.Value(name=f"{chosen.name}/held", type=ir.TensorType(ir.DataType.INT64))
        model.graph.inputs.append(given)
        reroute(uses_of(chosen), given)
        read = [value for value in node.inputs if value is not None and value.producer() is not None]
        if node.op_type == "TopK":
            given.shape, best = chosen.shape, node.outputs[0]  # it has a row for each sample, a NonMaxSuppression not
            axis = {"axis": int_attribute(node, "axis", -1)}
            take_over(model, best, append(model, "GatherElements", [node.inputs[0], given], f"{best.name}/held", axis))
        for value in read:
            # a copy, for what is an output itself is never rounded
            shown = append(model, "Identity", [value], f"{value.name}/chosen_by_{node.name}")
            shown.type, shown.shape = value.type, value.shape
            model.graph.outputs.append(shown)
    tidy(model)
    return replace(state, model=model), held


def list_choices(model: ir.Model) -> list[tuple[ir.Node, ir.Value]]:
    """Return each node that chooses, and what it says is chosen."""
    choosers = [(node, CHOOSERS[node.op_type]) for node in model.graph if node.op_type in CHOOSERS]
    return [
        (node, node.outputs[place]) for node, place in choosers if node.outputs[place:] and node.outputs[place].name
    ]


def outputs_of(model: ir.Model, batches: Iterable[Feeds], threads: int = 0) -> list[np.ndarray]:
    """Return batch after batch what a graph answers, one array [n, ...] for each output; caches are none."""
    return _collect_answers(open_session(model, threads), list_answers(model), batches)


def _collect_answers(session: InferenceSession, names: Sequence[str], batches: Iterable[Feeds]) -> list[np.ndarray]:
    return [np.atleast_1d(outputs[name]) for outputs in run_batches(session, batches) for name in names]


def list_answers(model: ir.Model) -> list[str]:
    """Return the names of the outputs that are compared: all but caches; only the floating ones, if there are any."""
    answers = [value for value in model.graph.outputs if not is_cache(value.name or "")]
    floating = [value for value in answers if value.dtype is None or value.dtype.is_floating_point()]
    return [value.name or "" for value in floating or answers]


def layer_sqnr_db(
    model: ir.Model, quantized: ir.Model, layers: Sequence[str], batches: Iterable[Feeds], threads: int = 0
) -> dict[str, float]:
    """Return the signal-to-noise ratio at each layer's output, dB; the noise holds the error of all layers before."""
    tensors = {layer.name: layer.output.name or "" for layer in find_layers(model) if layer.name in set(layers)}
    if not tensors:
        return {}
    plain = open_session(tap(model, list(tensors.values())), threads)
    other = open_session(tap(quantized, list(tensors.values())), threads)
    signal, noise = dict.fromkeys(tensors.values(), 0.0), dict.fromkeys(tensors.values(), 0.0)
    for feeds in cut_batches(plain, batches):
        exact, rounded = next(run_batches(plain, [feeds])), next(run_batches(other, [feeds]))
        for name, values in take_each(exact):
            key = name.removesuffix(TAPPED)
            signal[key] += float(np.square(values, dtype=np.float64).sum())
            noise[key] += float(np.square(values.astype(np.float64) - rounded.pop(name)).sum())
    return {layer: decibel(signal[tensor], noise[tensor]) for layer, tensor in tensors.items()}


def decibel(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise), capped at 200."""
    return 200.0 if noise <= signal * 1e-20 else 10 * math.log10(max(signal, 1e-300) / noise)


def sensitivities(
    state: GraphState, batches: Sequence[Feeds], variant: Variant, progress: Callable[[Sequence[str]], Iterable[str]]
) -> dict[str, float]:
    """Return how much each layer alone hurts: 1 - mean output cosine with only it quantized."""
    names = [*state.integer, *state.weight_only]
    hurt = measure_groups(state, {name: (name,) for name in names}, batches, variant, progress)
    return dict(zip(names, hurt, strict=True))


def measure_groups(
    state: GraphState,
    groups: Mapping[str, Collection[str]],
    batches: Sequence[Feeds],
    variant: Variant,
    progress: Callable[[Sequence[str]], Iterable[str]],
) -> list[float]:
    """Return how much each group of layers alone hurts, as `sensitivities` has it. `groups`: its name -> its layers.

    One session answers for all: its graph holds both forms of each layer, and is told which to compute.
    """
    state, batches = hold_choices(state, batches)
    exact, answers = outputs_of(state.model, batches), list_answers(state.model)
    switched = add_switches(write_state(replace(state, attention=False), variant), state.model)
    session, units = open_session(switched.model), [unit.name for unit in switched.units]
    hurt = []
    for group in progress(list(groups)):
        rounded = np.array([name in groups[group] for name in units] or [False])
        fed = [{**feeds, SWITCHES: rounded} for feeds in batches]
        hurt.append(1 - output_cosine(exact, _collect_answers(session, answers, fed)))
    return hurt


def blame(
    state: GraphState,
    seen: dict[str, Observer],
    exact: Sequence[np.ndarray],
    batches: Sequence[Feeds],
    variant: Variant,
) -> list[Suspect]:
    """Leave the quantized outputs of one operator kind after another out and see what heals; worst offender first."""
    placement = placement_of(state)
    suspects = []
    for operator in sorted(set(placement.writers.values()) - set(state.leave_out)):
        without = replace(state, leave_out=[*state.leave_out, operator])
        cosine = output_cosine(exact, outputs_of(write_state(without, variant), batches))
        tensors = [name for name, op in placement.writers.items() if op == operator]
        suspects.append(Suspect(operator, cosine, tuple(sorted(tensors, key=lambda t: -spread(seen.get(t)))[:5])))
    return sorted(suspects, key=lambda suspect: -suspect.cosine)


def spread(seen: Observer | None) -> float:
    """Return the largest magnitude over the median one: what one scale has to span."""
    return 0.0 if seen is None else max(-seen.low, seen.high) / max(seen.absolute_median(), 1e-9)


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
    variant: Variant,
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
        short = shortfalls(write_state(state, variant))
        log(f"int8: {name} back to float32; {'the gates hold' if not short else '; '.join(short)}")
    return Restored(state, tuple(restored), tuple(short), "the gates hold" if not short else "no layer is left")
