"""What a candidate's profile is compared with: the machine's peaks, and the layers' twins in the baseline's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from runtime.clock.peaks import Peaks, Product
from runtime.measure.profile import CONVOLUTIONS, NodeTime, Profile

Trials = Callable[[Sequence[Product]], Sequence[float | None]]
"""Times products alone, in milliseconds: `runtime.clock.peaks.time_products`, bound to a backend and threads."""


@dataclass(frozen=True)
class ProfiledPair:
    """What causes are looked for in."""

    after: Profile
    before: Profile | None
    peaks: Peaks
    before_peaks: Peaks
    """With the rate at which as many bytes as the baseline's weights are read."""
    trials: Trials
    histories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Layer -> what was done to it."""
    timed_placement: bool = False
    """Its layers' places in int8 and float were chosen by times, at the build: `placement: fastest`."""
    target: str = ""
    """What the candidate is made for; "": the backend of the profile."""
    remedies: Mapping[str, str] = field(default_factory=dict)
    """What would end a cause, a piece of a recipe, as the build put it into the bundle; none of an older one."""

    @cached_property
    def twins(self) -> dict[str, NodeTime]:
        """Return, by the candidate's node, the baseline's node of the same layer."""
        return match_twins(self.after, self.before) if self.before is not None else {}

    def fill_remedy(self, name: str, layers: Sequence[str] = ()) -> str:
        """Return the piece of a recipe of that name for this backend and these layers; "" where the bundle has none."""
        # never str.format: a bundle's text may come from anyone, and {x.__class__} would be looked up
        remedy = self.remedies.get(name, "")
        return remedy.replace("{backend}", self.after.backend).replace("{layers}", ", ".join(layers))


def match_twins(after: Profile, before: Profile) -> dict[str, NodeTime]:
    """Return, by the candidate's node, the baseline's node of the same layer.

    Matched by the layer's name where both files have one, else by the file's node where the two files name alike, else
    by order where as many are left of both.
    """
    twins: dict[str, NodeTime] = {}
    ours, theirs = after.products, before.products
    pairs: list[Callable[[NodeTime], str]] = [lambda node: node.layer if node.layer != node.source else ""]
    names = [{node.source for node in side if node.source} for side in (ours, theirs)]
    if names[0] and len(names[0] & names[1]) > len(names[0]) / 2:  # torch's exporter counts nodes: 9 may be 12 there
        pairs.append(lambda node: node.source)
    for key in pairs:
        known = {key(node): node for node in theirs if key(node)}
        counts = Counter(key(node) for node in ours)
        for node in ours:
            if node.name not in twins and counts[key(node)] == 1 and key(node) in known:
                twins[node.name] = known[key(node)]
    matched = {twin.name for twin in twins.values()}
    left = [node for node in _sort_as_in_file(after) if node.name not in twins]
    right = [node for node in _sort_as_in_file(before) if node.name not in matched]
    if len(left) == len(right):
        for one, other in zip(left, right, strict=True):
            if (one.operator in CONVOLUTIONS) == (other.operator in CONVOLUTIONS):
                twins[one.name] = other
    return twins


def _sort_as_in_file(profile: Profile) -> list[NodeTime]:
    """Return the products as the file has them: a runtime may execute independent nodes in any order."""
    places = {node.name: number for number, node in enumerate(profile.file.nodes)}
    return sorted(profile.products, key=lambda node: places.get(node.source, len(places)))
