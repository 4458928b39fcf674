"""The steps of a run that work on a torch model block by block: each is taken up where a killed run left it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from compress.blocks.blockfiles import finished_steps
from compress.blocks.rounded import with_rounded
from compress.blocks.sharing import alone, from_main, share, wait
from compress.blocks.stream import result_of
from compress.blocks.streamed import StreamedModel
from compress.cache import Step, StepCache, hand_over
from compress.context import PassContext, PassResult
from compress.inputs import Inputs
from compress.models.facts import structure_of_module
from compress.models.load import LoadedModel
from compress.models.open_streamed import streamed_model, streamed_module
from compress.passes import Pass
from compress.stages import heard, said, timed
from compress.streamed_quality import score_streamed
from runtime.samples import read_npz, write_npz

BASELINE, CANDIDATE = "baseline.npz", "candidate.npz"


def open_streamed(inputs: Inputs, loaded: LoadedModel | None) -> StreamedModel:
    """The recipe's model with its weights left in their files, or what passes over the whole module left of it."""
    recipe, structure = inputs.recipe, inputs.facts.structure
    assert structure is not None
    if loaded is None:
        return streamed_model(recipe.model, recipe.root, inputs.feeds, structure)
    assert loaded.module is not None and loaded.parameters is not None
    feeds = {parameter: inputs.feeds[name] for name, parameter in loaded.parameters.items()}
    structure = structure_of_module(recipe.model, loaded.module, feeds)  # blocks may be gone, or widths
    model = streamed_module(loaded.module, structure, loaded.parameters, loaded.folder, loaded.shapes)
    return with_rounded(model, loaded.rounded)


def block_pass_step(
    cache: StepCache, key: str, label: str, one: Pass, model: StreamedModel, context: PassContext
) -> PassResult:
    """The result of one pass over blocks. What a killed run had finished of it lies under `key` and is gone on from.

    `label`: names the step in words, so that work left behind by another version of the recipe is known. Of several
    processes the first one writes.
    """
    step = _shared(cache, key)
    if step is None:
        with shared_work(cache, key, label) as work:
            result = timed(partial(one.apply, model, replace(context, work=work)))
            record = {**said(result), "kv_cache": result.model.kv_cache}
            if share().rank == 0:
                cache.put(key, lambda folder: _handed(work, folder, record))
        step = _shared(cache, key)
        assert step is not None
    result = heard(step, result_of(model, finished_steps(step.folder)).model)
    return replace(result, model=replace(result.model, kv_cache=step.record["kv_cache"]))


@contextmanager
def shared_work(cache: StepCache, key: str, label: str) -> Iterator[Path]:
    """The folder for unfinished work, one for all processes; the first one holds it until all have left."""
    if share().rank > 0:
        yield from_main(None)
        wait()
        return
    with cache.partial(key, label) as folder:
        from_main(folder)
        yield folder
        wait()


def _handed(work: Path, folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """A stream's finished steps, put where the cache keeps them; the step's record."""
    hand_over(work, folder)
    return record


def _shared(cache: StepCache, key: str) -> Step | None:
    """The finished step, if the first process sees one."""
    found = cache.get(key) if share().rank == 0 else None
    if not from_main(found is not None):
        return None
    return found or cache.get(key)


def torch_outputs_step(
    cache: StepCache, key: str, before: StreamedModel, after: StreamedModel, context: PassContext
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(baseline, candidate) outputs of a language model over the evaluation texts, from torch."""

    def write(folder: Path) -> dict[str, Any]:
        with alone():
            scores = score_streamed(before, after, context)
        for name, outputs in zip((BASELINE, CANDIDATE), scores, strict=True):
            write_npz(folder / name, outputs)
        return {}

    step = cache.get(key) or cache.put(key, write)
    baseline, candidate = (_arrays(read_npz(step.folder / name)) for name in (BASELINE, CANDIDATE))
    return baseline, candidate


def _arrays(columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(values) for name, values in columns.items()}
