"""Passes of a run over a torch model block by block: each is taken up where a killed run left it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from compress.blocks.activations import ROWS
from compress.blocks.blockfiles import read_finished_blocks
from compress.blocks.device import halve_rows
from compress.blocks.rounded import with_rounded
from compress.blocks.sharing import alone, from_main, share, wait
from compress.blocks.stream import result_of
from compress.blocks.stream_memory import SCORED_ROWS
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.execution.cached import keep_both, result_from_record, result_to_record
from compress.execution.quality import score_streamed
from compress.execution.work_meter import WorkMeter
from compress.models.facts import structure_of_module
from compress.models.load import TorchModel
from compress.models.open_streamed import open_streamed_model, open_streamed_module
from compress.passes import Pass
from compress.planning.inputs import Inputs
from compress.store.cache import CachedResult, ResultCache, hand_over
from compress.work import apply_pass


def open_streamed(inputs: Inputs, loaded: TorchModel | None) -> StreamedModel:
    """Open the recipe's model with its weights left in their files, or what passes over the whole module left of it."""
    recipe, structure = inputs.recipe, inputs.facts.structure
    assert structure is not None
    if loaded is None:
        return open_streamed_model(inputs.source, inputs.feeds, structure)
    feeds = {parameter: inputs.feeds[name] for name, parameter in loaded.parameters.items()}
    structure = structure_of_module(recipe.model, loaded.module, feeds)  # blocks may be gone, or widths
    model = open_streamed_module(loaded.module, structure, loaded.parameters, loaded.folder, loaded.shapes)
    return with_rounded(model, loaded.rounded)


def run_block_pass(
    cache: ResultCache, key: str, label: str, config: Pass, model: StreamedModel, context: PassContext
) -> PassResult[StreamedModel]:
    """Run one pass over blocks. What a killed run had finished of it lies under `key` and is continued.

    `label`: names the pass in words, so that work left behind by another version of the recipe is known. Of several
    processes the first one writes.
    """
    cached = _find_shared(cache, key)
    if cached is None:
        with hold_shared_work(cache, key, label) as work:
            with WorkMeter() as meter:
                # again from its last finished block, with fewer rows at once, where the device is full
                for attempt in halve_rows(ROWS, context.log):
                    with attempt:
                        result = apply_pass(config, model, replace(context, work=work, rows=attempt.rows))
            record = {**result_to_record(meter.add_to(result)), "kv_cache": result.model.kv_cache}
            if share().rank == 0:
                cache.put(key, lambda folder: _store_blocks(work, folder, record))
        cached = _find_shared(cache, key)
        assert cached is not None
    with cached.hold() as folder:
        result = result_from_record(cached, result_of(model, read_finished_blocks(folder)).model)
    return replace(result, model=replace(result.model, kv_cache=cached.record["kv_cache"]))


@contextmanager
def hold_shared_work(cache: ResultCache, key: str, label: str) -> Iterator[Path]:
    """Yield the folder for unfinished work, one for all processes; the first one holds it until all have left."""
    if share().rank > 0:
        yield from_main(None)
        wait()
        return
    with cache.partial(key, label) as folder:
        from_main(folder)
        yield folder
        wait()


def _store_blocks(work: Path, folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Put a stream's finished blocks where the cache keeps them; return the record."""
    hand_over(work, folder)
    return record


def _find_shared(cache: ResultCache, key: str) -> CachedResult | None:
    """Return the cached result, if the first process sees one."""
    cached = cache.get(key) if share().rank == 0 else None
    if not from_main(cached is not None):
        return None
    return cached or cache.get(key)


def score_in_torch(
    cache: ResultCache,
    key: str,
    before: StreamedModel,
    after: StreamedModel,
    context: PassContext,
    masks: Sequence[np.ndarray] | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return (baseline, candidate) outputs of a language model over the evaluation texts, from torch.

    `masks`: which of each text's tokens count; None: all.
    """

    def score() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        with alone():
            for attempt in halve_rows(SCORED_ROWS, context.log):
                with attempt:
                    scores = score_streamed(before, after, replace(context, rows=attempt.rows), masks)
        return scores

    return keep_both(cache, key, score)
