"""An explanation of a model's speed, as tables and sentences for people."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.judge.causes import Cause
from runtime.judge.why import Explanation, LayerComparison, OperatorTime
from runtime.report.terminal import align, fold
from runtime.words import ms_text

OPERATOR_HEADS = ("operator", "before", "after", "share")
LAYER_HEADS = ("layer", "operator", "before", "after", "GFLOP/s before", "after", "bound by")
SHOWN_LAYERS, SHOWN_OPERATORS = 10, 10


def headline(explanation: Explanation) -> str:
    """Return one sentence: how long a call of each takes in the profile, and what the machine can do."""
    before, after = explanation.baseline, explanation.candidate
    unit = "a further token" if explanation.unit == "token" else "a call"
    times = f"{unit} takes {ms_text(after.call_ms)}"
    if before is not None:
        times += f", the baseline's {ms_text(before.call_ms)} ({before.call_ms / after.call_ms:.2f}x)"
    peaks = ", ".join(f"{numbers} {rate:.0f}" for numbers, rate in explanation.peak_gflops.items() if rate)
    return (
        f"In {explanation.backend}'s profile {times}. Peaks here, GFLOP/s: {peaks}; its weights are read at "
        f"{after.gb_per_s:.3g} GB/s."
    )


def operator_cells(explanation: Explanation) -> list[tuple[str, ...]]:
    """Return a row for each of the candidate's costliest operators, and for those that only the baseline spends on."""
    before = {row.operator: row for row in explanation.baseline.operators} if explanation.baseline else {}
    after = {row.operator: row for row in explanation.candidate.operators}
    listed = [*list(after)[:SHOWN_OPERATORS], *(name for name in list(before)[:3] if name not in after)]
    return [
        (name, _cell(before.get(name)), _cell(after.get(name)), f"{after[name].share:.0%}" if name in after else "-")
        for name in listed
    ]


def _cell(row: OperatorTime | None) -> str:
    return "-" if row is None else f"{row.ms:.3g} ms ({row.n})"


def layer_cells(explanation: Explanation) -> list[tuple[str, ...]]:
    """Return a row for each of the candidate's costliest products, beside its twin in the baseline."""
    return [_layer_cell(row) for row in explanation.layers[:SHOWN_LAYERS]]


def _layer_cell(row: LayerComparison) -> tuple[str, ...]:
    twin = "-" if row.twin_ms is None else f"{row.twin_ms:.3g} ms"
    rate = "-" if row.twin_gflops is None else f"{row.twin_gflops:.0f}"
    operator = f"{row.operator} ({row.numbers})"
    return row.layer, operator, twin, f"{row.ms:.3g} ms", rate, f"{row.gflops:.0f}", row.bound or "-"


def remaining_line(explanation: Explanation) -> str:
    """Return which Q, DQ and casts are executed."""
    if not explanation.remaining:
        return "No Q, DQ or cast is executed."
    listed = ", ".join(f"{row.n} {name} {row.ms:.3g} ms" for name, row in explanation.remaining.items())
    return f"Q, DQ and casts that are executed: {listed}."


def cause_lines(cause: Cause) -> Iterator[str]:
    """Yield what was seen, why it is slow, what to change with its gain, and the recipe."""
    yield f"seen: {cause.seen}"
    yield f"why: {cause.why}"
    gain = f" (saves about {cause.saves_ms:.3g} ms: {cause.speedup:.2f}x)" if cause.saves_ms else ""
    yield f"change: {cause.change}{gain}"
    yield from (f"    {line}" for line in cause.recipe.splitlines())
    if cause.layers:
        yield f"layers: {', '.join(cause.layers)}"


NO_CAUSE = "No cause is seen: nothing in the executed graph would save a twentieth of the time."


def render_explanation(explanation: Explanation, width: int | None = None) -> str:
    """Render the explanation as plain text, broken at a terminal's `width`."""
    return "\n".join(line for text in _render_lines(explanation, width) for line in fold(text, width)) + "\n"


def _render_lines(explanation: Explanation, width: int | None) -> Iterator[str]:
    yield headline(explanation)
    if explanation.busy:
        yield explanation.busy
    yield ""
    yield from align([OPERATOR_HEADS, *operator_cells(explanation)], width)
    yield ""
    yield from align([LAYER_HEADS, *layer_cells(explanation)], width)
    yield ""
    yield remaining_line(explanation)
    if not explanation.causes:
        yield ""
        yield NO_CAUSE
    for number, cause in enumerate(explanation.causes, 1):
        yield ""
        yield f"{number}. {cause.kind.replace('_', ' ')}"
        yield from (f"   {line}" for line in cause_lines(cause))
