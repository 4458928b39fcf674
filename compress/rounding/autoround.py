"""AutoRound: the rounding of a block's weights learned by the sign of the gradient. Torch.

Cheng et al., Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs (2023,
arXiv:2309.05516), algorithm 1. Deviations: the start may be any integers, not only the nearest; the ends of a range are
factors of those that the start has; the best state is chosen on micro-batches kept aside, not on those of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from compress.formats.schemes import WeightScheme
from compress.rounding.fake import ShiftedWeight
from compress.rounding.learn import LearnedParts, LossBatch, Reduce, RoundingSchedule, TuneLog, learn
from compress.rounding.quantized_weight import QuantizedWeight
from compress.store.training_state import SavedRun
from runtime.progress import Progress, no_progress


def autoround_block(
    layers: Mapping[str, nn.Module],
    start: Mapping[str, QuantizedWeight],
    batches: Sequence[LossBatch],
    schedule: RoundingSchedule,
    *,
    kept_aside: Sequence[LossBatch] = (),
    floats: Mapping[str, Tensor] | None = None,
    schemes: Mapping[str, WeightScheme] | None = None,
    progress: Progress = no_progress,
    reduce: Reduce = lambda tensor: tensor,
    saved: SavedRun | None = None,
) -> tuple[dict[str, QuantizedWeight], TuneLog]:
    """Learn the integers and scales of a block's `layers` from `start` on; nothing given is changed.

    The forward of each batch runs a block that holds these modules. `floats`: layer -> [out, in], the weight before it
    was rounded: what V is added to (default: what the start's integers stand for). `schemes`: layer -> what it is
    stored as, which those in floats need. `reduce` and `saved` as in `learn`.
    """
    values, known = floats or {}, schemes or {}
    weights = {name: ShiftedWeight(weight, values.get(name), known.get(name)) for name, weight in start.items()}
    student = LearnedParts(layers, weights)
    log = learn(student, batches, kept_aside, schedule, progress, reduce, saved)
    return student.freeze()[0], log
