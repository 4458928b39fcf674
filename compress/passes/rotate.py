"""`rotate`: a rotation of the residual stream, and one inside each attention head, folded into the weights.

QuaRot (arXiv:2404.00456): the function of the model stays the same, but outliers are spread over all channels, so that
weights (and activations) round with less error. Nothing is added to the graph.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.facts import LayerDecision, LayerFacts, ModelFacts, Note, PassPlan, Structure
from compress.passes.base import Pass
from compress.targets import Target

if TYPE_CHECKING:
    from compress.context import PassContext, PassResult


class Rotate(Pass):
    """Multiply the residual stream, and each head's values, with a Hadamard matrix; exact, before any rounding."""

    stage: ClassVar[Any] = "blocks"

    kind: Literal["rotate"] = "rotate"
    residual: bool = True
    """Rotate the stream that blocks read and add to. Needs norms without a mean (RMSNorm) before what reads it."""
    heads: bool = True
    """Rotate what each attention head takes out of its values."""
    randomize: bool = True
    """Random signs in the Hadamard matrix, from the recipe's seed."""

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        structure = facts.structure
        if structure is None:
            return PassPlan(facts, problems=("rotate: works on torch models; an ONNX file has no blocks to rotate",))
        decisions = self._decisions(facts, structure)
        turned = {d.layer for d in decisions if d.action == "rotated"}
        problems = [*self._problems(structure), *_rounded(facts, {d.layer for d in decisions}), *_sparse(facts, turned)]
        if problems:
            return PassPlan(facts, problems=tuple(problems))
        after, notes = _untied(facts, structure) if self.residual else (facts, [])
        return PassPlan(after, decisions, tuple(notes))

    def apply(self, model: Any, context: PassContext) -> PassResult:
        """`model`: a StreamedModel. Raises PassError naming the layer."""
        from compress.passes.rotate_steps import apply_rotate  # torch

        return apply_rotate(self, model, context)

    def _problems(self, structure: Structure) -> list[str]:
        if not (self.residual or self.heads):
            return ["rotate: residual and heads are both false: there is nothing to rotate"]
        found = []
        if self.residual and structure.residual is None:
            why = "; ".join(structure.notes) or "no residual stream was found"
            found.append(f"rotate: the residual stream cannot be rotated ({why}); set residual: false")
        if self.heads and not values(structure):
            found.append("rotate: no layer reads attention's weighted sums of another layer's values; set heads: false")
        return found

    def _decisions(self, facts: ModelFacts, structure: Structure) -> tuple[LayerDecision, ...]:
        """Each layer, and what of it is rotated."""
        told: dict[str, list[str]] = {}
        if self.residual and structure.residual is not None:
            residual = structure.residual
            for name in (*residual.embeddings, *residual.writers):
                told.setdefault(name, []).append("what it writes to the stream")
            for name in residual.readers:
                told.setdefault(name, []).append("what it reads of the stream")
        if self.heads:
            for reading in values(structure):
                told.setdefault(reading.source, []).append("its values, head by head")
                for name in reading.layers:
                    told.setdefault(name, []).append("what it reads of each head")
        return tuple(
            LayerDecision(la.name, la.type, "rotated", " and ".join(told[la.name]))
            if la.name in told
            else LayerDecision(la.name, la.type, "kept", "touches nothing that is rotated")
            for la in facts.layers
        )


def values(structure: Structure) -> tuple[Any, ...]:
    """The readings that take attention's weighted sums of another layer's outputs."""
    return tuple(reading for reading in structure.readings if reading.how == "value")


def _rounded(facts: ModelFacts, rotated: set[str]) -> list[str]:
    names = [la.name for la in facts.layers if la.bits < 16 and la.name in rotated]
    return [f"rotate: {names[0]} is rounded already; put rotate before the pass that does it"] if names else []


def _sparse(facts: ModelFacts, rotated: set[str]) -> list[str]:
    names = [la.name for la in facts.layers if la.sparse and la.name in rotated]
    way = "put rotate before the pass that makes it sparse, or leave it out"
    return [f"rotate: {names[0]} is sparse, and a rotation fills its zeros; {way}"] if names else []


def _untied(facts: ModelFacts, structure: Structure) -> tuple[ModelFacts, list[Note]]:
    """The facts with the head's weight its own: it takes the last norm's scale, which the embedding does not have."""
    residual = structure.residual
    assert residual is not None
    counts = Counter(layer.weight for layer in facts.layers)
    tied = [la for la in facts.layers if la.name in residual.readers and counts[la.weight] > 1]
    if not tied:
        return facts, []
    notes = [
        Note(
            "warning",
            f"rotate: {la.name} shares its weight with an embedding and gets one of its own: "
            f"{la.n_bytes / 1e6:.1f} MB more",
        )
        for la in tied
    ]
    owned = {la.name for la in tied}

    def own(layer: LayerFacts) -> LayerFacts:
        return replace(layer, weight=f"{layer.name}.weight") if layer.name in owned else layer

    tables = [la for la in facts.layers if la.name in residual.embeddings]
    kept = {la.weight: f"{la.name}.weight" for la in tables}
    layers = tuple(
        replace(own(la), weight=kept[la.weight]) if la.name in residual.embeddings else own(la) for la in facts.layers
    )
    return replace(facts, layers=layers), notes
