"""Tuning a quantized model against the float one: rounding, scales and norms learned from its outputs. Torch.

As EfficientQAT (Chen et al. 2024, arXiv:2407.11062) the model is learned as a whole against the float model, but here,
where memory allows it, the rounding is learned with it, and the loss is the divergence from the float model's logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from compress.formats.schemes import WeightScheme
from compress.rounding.fake import LearnedWeight
from compress.rounding.learn import LearnedParts, Reduce, RoundingSchedule, TuneLog, learn
from compress.rounding.learned_batches import Feeds, FloatTeacher, Loss, output_batches
from compress.rounding.quantized_weight import QuantizedWeight
from compress.store.training_state import SavedRun
from runtime.progress import Progress, no_progress

Places = Mapping[str, Sequence[tuple[nn.Module, str]]]


def tune_module(
    module: nn.Module,
    layers: Mapping[str, nn.Module],
    start: Mapping[str, QuantizedWeight],
    batches: Sequence[Feeds],
    teacher: nn.Module,
    schedule: RoundingSchedule,
    *,
    kept_aside: Sequence[Feeds] = (),
    kind: Loss = "kl",
    floats: Mapping[str, Tensor] | None = None,
    places: Places | None = None,
    learn_rounding: bool = True,
    schemes: Mapping[str, WeightScheme] | None = None,
    progress: Progress = no_progress,
    reduce: Reduce = lambda tensor: tensor,
    rank: int = 0,
    size: int = 1,
    saved: SavedRun | None = None,
    rows: int | None = None,
    text_share: float = 0.0,
) -> tuple[dict[str, QuantizedWeight], dict[str, Tensor], TuneLog]:
    """Learn the weights of `layers` from `start` on, and vectors of `module`, so that it gives what `teacher` gives.

    `batches` and `kept_aside` (on which the best state is chosen; with none it is chosen on `batches`) are by parameter
    of both modules' forward. `kind` "kl": outputs are logits; "hidden": hidden states. `text_share`: as of
    `FloatTeacher`. `floats`: layer -> [out, in] the
    weight before it was rounded, for where in its cell each weight starts. `places`: the float parameters to learn and
    the modules that hold them (default: all vectors, that is norms and biases); without `learn_rounding` the integers
    stay. `schemes`: layer -> what it is stored as, which those in floats need. With several processes, this is number
    `rank` of `size` and `reduce` sums over them: each takes its part of every batch, and all end with the same. `saved`
    as in `learn`, `rows` as in `output_lessons`. Neither module is changed; both lie on the device that computes.
    Returns integers by layer, float parameters by name, and what happened.
    """
    student = student_of(module, layers, start, floats or {}, places, learn_rounding, schemes)
    teaching = FloatTeacher(teacher, kind, text_share)
    loss_batches = output_batches(module, teaching, batches, 0, rank, size, rows)
    judged = output_batches(module, teaching, kept_aside, len(batches), rank, size, rows)
    log = learn(student, loss_batches, judged, schedule, progress, reduce, saved)
    return *student.freeze(), log


def student_of(
    module: nn.Module,
    layers: Mapping[str, nn.Module],
    start: Mapping[str, QuantizedWeight],
    floats: Mapping[str, Tensor],
    places: Places | None = None,
    learn_rounding: bool = True,
    schemes: Mapping[str, WeightScheme] | None = None,
) -> LearnedParts:
    """Return the parts of a module that `tune_module` learns; those of a model's block are learned the same way."""
    known = schemes or {}
    weights = {
        name: LearnedWeight(weight, floats.get(name), learn_rounding, known.get(name)) for name, weight in start.items()
    }
    return LearnedParts(layers, weights, vectors(module) if places is None else places)


def vectors(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return the parameters of one dimension, norms and biases: name -> (module, key) of each place that shares it."""
    found: dict[int, tuple[str, list[tuple[nn.Module, str]]]] = {}
    for path, part in module.named_modules():
        for key, value in part._parameters.items():
            if value is not None and value.dim() == 1 and value.is_floating_point():
                name = f"{path}.{key}" if path else key
                found.setdefault(id(value), (name, []))[1].append((part, key))
    return dict(found.values())
