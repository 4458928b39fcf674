"""`equalize`: cross-layer equalization of channel ranges before int8 (Nagel et al., 2019, arXiv:1906.04721)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from compress.facts import LayerDecision, LayerFacts, ModelFacts, PassPlan
from compress.passes.base import LayerPattern, Pass
from compress.passes.choosing import choose_layers, pattern_problems
from compress.targets import Target

if TYPE_CHECKING:
    from compress.context import PassContext, PassResult


class Equalize(Pass):
    """Scale channels between two layers with nothing but a ReLU between them; exact, and free at run time."""

    needs_calibration: ClassVar[bool] = True
    calibration_runs: ClassVar[float] = 1.3

    kind: Literal["equalize"] = "equalize"
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """How much of the spread between channels moves from the activation to the weight that reads it."""
    ignore: tuple[LayerPattern, ...] = ()
    """Layers (the second of a pair) whose input is left as it is."""

    def unfit(self, layer: LayerFacts) -> str | None:
        """Why this layer cannot be taken, or None."""
        return "an embedding reads no activation" if layer.type == "Embedding" else None

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        taken, kept = choose_layers(facts.layers, (), self.ignore, self.unfit)
        problems = pattern_problems(facts.layers, self.kind, {"ignore": self.ignore})
        if len(taken) < 2:
            problems.append("equalize: the model has no two layers in a row")
        decisions = [LayerDecision(la.name, la.type, "equalized", "where only a ReLU stands before it") for la in taken]
        return PassPlan(facts, (*decisions, *kept), (), tuple(problems))

    def apply(self, model: Any, context: PassContext) -> PassResult:
        """`model`: a GraphState whose float graph is rewritten."""
        from compress.context import PassResult
        from compress.errors import PassError
        from compress.graph.layers import find_layers  # numpy, onnx-ir, onnxruntime
        from compress.graph.run import clone
        from compress.quantize.calibrate import observe
        from compress.quantize.equalize import equalize_pair, find_pairs, input_channel_peak
        from compress.quantize.smooth import smoothing_scales

        graph = clone(model.model)
        taken, kept = choose_layers(model.facts(), (), self.ignore, self.unfit)
        wanted = {layer.name for layer in taken}
        found = find_pairs(find_layers(graph))
        pairs = [pair for pair in found if pair.second.name in wanted and pair.first.name not in model.weights]
        axes = {pair.tensor: 1 if pair.second.op == "Conv" else -1 for pair in pairs}
        try:
            seen = observe(graph, axes, context.progress(context.batches, "equalize: observing")) if axes else {}
        except ValueError as error:
            raise PassError(f"equalize: {error}") from error
        decisions = {
            la.name: LayerDecision(la.name, la.type, "kept", "not alone behind a layer and a ReLU") for la in taken
        }
        for pair in pairs:
            peak = seen[pair.tensor].channel_peak
            assert peak is not None
            equalize_pair(graph, pair, smoothing_scales(peak, input_channel_peak(pair.second), self.alpha))
            name = pair.second.name
            decisions[name] = LayerDecision(name, pair.second.type, "equalized", f"with {pair.first.name}")
        return PassResult(replace(model, model=graph), (*decisions.values(), *kept))
