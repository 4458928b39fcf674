"""The engines that a recipe asks for, with the shapes they are built for: known as it is planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from compress.recipe.exports import Engine, EngineExport
from compress.recipe.schema import Recipe
from runtime.bundle.engine import EngineOrder, Ranges, free_dimensions, profile_of, range_problems
from runtime.bundle.manifest import Artifact, Generation
from runtime.bundle.tensors import TensorSpec
from runtime.encode.preprocess import PreprocessSpec

BATCH, SEQUENCE, PAST, TOTAL = "batch", "sequence", "past", "total"


def engine_exports(recipe: Recipe) -> list[tuple[int, Engine]]:
    """Return the recipe's engines, each with its place in `export`."""
    return [(index, export) for index, export in enumerate(recipe.export) if isinstance(export, EngineExport)]


def ranges_of(
    export: EngineExport,
    recipe: Recipe,
    preprocess: PreprocessSpec,
    generation: Generation | None,
    inputs: Sequence[TensorSpec],
) -> list[Ranges]:
    """Return the profiles that the recipe gives, or those that take what the bundle is judged with."""
    free = free_dimensions(inputs)
    if export.profiles:
        return [dict(profile) for profile in export.profiles]
    needed = (
        _make_decoder_ranges(recipe, generation) if generation is not None else [_make_call_ranges(recipe, preprocess)]
    )
    return [{name: sizes for name, sizes in ranges.items() if name in free} for ranges in needed]


def profile_problems(ranges: Sequence[Ranges], inputs: Sequence[TensorSpec], needed: Sequence[Ranges]) -> Iterator[str]:
    """Yield what is wrong with the profiles, as sentences.

    `needed`: the kinds of calls that the bundle is judged with, whose every corner one profile must take whole.
    """
    free = free_dimensions(inputs)
    wrong = [f"profiles.{i}.{problem}" for i, one in enumerate(ranges) for problem in range_problems(one, free)]
    yield from wrong
    for corner in () if wrong else (corner for one in needed for corner in _iterate_corners(one, free)):
        if not any(all(one[name][0] <= size <= one[name][2] for name, size in corner.items()) for one in ranges):
            text = " with ".join(f"{name} {size}" for name, size in corner.items())
            yield f"profiles: none takes {text}, and the bundle is judged so; widen one, or judge it with other sizes"
            return


def find_needed_ranges(recipe: Recipe, preprocess: PreprocessSpec, generation: Generation | None) -> list[Ranges]:
    """Return the sizes that judging the bundle takes, one for each kind of call."""
    return [_make_call_ranges(recipe, preprocess)] if generation is None else _make_decoder_ranges(recipe, generation)


def _iterate_corners(ranges: Ranges, free: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield least and largest of each free size, all combined; a total is what it is the sum of."""
    names = [name for name in ranges if name in free and name != TOTAL]
    for sizes in product(*(sorted({ranges[name][0], ranges[name][2]}) for name in names)):
        corner = dict(zip(names, sizes, strict=True))
        yield corner | ({TOTAL: corner[SEQUENCE] + corner[PAST]} if TOTAL in free else {})


def orders_of(export: Engine, ranges: Sequence[Ranges], graph: Artifact, baseline: Artifact) -> list[EngineOrder]:
    """Return engine orders for the graph, and for the float model that it is judged against on the same runtime."""
    options = export.model_dump(mode="json", exclude={"kind", "profiles", "opset"})

    def order(name: str, artifact: Artifact) -> EngineOrder:
        profiles = tuple(profile_of(artifact.inputs, one) for one in ranges)
        return EngineOrder(name, export.kind, artifact.name, profiles, options)

    return [order(f"engine-{export.kind}", graph), order(f"baseline-{export.kind}", baseline)]


def _make_call_ranges(recipe: Recipe, preprocess: PreprocessSpec) -> Ranges:
    judgement = recipe.validate_
    speed = judgement.benchmark
    most = max(speed.batch_size, speed.throughput_batch_size, judgement.batch_size)
    length = getattr(preprocess, "max_length", None) or 1
    return {BATCH: (1, speed.batch_size, most), SEQUENCE: (1, min(speed.sequence_length or length, length), length)}


def _make_decoder_ranges(recipe: Recipe, generation: Generation) -> list[Ranges]:
    """Return the ranges of a decoder: one to read prompts, one to give token by token."""
    judgement, context = recipe.validate_, generation.context_length
    speed = judgement.benchmark
    batch = (1, speed.batch_size, max(speed.batch_size, judgement.batch_size))
    prompt = min(speed.prompt_tokens, context)
    return [
        {BATCH: batch, SEQUENCE: (1, prompt, context), PAST: (0, 0, 0), TOTAL: (1, prompt, context)},
        {BATCH: batch, SEQUENCE: (1, 1, 1), PAST: (1, prompt, context - 1), TOTAL: (2, prompt + 1, context)},
    ]
