"""What a plan says of the engines that a recipe asks for: shapes that cannot be, and what is compiled here or later."""

from __future__ import annotations

from collections.abc import Sequence

from compress.engine.compile import list_capabilities, why_not_here
from compress.engine.orders import engine_exports, find_needed_ranges, profile_problems, ranges_of
from compress.facts import Note
from compress.planning.inputs import Inputs, generation_of
from compress.recipe.exports import Engine
from compress.recipe.schema import Recipe
from runtime.bundle.engine import EngineOrder
from runtime.bundle.tensors import TensorSpec

DECODER = (TensorSpec("", "int64", ("batch", "sequence")), TensorSpec("", "float32", ("batch", "past", "total")))
"""The free sizes of a decoder's graph, which has its cache as inputs."""


def engine_problems(inputs: Inputs) -> list[str]:
    """Report profiles that the model cannot take or that the bundle is judged outside of, and GPUs that are refused."""
    recipe, generation, problems = inputs.recipe, generation_of(inputs), []
    needed = find_needed_ranges(recipe, inputs.preprocess, generation)
    for index, export in engine_exports(recipe):
        specs = graph_inputs(inputs)
        ranges = ranges_of(export, recipe, inputs.preprocess, generation, specs)
        problems += [f"export.{index}: {text}" for text in profile_problems(ranges, specs, needed)]
        problems += [f"export.{index}: {text}" for text in _capability_problems(export, recipe)]
    return problems


def engine_notes(inputs: Inputs) -> list[Note]:
    """Say which engines can be compiled on this machine, and which are left for another."""
    return [_make_note(export) for _, export in engine_exports(inputs.recipe)]


def graph_inputs(inputs: Inputs) -> Sequence[TensorSpec]:
    """Return the inputs of the exported graph, as far as their free sizes go."""
    return DECODER if inputs.recipe.model.generates else inputs.facts.inputs


def _capability_problems(export: Engine, recipe: Recipe) -> list[str]:
    """Report GPUs that cannot compute what a pass leaves, or that the installed compiler, if any, does not know."""
    wanted = getattr(export, "compute_capabilities", ())
    refusals = [refusal for pass_ in recipe.passes if (refusal := pass_.explain_capabilities(wanted))]
    if refusals:
        return [f"compute_capabilities: {refusals[0]}"]
    known = list_capabilities(export.kind)
    unknown = [capability for capability in wanted if known and capability not in known]
    if not unknown:
        return []
    return [
        f"compute_capabilities: {export.kind} does not compile for {', '.join(unknown)}; known: {', '.join(known)}; "
        "for others use kind: tensorrt on the machine that has the GPU"
    ]


def _make_note(export: Engine) -> Note:
    order = EngineOrder("", export.kind, "", (), export.model_dump(mode="json"))
    text = why_not_here(order)
    if not text:
        return Note("info", f"export: the engine for {export.kind} is compiled here")
    return Note(
        "warning",
        f"export: {text}; the bundle gets the ONNX file for {export.kind}, and `compress compile BUNDLE` finishes it "
        "on the target machine",
    )
