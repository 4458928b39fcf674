"""What a language model that no ONNX file is written of loses: scored by torch, block by block, at the build."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import torch

from compress.blocks.engine_arithmetic import compute_as_engine
from compress.blocks.step import BlockStep
from compress.blocks.stream import Stream
from compress.blocks.stream_memory import SCORED_ROWS
from compress.blocks.streamed import StreamedModel
from compress.context import Feeds, PassContext
from runtime.decode.scoring import reduce_sample

Columns = dict[str, np.ndarray]


def score_streamed(before: StreamedModel, after: StreamedModel, context: PassContext) -> tuple[Columns, Columns]:
    """Return (baseline, candidate): sums over each text's predicted tokens, as `runtime.decode.scoring.score` has them.

    `context.batches`: the evaluation texts, one in each. Both models pass through block by block, side by side only at
    their heads. The candidate computes as the engine `context.target` does.
    """
    after = compute_as_engine(after, context.target.name)
    with ExitStack() as held:
        steps = [
            held.enter_context(_open_last_step(Stream(model, context, rows=SCORED_ROWS))) for model in (after, before)
        ]
        _share(*steps)
        rows = list(_score_rows(steps, context.batches))
    names = ("nll", "n_tokens", "kl", "agree", "reference_nll")
    columns = {name: np.array([row[name] for row in rows]) for name in names}
    baseline = {"nll": columns["reference_nll"], "n_tokens": columns["n_tokens"].astype(np.int64)}
    candidate = {name: columns[name] for name in ("nll", "kl")}
    candidate |= {name: columns[name].astype(np.int64) for name in ("n_tokens", "agree")}
    return baseline, candidate


@contextmanager
def _open_last_step(stream: Stream) -> Iterator[BlockStep]:
    """Yield the step that gives logits, with all blocks before it passed; nothing of it is held afterwards."""
    with closing(iter(stream)) as steps:
        for _ in range(len(stream) - 1):
            next(steps)
        step = next(steps)
        yield step
        step.close()


def _share(one: BlockStep, other: BlockStep) -> None:
    """Let `other` hold the tensors of `one` that are the same in both models: embeddings, a head that stays float."""
    held, also = one.part.holders, other.part.holders
    for name in held.keys() & also.keys():
        if one.part.store.same(name, other.part.store):
            module, key = held[name][0]
            for twin, own in also[name]:
                twin._parameters[own] = module._parameters[key]


def _score_rows(steps: Sequence[BlockStep], batches: Sequence[Feeds]) -> Iterator[dict[str, float]]:
    """Yield each text's sums, in order."""
    texts = iter(batches)
    for i in range(len(steps[0].calls)):
        with torch.no_grad():
            logits = [step.forward(i).numpy() for step in steps]  # [b, t, vocab] each
        for row in range(len(logits[0])):
            ids = next(texts)["input_ids"][0]
            sums = reduce_sample([one[row, : len(ids) - 1] for one in logits], ids[1:])
            yield {**sums, "n_tokens": len(ids) - 1}
