"""What the quantizing passes share at plan time: which layers they take, and what the target says of the format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from compress.facts import WORTH_NAMING, LayerDecision, LayerFacts, ModelFacts, Note, select
from compress.formats.targets import Format, Target, refusal

MOST_NAMED = 6
"""Layers that a note names."""


def choose_layers(
    layers: Sequence[LayerFacts],
    targets: Sequence[str],
    ignore: Sequence[str],
    unfit: Callable[[LayerFacts], str | None],
) -> tuple[list[LayerFacts], list[LayerDecision]]:
    """Choose the layers to take, and give a decision with its reason for each of the others.

    `unfit` says why a layer cannot be taken, or None. Layers already in fewer than 16 bits are left to the pass that
    made them so.
    """
    ignored, wanted = select(layers, ignore), select(layers, targets)
    taken, kept = [], []
    for layer in layers:
        reason = None
        if layer.name in ignored:
            reason = f"ignore: {ignored[layer.name]}"
        elif targets and layer.name not in wanted:
            reason = "not among targets"
        elif layer.bits < 16:
            reason = f"already in {layer.bits:g} bits"
        elif layer.bits > 32:
            reason = f"computed in {layer.bits:g} bits, which nothing rounds; convert the model to float32"
        else:
            reason = unfit(layer)
        if reason is None:
            taken.append(layer)
        else:
            kept.append(LayerDecision(layer.name, layer.type, "kept", reason))
    return taken, kept


def tell_float_share(
    kind: str,
    facts: ModelFacts,
    kept: Sequence[LayerDecision],
    unfit: Callable[[LayerFacts], str | None],
    other: tuple[str, Callable[[LayerFacts], str | None]] | None = None,
) -> list[Note]:
    """Return notes on what of the model's bytes stays float because the pass has no form for it, with their share.

    Tables are not among them: whether they are rounded is the recipe's choice. `other`: a pass and its `unfit`, named
    where it takes what this one leaves, and that is most of the model.
    """
    names = {decision.layer for decision in kept}
    by_reason: dict[str, dict[str, int]] = {}
    for layer in facts.distinct_layers():
        able = layer.type == "Embedding" or layer.bits < 16 or layer.name not in names
        if not able and (why := unfit(layer)):
            by_reason.setdefault(why, {})[layer.name] = layer.n_bytes
    unable = {name for sizes in by_reason.values() for name in sizes}
    left = [layer for layer in facts.distinct_layers() if layer.name in unable and other and not other[1](layer)]
    if other and sum(layer.n_bytes for layer in left) > facts.n_bytes / 2:
        reached = [layer for layer in facts.distinct_layers() if layer.name not in names]
        share = sum(layer.n_bytes for layer in reached) / facts.n_bytes
        what = f"layer {reached[0].name}" if len(reached) == 1 else f"{len(reached)} layers"
        text = f"{kind} reaches only {what} ({share:.0%} of the weights): use {other[0]}, which takes "
        return [Note("warning", text + list_some([layer.name for layer in left]))]
    worth = WORTH_NAMING * max(facts.n_bytes, 1)
    told = {why: sizes for why, sizes in by_reason.items() if sum(sizes.values()) >= worth}
    if facts.outside:
        told["no matrix product, convolution or table of its own"] = dict(facts.outside)
    return [_tell_share(kind, facts, sizes, why) for why, sizes in told.items()]


def _tell_share(kind: str, facts: ModelFacts, sizes: Mapping[str, int], why: str) -> Note:
    share = sum(sizes.values()) / max(facts.n_bytes, 1)
    return Note("warning", f"{kind}: {share:.0%} of the weights' bytes stay float: {list_some(list(sizes))} ({why})")


def list_some(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")


def pattern_problems(layers: Sequence[LayerFacts], kind: str, fields: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a sentence for each pattern that selects nothing: a misspelt layer name is never ignored silently."""
    problems = []
    for field, patterns in fields.items():
        for pattern in patterns:
            if not select(layers, [pattern]):
                some = ", ".join(layer.name for layer in layers[:3])
                problems.append(f"{kind}: {field}: {pattern!r} matches no layer (this model has {some}, ...)")
    return problems


def refuse_rounded(kind: str, facts: ModelFacts, op: str = "") -> list[str]:
    """Return a sentence where a layer, one of that `op` if it is given, is rounded that the pass works on in float."""
    rounded = [layer.name for layer in facts.layers if layer.bits < 16 and op in ("", layer.op)]
    return [f"{kind}: must come before the pass that rounds {rounded[0]}"] if rounded else []


def target_word(target: Target, format_name: Format, kind: str) -> tuple[list[Note], list[str]]:
    """Return the notes and the problems that follow from what the target does with a format."""
    fact = target.fact(format_name)
    if text := refusal(target, format_name, kind):
        return [], [text]
    level: Literal["slow", "info"] = "slow" if fact.verdict == "slow" else "info"
    return [Note(level, f"{target.name}: {format_name}: {fact.text}")], []
