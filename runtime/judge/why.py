"""Where the time of a candidate's calls goes, beside its baseline's, as a record for reports, tables and plots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.clock.peaks import Peaks
from runtime.judge.causes import FINDERS, QUANTIZING, Cause, round_digits
from runtime.judge.twins import ProfiledPair
from runtime.measure.profile import NodeTime, Profile

MOST_TOLD, MOST_LAYERS, MOST_OPERATORS = 4, 40, 12


@dataclass(frozen=True)
class OperatorTime:
    """All executed nodes of one operator together."""

    operator: str
    n: int
    ms: float
    share: float
    """Of the time of all nodes."""


@dataclass(frozen=True)
class LayerComparison:
    """A product of the candidate, its twin in the baseline, and where it stands under the roofline."""

    layer: str
    operator: str
    numbers: str
    """What it multiplies: float32, uint8, ..."""
    ms: float
    gflops: float
    flops_per_byte: float
    bound: str
    """"compute" or "memory": which of the machine's peaks is nearer; "" where shapes are not known."""
    twin_ms: float | None = None
    twin_gflops: float | None = None
    twin_flops_per_byte: float | None = None


@dataclass(frozen=True)
class SideTime:
    """Where the time of one model's call goes."""

    call_ms: float
    nodes_ms: float
    n_nodes: int
    operators: tuple[OperatorTime, ...]
    """By time, the costliest MOST_OPERATORS."""
    gb_per_s: float
    """At which as many bytes as its weights have are read here."""


@dataclass(frozen=True)
class Explanation:
    """Where the time goes on the runtime that the candidate is judged on, and why it is no less."""

    backend: str
    unit: str
    """What `call_ms` is of: "call", or "token" of a decoder."""
    candidate: SideTime
    baseline: SideTime | None
    peak_gflops: dict[str, float]
    layers: tuple[LayerComparison, ...]
    """The candidate's products by time, the costliest MOST_LAYERS."""
    remaining: dict[str, OperatorTime]
    """Q, DQ and casts that are executed: operator -> their time. Empty: all were fused or folded."""
    causes: tuple[Cause, ...] = ()
    """The most worth ending first."""
    busy: str = ""
    """A sentence where the machine had other work as the profile began, so that its times say little."""


def explain(pair: ProfiledPair, unit: str = "call") -> Explanation:
    """Find the causes, and lay out the times for tables and plots."""
    after, before = pair.after, pair.before
    causes: list[Cause] = []
    told: set[str] = set()
    for find in FINDERS:
        cause, nodes = find(pair, told)
        if cause is not None:
            causes.append(cause)
            told |= nodes
    causes.sort(key=lambda cause: -cause.saves_ms)
    remaining = {
        operator: _sum_operator(operator, found, after.nodes_ms)
        for operator in (*QUANTIZING, "DynamicQuantizeLinear", "Cast")
        if (found := after.find(operator))
    }
    return Explanation(
        after.backend,
        unit,
        describe_side(after, pair.peaks),
        describe_side(before, pair.before_peaks) if before is not None else None,
        {numbers: round(rate, 1) for numbers, rate in pair.peaks.gflops.items()},
        tuple(_compare_layers(pair)),
        remaining,
        tuple(causes[:MOST_TOLD]),
    )


def describe_side(profile: Profile, peaks: Peaks) -> SideTime:
    """Sum a profile by operator."""
    by_operator: dict[str, list[NodeTime]] = defaultdict(list)
    for node in profile.nodes:
        by_operator[node.operator].append(node)
    rows = [_sum_operator(operator, nodes, profile.nodes_ms) for operator, nodes in by_operator.items()]
    rows.sort(key=lambda row: -row.ms)
    return SideTime(
        round_digits(profile.call_ms),
        round_digits(profile.nodes_ms),
        len(profile.nodes),
        tuple(rows[:MOST_OPERATORS]),
        round_digits(peaks.gb_per_s),
    )


def _sum_operator(operator: str, nodes: Sequence[NodeTime], whole: float) -> OperatorTime:
    ms = sum(node.ms for node in nodes)
    return OperatorTime(operator, len(nodes), round_digits(ms), round_digits(ms / whole if whole else 0.0))


def _compare_layers(pair: ProfiledPair) -> Iterable[LayerComparison]:
    twins = pair.twins
    for node in sorted(pair.after.products, key=lambda node: -node.ms)[:MOST_LAYERS]:
        twin = twins.get(node.name)
        yield LayerComparison(
            node.layer,
            node.operator,
            node.computes_in,
            round_digits(node.ms),
            round_digits(node.gflops),
            round_digits(_intensity(node)),
            find_bound(node, pair.peaks),
            None if twin is None else round_digits(twin.ms),
            None if twin is None else round_digits(twin.gflops),
            None if twin is None else round_digits(_intensity(twin)),
        )


def _intensity(node: NodeTime) -> float:
    return node.flops / node.n_bytes if node.n_bytes else 0.0


def find_bound(node: NodeTime, peaks: Peaks) -> str:
    """Return which limit is the nearer: "compute", "memory", or "" where shapes or peaks are not known."""
    rate = peaks.rate(node.computes_in)
    if not node.flops or not rate or not peaks.gb_per_s:
        return ""
    return "compute" if node.flops / rate >= node.n_bytes / peaks.gb_per_s else "memory"
