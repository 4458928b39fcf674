"""`rtn`: weights only, rounded to the nearest of 2^bits levels; activations stay float (W8A16, W4A16)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from compress.errors import PassError
from compress.passes.weight_only import WeightOnly

if TYPE_CHECKING:
    from compress.passes.context import PassContext, PassResult


class Rtn(WeightOnly):
    """Round-to-nearest weight-only quantization of the matrix products."""

    kind: Literal["rtn"] = "rtn"

    def apply(self, model: Any, context: PassContext) -> PassResult:
        """`model`: a GraphState; weights are rounded with a searched scale for each group. Raises PassError."""
        from compress.graph.layers import find_layers  # numpy, onnx-ir
        from compress.passes.context import PassResult
        from compress.quantize.rounding import round_to_nearest

        taken, kept = self.begin(model)
        layers = {layer.name: layer for layer in find_layers(model.model)}
        weights = {}
        for facts in context.progress(taken, "rtn: rounding"):
            try:
                weights[facts.name] = round_to_nearest(layers[facts.name].matrix(), *self.setting(facts))
            except ValueError as error:
                raise PassError(f"rtn: {facts.name}: {error}") from error
        state = replace(model, weight_only=[*model.weight_only, *weights], weights={**model.weights, **weights})
        return PassResult(state, (*map(self.decision, taken), *kept))
