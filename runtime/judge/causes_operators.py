"""Why operators beside the products are slow: casts, those that a change brought, and the cost of every call."""

from __future__ import annotations

from collections import defaultdict

from runtime.judge.cause import NOTHING, Cause, Found, advise_placement, is_slower, make_cause, total_ms
from runtime.judge.causes_layers import SLOWER
from runtime.judge.twins import ProfiledPair
from runtime.measure.profile import NodeTime, Profile

FIXED_COST_MS = 0.2
"""A call below this may be mostly the runtime's own cost."""
HALF = ("float16", "bfloat16")


def find_casts(pair: ProfiledPair, told: set[str]) -> Found:
    """Find casts between float types that are executed: what has no kernel in half precision is computed in float32."""
    profile = pair.after
    casts = [n for n in profile.find("Cast", "Convert") if {t.dtype for t in (n.inputs[0], n.outputs[0])} & set(HALF)]
    return make_cause(
        pair,
        "casts",
        casts,
        total_ms(casts),
        (
            f"{len(casts)} casts between float types are executed ({total_ms(casts):.3g} of {profile.call_ms:.3g} ms)",
            f"{profile.backend} has few half-precision kernels for CPUs, and computes the rest in float32",
            "keep float32 here; half precision pays on a GPU or, as bfloat16, in openvino on CPUs that have it",
        ),
        "target: openvino\n",
    )


def find_other_operators(pair: ProfiledPair, told: set[str]) -> Found:
    """Find operators that multiply nothing and take more of a call than they did in the baseline."""
    before = pair.before
    if before is None or not is_slower(pair):
        return NOTHING
    ours, theirs = (_sum_others(side, told) for side in (pair.after, before))
    grown = {name: ms - theirs.get(name, 0.0) for name, ms in ours.items() if ms > SLOWER * theirs.get(name, 0.0)}
    nodes = [n for n in pair.after.nodes if not n.is_product and n.name not in told and _family(n) in grown]
    shrunk = sum(max(0.0, ms - ours.get(name, 0.0)) for name, ms in theirs.items())  # fused into another operator
    top = sorted(grown, key=lambda name: -grown[name])[:3]
    change, recipe = advise_placement(pair, "quantize the inputs of products alone")
    listed = ", ".join(f"{name} {ours[name]:.3g} ms (before {theirs.get(name, 0.0):.3g})" for name in top)
    return make_cause(
        pair,
        "other_operators",
        nodes,
        sum(grown.values()) - shrunk,
        (
            f"operators beside the products take {sum(ours.values()):.3g} ms, and {sum(theirs.values()):.3g} ms in the "
            f"baseline: {listed}",
            "what was done to the layers brought these operators, or slower ones than before",
            change,
        ),
        recipe,
    )


def _sum_others(profile: Profile, told: set[str]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for node in profile.nodes:
        if not node.is_product and node.name not in told:
            sums[_family(node)] += node.ms
    return dict(sums)


def _family(node: NodeTime) -> str:
    """Return the name that an operator and its form in eight bits, or one with a sum in it, share."""
    return node.operator.removeprefix("QLinear").removeprefix("Skip").removeprefix("Bias")


def find_fixed_cost(pair: ProfiledPair, told: set[str]) -> Found:
    """Find calls so short that most of them is the runtime's own cost."""
    profile = pair.after
    outside = profile.call_ms - profile.nodes_ms
    if profile.call_ms > FIXED_COST_MS or not is_slower(pair) or outside < 0.4 * profile.call_ms:
        return NOTHING
    cause = Cause(
        "fixed_cost",
        f"a call takes {profile.call_ms:.3g} ms, and its {len(profile.nodes)} nodes {profile.nodes_ms:.3g} of that",
        "the rest is the runtime's own cost for each call and node, which no smaller layer saves",
        "judge throughput at a larger batch",
        "validate:\n  gates:\n    - {metric: throughput, min_speedup: 1.5}\n",
    )
    return cause, set()
