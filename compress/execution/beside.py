"""A decoder's own file beside its float model, which torch has read block by block: neither is held with the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch

from compress.blocks.forward import read_part
from compress.blocks.stream import Stream, open_last_block
from compress.blocks.stream_memory import SCORED_ROWS
from compress.blocks.streamed import StreamedModel
from compress.blocks.work import AFTER
from compress.context import PassContext
from compress.work.settle_compute import count_multiplications, sooner_layers
from runtime.bundle.columns import Columns
from runtime.bundle.manifest import Manifest
from runtime.clock.machine import count_cores
from runtime.decode.scoring import Recall, score, split_sides
from runtime.encode.language import IDS
from runtime.measure.benchmark import graph_backend, open_variant, pair
from runtime.metrics import Outputs
from runtime.progress import Progress
from runtime.tasks.predict import bundle_preprocessor, encoding_views


@contextmanager
def recall_logits(model: StreamedModel, context: PassContext) -> Iterator[Recall]:
    """Let a model read `context.batches`, one text each; yield what gives its logits. Of its weights the head's stay.

    All is computed in float32: with products in bfloat16 two fifths sooner on a Xeon with AMX, Qwen2.5-Coder 0.5B is
    3e-4 nats (divergence) from itself, and one token in a hundred another one, as by a rounding to 8 bits.
    """
    ids = model.parameters.get(IDS, IDS)
    with (
        sooner_layers(count_multiplications(model, context), context.device),
        open_last_block(Stream(model, context, rows=SCORED_ROWS)) as head,
    ):
        texts = [(i, row) for i, call in enumerate(head.calls) for row in range(len(call.kwargs[ids]))]
        apart = head.input_groups[:1] if head.name == AFTER else ()  # else the whole model is one block
        layers = [head.layers[name] for group in apart for name in group.layers]

        def recall(text: int, tokens: slice) -> np.ndarray:
            i, row = texts[text]
            with torch.no_grad(), read_part(layers, row, tokens):
                logits: np.ndarray = head.forward(i).cpu().numpy()
            return logits[0] if logits.shape[:2] == (1, tokens.stop - tokens.start) else logits[row, tokens]

        yield recall


def score_beside(
    root: Path, manifest: Manifest, columns: Columns, recall: Recall, progress: Progress
) -> tuple[Outputs, Outputs]:
    """Return the sums of the float model, which has read the samples, and of the candidate in `root`, run on them."""
    with ExitStack() as stack:
        session = open_variant(stack, root, pair(manifest, graph_backend(manifest))[1], count_cores())
        encoder, (view,) = bundle_preprocessor(root, manifest, session.inputs), encoding_views(manifest.task, columns)
        return split_sides(score(session, encoder, view, manifest.judgement.batch_size, recall, progress))
