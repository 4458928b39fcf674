"""`rotate`: a rotation of the residual stream, and one inside each attention head, folded into the weights.

QuaRot (arXiv:2404.00456): the function of the model stays the same, but outliers are spread over all channels, so that
weights (and activations) round with less error. Nothing is added to the graph.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar, Literal

from compress.facts import LayerDecision, LayerFacts, ModelFacts, Note, PassPlan, Structure, assign_roles
from compress.formats.targets import Target
from compress.passes.base import Pass
from runtime.words import size_text


class Rotate(Pass):
    """Multiply the residual stream, and each head's values, with a Hadamard matrix; exact, before any rounding.

    The stream, which blocks read and add to, needs norms without a mean (RMSNorm) before what reads it. Where one of
    the two cannot be rotated, the other is, and the plan says so.
    """

    stage: ClassVar[Any] = "blocks"

    kind: Literal["rotate"] = "rotate"

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        structure = facts.structure
        if structure is None:
            return PassPlan(facts, problems=("rotate: works on torch models; an ONNX file has no blocks to rotate",))
        decisions = _decide_layers(facts, structure)
        turned = {d.layer for d in decisions if d.action == "rotated"}
        gaps = []
        if structure.residual is None:
            why = "; ".join(structure.notes) or "no residual stream was found"
            gaps.append(f"rotate: the residual stream cannot be rotated ({why})")
        if not values(structure):
            gaps.append("rotate: heads cannot be rotated: no layer reads attention's weighted sums of another's values")
        names = [layer.name for layer in facts.layers if layer.sparse and layer.name in turned]
        way = "put rotate before the pass that makes it sparse, or leave it out"
        problems = [
            *(gaps if not turned else []),
            *_refuse_rounded(facts, {d.layer for d in decisions}),
            *([f"rotate: {names[0]} is sparse, and a rotation fills its zeros; {way}"] if names else []),
        ]
        if problems:
            return PassPlan(facts, problems=tuple(problems))
        after, notes = _untie_head(facts, structure)
        return PassPlan(after, decisions, (*(Note("warning", text) for text in gaps), *notes))


def _decide_layers(facts: ModelFacts, structure: Structure) -> tuple[LayerDecision, ...]:
    """Return a decision for each layer: what of it is rotated."""
    changes: dict[str, list[str]] = {}
    if residual := structure.residual:
        for name in (*residual.embeddings, *residual.writers):
            changes.setdefault(name, []).append("what it writes to the stream")
        for name in residual.readers:
            changes.setdefault(name, []).append("what it reads of the stream")
    for input_group in values(structure):
        changes.setdefault(input_group.source, []).append("its values, head by head")
        for name in input_group.layers:
            changes.setdefault(name, []).append("what it reads of each head")
    return tuple(
        LayerDecision(layer.name, layer.type, "rotated", " and ".join(changes[layer.name]))
        if layer.name in changes
        else LayerDecision(layer.name, layer.type, "kept", "touches nothing that is rotated")
        for layer in facts.layers
    )


def values(structure: Structure) -> tuple[Any, ...]:
    """Return the input groups that take attention's weighted sums of another layer's outputs."""
    return tuple(input_group for input_group in structure.input_groups if input_group.how == "value")


def _refuse_rounded(facts: ModelFacts, rotated: set[str]) -> list[str]:
    names = [layer.name for layer in facts.layers if layer.bits < 16 and layer.name in rotated]
    return [f"rotate: {names[0]} is rounded already; put rotate before the pass that does it"] if names else []


def _untie_head(facts: ModelFacts, structure: Structure) -> tuple[ModelFacts, list[Note]]:
    """Give the head a weight of its own in the facts: it takes the last norm's scale, which the embedding lacks."""
    residual = structure.residual
    if residual is None:
        return facts, []
    counts = Counter(layer.weight for layer in facts.layers)
    tied = [layer for layer in facts.layers if layer.name in residual.readers and counts[layer.weight] > 1]
    if not tied:
        return facts, []
    notes = [
        Note(
            "warning",
            f"rotate: {layer.name} shares its weight with an embedding and gets one of its own: "
            f"{size_text(layer.n_bytes)} more",
        )
        for layer in tied
    ]
    owned = {layer.name for layer in tied}

    def untie(layer: LayerFacts) -> LayerFacts:
        return replace(layer, weight=f"{layer.name}.weight") if layer.name in owned else layer

    tables = [layer for layer in facts.layers if layer.name in residual.embeddings]
    kept = {layer.weight: f"{layer.name}.weight" for layer in tables}
    layers = tuple(
        replace(untie(layer), weight=kept[layer.weight]) if layer.name in residual.embeddings else untie(layer)
        for layer in facts.layers
    )
    return replace(facts, layers=assign_roles(layers, structure)), notes
