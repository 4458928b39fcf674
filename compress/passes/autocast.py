"""`autocast`: float16 or bfloat16 where the ranges seen on calibration data allow it, float32 elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from compress.facts import LayerDecision, LayerFacts, ModelFacts, Note, PassPlan
from compress.passes.base import LayerPattern, Pass
from compress.passes.choosing import choose_layers, pattern_problems, refusal, target_word
from compress.targets import Target

if TYPE_CHECKING:
    from compress.context import PassContext, PassResult


class Autocast(Pass):
    """Half precision with range checks: a node whose values could overflow stays float32 and is named."""

    needs_calibration: ClassVar[bool] = True
    calibration_runs: ClassVar[float] = 1.3

    kind: Literal["autocast"] = "autocast"
    dtype: Literal["float16", "bfloat16"] = "float16"
    """What the rest is computed in."""
    headroom: Annotated[float, Field(ge=1)] = 4.0
    """A node stays float32 if its largest value seen times this overflows."""
    ignore: tuple[LayerPattern, ...] = ()
    """Layers that stay float32, by name, `re:` pattern or type."""

    def unfit(self, layer: LayerFacts) -> str | None:
        """Every float layer can be cast."""
        return None

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        taken, kept = choose_layers(facts.layers, (), self.ignore, self.unfit)
        notes, problems = target_word(target, self.dtype, self.kind)
        problems += pattern_problems(facts.layers, self.kind, {"ignore": self.ignore})
        decisions = [LayerDecision(layer.name, layer.type, self.dtype) for layer in taken]
        after = facts.with_bits({layer.name: 16 for layer in taken})
        return PassPlan(after, (*decisions, *kept), tuple(notes), tuple(problems))

    def refused_by(self, target: Target) -> str | None:
        return refusal(target, self.dtype, self.kind)

    def apply(self, model: Any, context: PassContext) -> PassResult:
        """`model`: a GraphState; records the type and the nodes that stay float32 because of their range."""
        from compress.context import PassResult
        from compress.errors import PassError
        from compress.graph.half import layer_nodes  # numpy, onnx-ir
        from compress.graph.layers import find_layers
        from compress.quantize.ranges import overflowing_nodes

        taken, kept = choose_layers(model.facts(), (), self.ignore, self.unfit)
        try:
            batches = context.progress(context.batches, "autocast: observing")
            overflowing = overflowing_nodes(model.model, self.dtype, self.headroom, batches)
        except ValueError as error:
            raise PassError(f"autocast: {error}") from error
        ignored = {d.layer for d in kept if d.reason.startswith("ignore")}
        nodes = {layer.name: layer_nodes(layer) for layer in find_layers(model.model)}
        stays = sorted({*overflowing, *(node for name in ignored for node in nodes[name])})
        if taken and all(nodes[layer.name][0] in overflowing for layer in taken):
            raise PassError(f"autocast: {_nothing_left(self, overflowing)}")
        notes = []
        if overflowing:
            named = ", ".join(f"{name} (largest value {peak:.3g})" for name, peak in sorted(overflowing.items()))
            notes.append(Note("warning", f"autocast: could overflow {self.dtype} and stay float32: {named}"))
        decisions = [
            LayerDecision(la.name, la.type, "float32", "could overflow")
            if nodes[la.name][0] in overflowing
            else LayerDecision(la.name, la.type, self.dtype)
            for la in taken
        ]
        state = replace(model, half=self.dtype, half_kept=stays)
        return PassResult(state, (*decisions, *kept), tuple(notes))


def _nothing_left(knobs: Autocast, overflowing: dict[str, float]) -> str:
    """Where every layer would have to stay float32."""
    node, peak = max(overflowing.items(), key=lambda item: item[1])
    way_out = "use dtype: bfloat16, or ask for less headroom" if knobs.dtype == "float16" else "leave the pass out"
    return (
        f"every layer could overflow {knobs.dtype} (the largest value, {peak:.3g}, is at {node}; headroom "
        f"{knobs.headroom:g}), so nothing can be computed in it: {way_out}"
    )
