"""A reason why a candidate is slow, as it is told, and when it is worth a word."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.judge.twins import ProfiledPair
from runtime.measure.profile import NodeTime

WORTH, WORTH_OF_FAST = 0.05, 0.1
"""Share of a call below which a saving is not worth a word: of a candidate that is no faster than its baseline, and of
one that is, where silence is better than a false alarm."""
MOST_NAMED = 8


@dataclass(frozen=True)
class Cause:
    """One reason, and what would end it."""

    kind: str
    """A name that stays: signed_activations, unfused_qdq, casts, computed_in_float, compute_bound, odd_widths,
    no_int8_kernels, zeros_computed, slower_layers, other_operators, fixed_cost."""
    seen: str
    """What the profile shows, with its numbers."""
    why: str
    """Why that is slow."""
    change: str
    """What to do."""
    recipe: str = ""
    """A piece of a recipe that does it, YAML; "" where no recipe does."""
    saves_ms: float = 0.0
    """About what that saves of a call; 0 where it cannot be told."""
    speedup: float = 1.0
    """The call's time over what would be left."""
    layers: tuple[str, ...] = ()
    """The costliest layers or nodes concerned."""

    @property
    def sentence(self) -> str:
        """Return the cause as sentences for a report."""
        gain = f" (about {self.speedup:.2f}x)" if self.saves_ms else ""
        return f"{_begin(self.seen)}: {self.why}. {_begin(self.change)}{gain}."


Found = tuple[Cause | None, set[str]]
NOTHING: Found = (None, set())


def advise_placement(pair: ProfiledPair, change: str) -> tuple[str, str]:
    """Return what to do about operators around int8 layers, and its recipe: nothing that is in force already."""
    if pair.timed_placement:
        return "placements were timed at the build already, and this was the fastest: ignore layers, or nothing", ""
    return f"{change}; or ignore these layers", "passes:\n  - kind: int8\n    placement: fastest\n"


def total_ms(nodes: Iterable[NodeTime]) -> float:
    """Return the time of the nodes together."""
    return sum(node.ms for node in nodes)


def make_cause(
    pair: ProfiledPair,
    kind: str,
    nodes: Sequence[NodeTime],
    saves_ms: float,
    words: tuple[str, str, str],
    recipe: str = "",
) -> Found:
    """Make a cause of what `nodes` take, unless it saves too little. `words`: what is seen, why, what to change."""
    call = pair.after.call_ms
    if saves_ms < (WORTH if is_slower(pair) else WORTH_OF_FAST) * call:
        return NOTHING
    costly = sorted(nodes, key=lambda node: -node.ms)[:MOST_NAMED]
    layers = tuple(dict.fromkeys(node.layer or node.name for node in costly))
    left = max(call - saves_ms, 0.05 * call)
    cause = Cause(kind, *words, recipe, round_digits(saves_ms), round(call / left, 2), layers)
    return cause, {node.name for node in nodes}


def is_slower(pair: ProfiledPair) -> bool:
    """Return whether the candidate's profile is hardly shorter than the baseline's, or there is none."""
    return pair.before is None or pair.after.call_ms > 0.9 * pair.before.call_ms


def round_digits(value: float) -> float:
    """Round to four digits, for a record that is read by people."""
    return 0.0 if not value or not math.isfinite(value) else round(value, 3 - math.floor(math.log10(abs(value))))


def _begin(text: str) -> str:
    return text[0].upper() + text[1:]
