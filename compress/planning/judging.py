"""Whether anything on this machine runs the graph that is to be judged, and who scores it if nothing does."""

from __future__ import annotations

from compress.facts import ModelFacts
from compress.formats.targets import NOT_ON_CPUS
from compress.planning.in_files import runs_float, stays_in_files
from compress.recipe.schema import Recipe
from runtime.measure.benchmark import explain_unavailable


def explain_not_run(recipe: Recipe) -> str | None:
    """Return why nothing here runs the graph that the recipe's passes leave, in the words of one; None where it runs.

    Its own engine does not work here, and ONNX Runtime has no kernels for its numbers (FP4, MXFP8, bfloat16).
    """
    why = explain_unavailable(recipe)
    if why is None or not recipe.has_onnx:
        return None
    for pass_ in recipe.passes:
        for name in (name for name in pass_.formats if name in NOT_ON_CPUS):
            number, instead = name.upper(), "export a checkpoint alone (target: vllm)"
            if name == "bfloat16":
                number, instead = name, "use dtype: float16"
            return (
                f"{pass_.kind}: {recipe.target} does not work here ({why}), and ONNX Runtime computes no {number} on "
                f"CPUs, so that the result could not be judged; {instead}, or apply it where that works"
            )
    return None


def runs_once(recipe: Recipe, facts: ModelFacts) -> bool:
    """Return whether the build runs a decoder and its float graph, both too large to be run twice, for the judgement.

    The samples then have the outputs of the very files that the bundle holds.
    """
    return stays_in_files(recipe, facts) and runs_float(recipe, facts) and explain_not_run(recipe) is None


def is_scored_by_torch(recipe: Recipe, facts: ModelFacts) -> bool:
    """Return whether torch measures what such a graph loses, at the build, with inputs rounded as its engine does.

    So it is of a language model all of whose passes work on blocks: what rewrites the graph, torch does not see.
    """
    stages = {pass_.stage_on(facts) for pass_ in recipe.passes}
    of_torch = recipe.model.decoder_only and facts.source == "torch"
    return explain_not_run(recipe) is not None and of_torch and stages == {"blocks"}
