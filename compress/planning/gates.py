"""Hold what a plan foretells of size and speed against the gates that ask for it."""

from __future__ import annotations

from compress.facts import FLOAT_BYTES, ModelFacts, Note
from compress.formats.targets import TARGETS
from compress.planning.measured_speed import LatencyForecast
from compress.recipe.schema import Recipe
from runtime.bundle.manifest import Gate
from runtime.words import ms_text, size_text

NEAR = 0.1
"""Nearer to its bound than this share a gate may go either way: most forecasts of speed lie within 10 % of what is
measured, all within 20 % (docs/howto/forecast.md). Those of size leave out the graph around the weights: of 12
convolutions with 26 KiB of them 3.83x was foreseen and 1.68x measured."""
FLOAT_BITS = 8 * FLOAT_BYTES


def foresee_gates(recipe: Recipe, before: ModelFacts, after: ModelFacts, latency: LatencyForecast | None) -> list[Note]:
    """Return a line on each gate whose value the plan foretells: what it asks, what is foreseen, whether that holds."""
    foreseen = {"size": _count_file_bytes(recipe, before, after)}
    if latency is not None and latency.backend == recipe.target and not latency.parts:
        foreseen[latency.metric] = (latency.float_ms, latency.compressed_ms)
        if latency.first_ms:
            before_ms, after_ms = latency.first_ms
            foreseen["ttft"] = (before_ms, after_ms)
    return [note for gate in recipe.validate_.gates if (note := _foresee(gate, foreseen)) is not None]


def _foresee(gate: Gate, foreseen: dict[str, tuple[float, float]]) -> Note | None:
    metric = "size" if gate.metric == "size_ratio" else gate.metric
    if metric not in foreseen:
        return None
    before, after = foreseen[metric]
    ratio, write = before / max(after, 1e-9), size_text if metric == "size" else ms_text
    kept = {"min_speedup": ratio, "min_retained": ratio, "min": ratio if gate.metric == "size_ratio" else after}
    lines, level = [], 0
    for rule, bound in gate.bounds.items():
        value = kept.get(rule, after - before if rule == "max_drop" else kept["min"])
        upper = rule.startswith("max")
        is_ratio = rule in ("min_speedup", "min_retained") or gate.metric == "size_ratio"
        misses = value > bound if upper else value < bound
        near = abs(value - bound) <= NEAR * max(abs(bound), after if rule == "max_drop" else 0)
        said = f"{value:.2f}x" if is_ratio else write(value)
        level = max(level, 0 if near or not misses else 1)
        word = "near the bound, may go either way" if near else "will fall short" if misses else "should hold"
        lines.append(f"gate {gate.metric} {rule} {bound:g}: foreseen {said}, {word}")
    return Note("warning" if level else "info", "; ".join(lines))


def _count_file_bytes(recipe: Recipe, before: ModelFacts, after: ModelFacts) -> tuple[float, float]:
    """Return the bytes of the weights before and after as their files hold them: checkpoints keep the source's type."""
    narrow = 1.0 if TARGETS[recipe.target].reads == "onnx" else before.float_bytes / FLOAT_BYTES

    def count(facts: ModelFacts) -> float:
        layers = facts.distinct_layers()
        return narrow * facts.other_bytes + sum(x.n_bytes * (narrow if x.bits == FLOAT_BITS else 1) for x in layers)

    return count(before), count(after)
