"""The graph of a decoder that also sees, and the two that it is cut into: what sees, and what reads and writes.

Passes see one graph, in which both stand beside each other; a bundle holds two, so that an image is looked at once.
"""

from __future__ import annotations

import onnx_ir as ir

from compress.graph.edit import tidy
from compress.graph.halves import drop_idle_inputs, join_graphs, keep_outputs
from compress.graph.run import clone
from compress.graph.specs import input_specs, is_cache
from runtime.bundle.tensors import TensorSpec
from runtime.encode.language import FEATURES

MADE = "/made"
"""Behind the name of features, that of the output which gives them: the decoder reads them as an input."""


def sees(model: ir.Model) -> bool:
    """Return whether the graph is of a decoder and of what sees for it."""
    return any(is_made(value) for value in model.graph.outputs)


def is_made(value: ir.Value) -> bool:
    name = value.name or ""
    return name.startswith(FEATURES) and name.endswith(MADE)


def put_beside(decoder: ir.Model, vision: ir.Model) -> None:
    """Put what sees beside the decoder that reads its features, in place; those that nothing reads are left out."""
    drop_idle_inputs(decoder)
    read = {value.name for value in decoder.graph.inputs}
    keep_outputs(vision, [value.name or "" for value in vision.graph.outputs if value.name in read])
    tidy(vision)
    for value in vision.graph.outputs:
        value.name = f"{value.name}{MADE}"
    join_graphs(decoder, vision, "vision")


def split_sight(model: ir.Model) -> tuple[ir.Model, ir.Model]:
    """Return what sees and the decoder; the graph stays."""
    vision, decoder = clone(model), clone(model)
    keep_outputs(vision, [value.name or "" for value in model.graph.outputs if is_made(value)])
    keep_outputs(decoder, [value.name or "" for value in model.graph.outputs if not is_made(value)])
    for part in (vision, decoder):
        tidy(part)
        drop_idle_inputs(part)
    for value in vision.graph.outputs:
        value.name = (value.name or "").removesuffix(MADE)
    return vision, decoder


def specs_fed(model: ir.Model, float_inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Return what a graph reads: what the float graph does, but for a decoder, whose cache may have another form."""
    keeps = any(is_cache(value.name or "") for value in model.graph.outputs)
    return input_specs(decoder_of(model)) if keeps else float_inputs


def decoder_of(model: ir.Model) -> ir.Model:
    """Return the graph that reads and writes texts: the decoder beside what sees, or the graph itself."""
    return split_sight(model)[1] if sees(model) else model
