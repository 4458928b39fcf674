"""Whether a model's weights stay in their files from the export to the verdict, and whether its float graph is run."""

from __future__ import annotations

from compress.facts import FLOAT_BYTES, ModelFacts, Note
from compress.recipe.exports import EngineExport
from compress.recipe.schema import Recipe
from compress.store.paths import resolve_path
from runtime.processes.memory import available_bytes
from runtime.words import size_text

WHOLE_BYTES = 512 * 2**20
"""Weights of a language model, in float32, up to which it is loaded, exported and run as a whole."""
FLOAT_COPIES = 1.5
"""Of the float weights, where they are run: a file that is mapped and packed for the kernels, and the candidate's.
Qwen2.5-Coder took 1.36 beside BASE_BYTES while both were opened, of 0.5B and of 1.5B alike (ONNX Runtime 1.31)."""
BASE_BYTES = 700 * 2**20
"""What the libraries take."""


def stays_in_files(recipe: Recipe, facts: ModelFacts) -> bool:
    """Return whether the graph of this language model is written, compared and judged without holding its weights.

    So it is beyond WHOLE_BYTES where passes work on its blocks alone: those over the whole module hold that, those
    over the graph run it, and engines are compiled of the float graph, too.
    """
    stages = {pass_.stage_on(facts) for pass_ in recipe.passes}
    decoder = recipe.model.decoder_only and facts.source == "torch"
    large = facts.structure is not None and facts.n_bytes > WHOLE_BYTES
    whole = recipe.validate_.steps is True or any(isinstance(export, EngineExport) for export in recipe.export)
    return recipe.has_onnx and decoder and large and stages == {"blocks"} and not whole


def allowed_bytes(recipe: Recipe, held: int = 0) -> int:
    """Return the memory that a run of the recipe may take on this machine beside the bytes that its processes hold."""
    limit = recipe.limits.memory_gib
    return available_bytes() if limit is None else min(available_bytes(), int(limit * 2**30) - held)


def runs_float(recipe: Recipe, facts: ModelFacts) -> bool:
    """Return whether the bundle gets the float graph, to be run and timed beside the candidate."""
    return not stays_in_files(recipe, facts) or BASE_BYTES + FLOAT_COPIES * facts.n_bytes <= allowed_bytes(recipe)


def note_narrow_source(recipe: Recipe, facts: ModelFacts) -> Note | None:
    """Return a note that the model's own files are smaller than the float graph that sizes are against; else None."""
    kind, _, file = recipe.model.source.partition(":")
    if kind == "gguf":
        held = size_text(resolve_path(recipe.root, file).stat().st_size)
        return Note("info", f"sizes are against float32, to which the file ({held}) was unpacked, and not against it")
    if facts.source != "torch" or facts.float_bytes >= FLOAT_BYTES or not recipe.has_onnx:
        return None
    if not runs_float(recipe, facts):  # sizes are then against those files
        return None
    return Note(
        "info",
        f"sizes are against float32, in which the graph computes; the model's own files hold {8 * facts.float_bytes} "
        f"bits a number: what is 4x smaller than float32 is {facts.float_bytes:g}x smaller than these",
    )


def note_missing_float(recipe: Recipe, facts: ModelFacts) -> Note | None:
    """Return what a report says of a float graph that is not in the bundle; None where it is."""
    if runs_float(recipe, facts):
        return None
    needed, allowed = int(BASE_BYTES + FLOAT_COPIES * facts.n_bytes), allowed_bytes(recipe)
    return Note(
        "warning",
        f"the float graph ({size_text(facts.n_bytes)}) is not in the bundle: running it takes about "
        f"{size_text(needed)} of memory, and {size_text(allowed)} "
        "may be taken (limits.memory_gib, or what is free). Torch measures its quality, block by block; how much "
        "faster the candidate is stays unknown. Build with more memory to have both timed",
    )
