"""Hold two choices of bits against each other with all layers rounded at once, by what the outputs then lose.

What each layer costs is measured alone and added up, by the float model's own predictions. Errors that are large, as of
2 bits, meet, and their sum may be more than was foreseen; of the texts' own tokens it says nothing. So the whole model
is rounded both ways, and what it gives is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from compress.blocks.block import BlockWork
from compress.blocks.sharing import main_process, sum_over_processes, wait
from compress.blocks.stream import Stream, open_last_block
from compress.blocks.stream_memory import SCORED_ROWS
from compress.blocks.streamed import StreamedModel
from compress.blocks.work import AFTER
from compress.context import Feeds, PassContext, PassResult
from compress.passes.mixed_bits import COMPARED_TOKENS
from compress.passes.weight_only import WeightPass
from compress.rounding.learned_batches import NEXT_TOKENS, UNLEARNED, divergence, mark_next_tokens, soften_logits
from compress.rounding.outputs import gives_logits
from compress.rounding.products import Compute
from compress.store.progress import no_log
from compress.work.contexts import BlockContext
from runtime.encode.language import IDS

BEYOND_NOISE = 2.0
"""Standard errors by which the texts' losses must differ to count."""
Pass = TypeVar("Pass", bound=WeightPass)
RoundModel = Callable[[Pass, StreamedModel, PassContext], PassResult[StreamedModel]]
"""A pass's own rounding of a whole model, with the bits of each layer given."""


@dataclass(frozen=True)
class BitsComparison:
    """What is lost of two choices. `outputs`: how far the outputs are from the float model's (see `OutputLoss`).

    `texts`: nats for each token of the texts; () where the model writes none. `noise`: standard error of their
    difference.
    """

    outputs: tuple[float, float]
    texts: tuple[float, ...] = ()
    noise: float = 0.0

    @property
    def best(self) -> int:
        """Return the choice that loses less: of the texts where that is beyond noise, else of the outputs."""
        beyond_noise = self.texts and abs(self.texts[0] - self.texts[1]) > BEYOND_NOISE * self.noise
        losses = np.array(self.texts if beyond_noise else self.outputs)
        return int(np.nan_to_num(losses, nan=np.inf).argmin())  # argmin takes NaN for the least

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> BitsComparison:
        return cls(tuple(record["outputs"]), tuple(record["texts"]), record["noise"])


@dataclass(frozen=True)
class OutputLoss:
    """What a rounded model loses, over all processes but for `tokens`.

    `outputs`: of logits nats for each token (Kullback-Leibler divergence), else the squared error over the outputs'
    energy. `tokens`: float64 [n], nats of each token that follows in this process's texts; empty where none is written.
    """

    outputs: float
    tokens: Tensor


def compare_rounded(
    configs: tuple[Pass, Pass],
    round_model: RoundModel[Pass],
    model: StreamedModel,
    context: PassContext,
    compute: Compute,
) -> BitsComparison:
    """Return what is lost of a model that two passes rounded, on the first of the calibration data.

    Where these are all, what was rounded stays in `context.work`, for `take_over`.
    """
    few = replace(context, batches=take_first(context.batches, COMPARED_TOKENS), work=None, log=no_log)
    work = context.work if len(few.batches) == len(context.batches) else None

    def measure(number: int, config: Pass) -> OutputLoss:
        place = None if work is None else work / str(number)
        return measure_loss(round_model(config, model, replace(few, work=place)).model, few, compute)

    one, other = map(measure, (0, 1), configs)
    apart = one.tokens - other.tokens
    parts = [torch.tensor(float(len(apart)))] + [x.sum() for x in (one.tokens, other.tokens, apart, apart.square())]
    n, *sums = sum_over_processes(torch.stack([part.double() for part in parts])).tolist()
    if not n:
        return BitsComparison((one.outputs, other.outputs))
    first, second, mean, square = (total / n for total in sums)
    noise = float(np.sqrt(max(square - mean**2, 0.0) / n))
    return BitsComparison((one.outputs, other.outputs), (first, second), noise)


def take_over(work: Path | None, number: int) -> None:
    """Let the pass find the blocks of the choice that is taken as finished, as far as `compare_rounded` left them."""
    if main_process() and work is not None and (work / str(number)).is_dir():
        for file in sorted((work / str(number)).iterdir()):
            file.replace(work / file.name)
    wait()


def measure_loss(model: StreamedModel, context: PassContext, compute: Compute) -> OutputLoss:
    """Return what a rounded model loses of its values before rounding, on `context.batches`."""
    with open_last_block(Stream(model, context, float_too=True, compute=compute, rows=SCORED_ROWS)) as block:
        logits = block.name in (AFTER, "") and gives_logits(model.build())
        writes = logits and isinstance(context, BlockContext) and context.writes_text
        sums, tokens = _sum_losses(block, logits, model.parameters[IDS] if writes else "")
        lost, of = sum_over_processes(
            sums
        ).tolist()  # inside: the files are the first process's, and go with its stream
    return OutputLoss(lost / of, torch.cat([torch.zeros(0, dtype=torch.float64), *tokens]))


@torch.no_grad()
def _sum_losses(block: BlockWork, logits: bool, ids: str) -> tuple[Tensor, list[Tensor]]:
    """Return the sum of what is lost and what it is a part of (rows, or energy), float64 [2]; and `tokens`.

    `ids`: the parameter whose next tokens are predicted; "": none.
    """
    sums, tokens = torch.zeros(2, dtype=torch.float64), list[Tensor]()
    for i in range(len(block.calls)):
        out, float_out = block.forward(i), block.float_outputs(i).float()
        rounded, before = (block.drop_padding(x, i) for x in (out, float_out))
        if logits:
            of = torch.tensor(len(before))
            lost = of * divergence(rounded, *soften_logits(before)).double()
        else:
            lost, of = (x.square().sum(dtype=torch.float64) for x in (rounded - before, before))
        sums += torch.stack([lost.cpu(), of.double().cpu()])
        if ids:
            following = mark_next_tokens(block.calls[i].kwargs, ids)[NEXT_TOKENS].reshape(-1)
            nats = nn.functional.cross_entropy(out.flatten(0, -2), following, ignore_index=UNLEARNED, reduction="none")
            tokens.append(nats[following != UNLEARNED].double().cpu())
    return sums, tokens


def take_first(batches: Sequence[Feeds], wanted: int) -> list[Feeds]:
    """Return the first batches, as many as have the wanted tokens; what is no text counts a row a sample."""
    first, n_tokens = list[Feeds](), 0
    for feeds in batches:
        if n_tokens >= wanted:
            break
        first.append(feeds)
        values = next(iter(feeds.values()))
        n_tokens += int(np.prod(values.shape[:2])) if values.ndim == 2 else len(values)
    return first
