"""Why weights of few bits are slow: computed in float32, or in products that smaller weights cannot help."""

from __future__ import annotations

from runtime.clock.peaks import Product
from runtime.judge.cause import NOTHING, Found, make_cause, total_ms
from runtime.judge.twins import ProfiledPair
from runtime.measure.profile import NodeTime, Profile

BOUND = 0.25
"""Share of a float layer's time that reading its weights takes at most where its products bound it."""


def _weight_only(profile: Profile) -> list[NodeTime]:
    return [node for node in profile.products if node.operator == "MatMulNBits" and node.flops]


def _as_trial(node: NodeTime, level: int) -> Product:
    settings = node.integers
    return Product(
        node.rows,
        node.input_width,
        node.output_width,
        "bits",
        settings.get("bits", 4),
        settings.get("block_size", 32),
        level,
    )


def find_computed_in_float(pair: ProfiledPair, told: set[str]) -> Found:
    """Find weights of few bits that are unpacked to multiply in float32, where eight bits are faster in a trial."""
    nodes = [node for node in _weight_only(pair.after) if node.computes_in == "float32"]
    if not nodes:
        return NOTHING
    heaviest = max(nodes, key=lambda node: node.ms)
    level = heaviest.integers.get("accuracy_level", 0)
    now, then = pair.trials([_as_trial(heaviest, level), _as_trial(heaviest, 4)])
    if not now or not then or then > now:
        return NOTHING
    share = 1 - then / now
    return make_cause(
        pair,
        "computed_in_float",
        nodes,
        share * total_ms(nodes),
        (
            f"{len(nodes)} MatMulNBits have accuracy_level {level} ({total_ms(nodes):.3g} of "
            f"{pair.after.call_ms:.3g} ms)",
            f"below level 4 the weights are unpacked and multiplied in float32; the largest, alone, takes {now:.3g} ms "
            f"so and {then:.3g} ms at level 4",
            "write accuracy_level 4; compress writes Q/DQ, which onnxruntime fuses at that level",
        ),
        "passes:\n  - kind: rtn\n    scheme: W4A16\n",
    )


def find_compute_bound(pair: ProfiledPair, told: set[str]) -> Found:
    """Find weights of few bits in products that read so many rows that reading the weights is a small part of them."""
    twins, profile, peaks = pair.twins, pair.after, pair.peaks
    floats = peaks.gflops.get("float32", 0.0)
    bound: list[tuple[NodeTime, float]] = []
    for node in _weight_only(profile):
        twin = twins.get(node.name)
        if twin is not None and not twin.flops:
            continue
        before_ms = twin.ms if twin is not None else node.flops / floats / 1e6 if floats else 0.0
        reading_ms = 4 * node.input_width * node.output_width / pair.before_peaks.gb_per_s / 1e6
        if before_ms and reading_ms < BOUND * before_ms and node.ms > 0.7 * before_ms:
            bound.append((node, reading_ms / before_ms))
    nodes = [node for node, _ in bound]  # also those that are computed in float: this may save more
    if not nodes or total_ms(nodes) < 0.3 * profile.call_ms:
        return NOTHING
    share = max(part for _, part in bound)
    heaviest = max(nodes, key=lambda node: node.ms)
    faster_ms = (
        sum(min(node.ms, 1.2 * node.flops / peaks.gflops["uint8"] / 1e6) for node in nodes)
        if peaks.gflops.get("uint8")
        else total_ms(nodes)
    )
    return make_cause(
        pair,
        "compute_bound",
        nodes,
        total_ms(nodes) - faster_ms,
        (
            f"{len(nodes)} products of few-bit weights take {total_ms(nodes):.3g} of {profile.call_ms:.3g} ms with "
            f"{heaviest.rows} rows in a call, at {heaviest.gflops:.0f} GFLOP/s where float32 peaks at {floats:.0f}",
            f"they are bound by the products: reading even the float weights is at most {100 * share:.0f} % of their "
            "time, so that smaller weights cannot save more",
            f"quantize activations too, for products in int8 (peak here {peaks.gflops.get('uint8', 0):.0f} GFLOP/s); "
            "few-bit weights pay with few rows in a call, as in decoding",
        ),
        "passes:\n  - kind: int8\n",
    )
