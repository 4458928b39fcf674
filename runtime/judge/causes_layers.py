"""Why layers are slower than their twins: widths that kernels do not like, zeros that are multiplied, other kernels."""

from __future__ import annotations

import math

from runtime.judge.cause import MOST_NAMED, NOTHING, Cause, Found, is_slower, make_cause, total_ms
from runtime.judge.twins import ProfiledPair
from runtime.measure.profile import NodeTime, Profile

SLOWER = 1.25
"""A layer that takes this many times its twin's time counts as slower: two profiles of one layer differ by less."""
ODD_RATE = 0.85
"""Of its twin's rate, below which a layer's width counts as one that kernels do not like."""
KERNEL_WIDTH = 8
"""Channels that kernels take at once, or a divisor of it."""
LAYOUT = ("ReorderInput", "ReorderOutput")


def _file_widths(profile: Profile, node: NodeTime) -> tuple[int, ...]:
    """Return a layer's channels or columns as the file has them: a runtime pads what it executes."""
    source = next((n for n in profile.file.nodes if n.name == node.source), None)
    shapes = [
        profile.file.constants[name][1]
        for name in (source.inputs[1:2] if source else ())
        if name in profile.file.constants
    ]
    return shapes[0][:2] if shapes and len(shapes[0]) > 1 else (node.output_width, node.input_width)


def _needed_flops(profile: Profile, node: NodeTime) -> float:
    """Return a layer's operations at the widths of the file: what a runtime pads is computed for nothing."""
    executed = node.output_width * node.input_width
    return node.flops * min(1.0, math.prod(_file_widths(profile, node)) / executed) if executed else node.flops


def find_odd_widths(pair: ProfiledPair, told: set[str]) -> Found:
    """Find layers whose widths were changed to no multiple of KERNEL_WIDTH, at a much lower rate than their twins."""
    profile, before = pair.after, pair.before
    odd: list[tuple[NodeTime, NodeTime]] = []
    rates: dict[str, tuple[float, float]] = {}
    saves = 0.0
    for node in profile.products:
        twin = pair.twins.get(node.name)
        if twin is None or before is None or not (node.flops and twin.flops and node.ms) or node.name in told:
            continue
        ours, theirs = _file_widths(profile, node), _file_widths(before, twin)
        changed = [a for a, b in zip(ours, theirs, strict=False) if a != b and a % KERNEL_WIDTH]
        rate, usual = _needed_flops(profile, node) / node.ms / 1e6, _needed_flops(before, twin) / twin.ms / 1e6
        if changed and node.computes_in == twin.computes_in and rate < ODD_RATE * usual:
            odd.append((node, twin))
            rates[node.name] = rate, usual
            saves += node.ms * (1 - rate / usual)
    if not odd:
        return NOTHING
    assert before is not None
    after, twin = max(odd, key=lambda pair: pair[0].ms)
    widths, usual_widths = (
        " x ".join(map(str, _file_widths(side, node))) for side, node in ((profile, after), (before, twin))
    )
    rate, usual = rates[after.name]
    reorders = profile.find(*LAYOUT)  # from kernels that take channels in blocks to those that do not, and back
    saves += max(0.0, total_ms(reorders) - total_ms(before.find(*LAYOUT)))
    moved = f", and {len(reorders)} copies between layouts take {total_ms(reorders):.3g} ms" if reorders else ""
    return make_cause(
        pair,
        "odd_widths",
        [*(node for node, _ in odd), *reorders],
        saves,
        (
            f"{len(odd)} layers have widths that are no multiple of {KERNEL_WIDTH} and run slower for it: "
            f"{after.layer} ({widths}) at {rate:.0f} GFLOP/s, its twin ({usual_widths}) at {usual:.0f}{moved}",
            f"{profile.backend}'s kernels take channels in blocks: they fill up other widths, or compute them by a "
            "slower way",
            "prune to multiples of 8 or 16",
        ),
        "passes:\n  - kind: prune_channels\n    round_to: 16\n",
    )


def find_zeros_computed(pair: ProfiledPair, told: set[str]) -> Found:
    """Find layers with zeros that are multiplied as any other number."""
    sparse = {layer for layer, history in pair.histories.items() if any("sparse " in h for h in history)}
    twins = pair.twins
    same = [
        node
        for node in pair.after.products
        if node.layer in sparse
        and (t := twins.get(node.name)) is not None
        and t.flops == node.flops
        and t.computes_in == node.computes_in
    ]
    if not same or not is_slower(pair):
        return NOTHING
    cause = Cause(
        "zeros_computed",
        f"{len(same)} layers with zeros in their weights multiply as much as before "
        f"({sum(node.flops for node in same) / 1e9:.3g} GFLOP of a call)",
        f"{pair.after.backend} multiplies zeros as any other number",
        "remove whole channels, or use fewer bits",
        "passes:\n  - kind: prune_channels\n    ratio: 0.3\n  - kind: int8\n",
        layers=tuple(node.layer for node in same[:MOST_NAMED]),
    )
    return cause, {node.name for node in same}


def find_slower_layers(pair: ProfiledPair, told: set[str]) -> Found:
    """Find layers that take much longer than their twins, for no reason that was told already."""
    twins = pair.twins
    slow = [
        (node, twin)
        for node in pair.after.products
        if node.name not in told
        and (twin := twins.get(node.name)) is not None
        and node.ms > SLOWER * twin.ms
        and node.computes_in != twin.computes_in
    ]
    if not slow:
        return NOTHING
    nodes = [node for node, _ in slow]
    after, twin = max(slow, key=lambda pair: pair[0].ms - pair[1].ms)
    names = [node.layer for node in sorted(nodes, key=lambda node: -node.ms)][:MOST_NAMED]
    return make_cause(
        pair,
        "slower_layers",
        nodes,
        sum(node.ms - twin.ms for node, twin in slow),
        (
            f"{len(nodes)} layers take {total_ms(nodes):.3g} ms, in the baseline {sum(t.ms for _, t in slow):.3g} ms: "
            f"{after.layer} {after.ms:.3g} ms as {after.operator}, {twin.ms:.3g} ms as {twin.operator}",
            f"{pair.after.backend}'s kernels in {after.computes_in} are slower for these shapes than those in "
            f"{twin.computes_in}",
            "leave these layers as they were",
        ),
        f"ignore: [{', '.join(names)}]  # of the pass that changed them\n",
    )
