"""Work `distill`: put the student in the model's place, choose what is learned and from whom, train, and report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor, nn

from compress.blocks.sizes import shapes_of
from compress.context import PassResult, TrainSet
from compress.distill.sequences import Writing, write_sequences
from compress.distill.student import start_from
from compress.distill.train import TrainOptions, train
from compress.distill.training_log import TrainLog
from compress.distill.watch import module_names
from compress.errors import PassError
from compress.facts import LayerDecision, ModelFacts, Note
from compress.models.load import TorchModel
from compress.passes.depth import depth_problem
from compress.passes.distill import Distill
from compress.passes.distill_student import Student
from compress.pruning.depth import Skipping, shorten
from compress.work.contexts import ModelContext
from compress.work.prune_batches import pruning_batches
from compress.work.prune_layers import UNCONFIGURED, removable_blocks
from compress.work.settle_changes import settle_changes
from compress.work.settle_schedule import settle_schedule
from compress.work.training import (
    batches_of,
    describe_kept_steps,
    describe_training,
    gather_numbers,
    keep_tables,
    make_dataset,
    objective,
    teacher_module,
    training_set,
    zero_keeper,
)

NAME = "distill"


def apply_distill(config: Distill, loaded: TorchModel, context: ModelContext) -> PassResult[TorchModel]:
    """Train `loaded.module` in place. PassError: no training set, no teacher, other outputs than its, a broken loss."""
    trainset, teacher = _prepare_training(config, loaded, context)
    student = loaded.module
    config, changes = settle_changes(config, loaded, teacher, trainset, context)
    student.requires_grad_(True)
    kept = keep_tables(config, loaded, teacher, trainset)
    with objective(config, loaded, student, teacher, trainset, context) as goal:
        pupil = nn.ModuleDict({"student": student, "projections": goal.projections})
        fresh = config.student is not None and config.student.separate  # its zeros are no pass's, but where it begins
        options = TrainOptions(NAME, context.log, context.progress, context.work, device=context.device)
        options = options if fresh else replace(options, after_step=zero_keeper(student))
        dataset_of = partial(make_dataset, trainset=trainset, loaded=loaded, loss=goal.loss)
        config, dataset, settled = settle_schedule(config, changes, pupil, dataset_of, options, context)
        log = train(pupil, dataset, config.make_schedule(trainset.n, context.seed), options)
    student.requires_grad_(False)
    return settled.add_to(_make_result(loaded, log, (*kept, *goal.notes)))


def begin_distill(config: Distill, loaded: TorchModel, context: ModelContext) -> TorchModel:
    """Return the student, which learns in the place of `loaded`; `loaded` itself where there is none. PassError."""
    if config.student is None:
        return loaded
    sample = batches_of(config, training_set(NAME, context), loaded)(np.arange(1), None).feeds
    return _student_model(config.student, loaded, sample, context)


def foresee_distill(config: Distill, loaded: TorchModel, facts: ModelFacts, context: ModelContext) -> TorchModel:
    """Leave in the module, in place, the blocks of a student that is cut out of it: learning changes no speed."""
    if config.student is None or config.student.separate:
        return loaded
    sample = pruning_batches(config.kind, loaded, context)[0].first
    return _keep_some_blocks(config.student, loaded, sample, context)


def _prepare_training(config: Distill, loaded: TorchModel, context: ModelContext) -> tuple[TrainSet, nn.Module]:
    """Return the training set, which the teacher may have continued, and the teacher."""
    trainset, teacher = training_set(NAME, context), teacher_module(NAME, context, loaded)
    if config.sequences is None:
        return trainset, teacher
    how = Writing(config.sequences.prompt_tokens, config.sequences.temperature, context.seed)
    return write_sequences(teacher, trainset, how, context.work, context.progress), teacher


def _make_result(loaded: TorchModel, log: TrainLog, notes: tuple[Note, ...]) -> PassResult[TorchModel]:
    """Return what the report says: a decision for each layer, the numbers, and the curves as step -> loss."""
    decisions = tuple(
        LayerDecision(name, type(part).__name__, "distilled", describe_kept_steps(log))
        for name, part in module_names(loaded.module).items()
        if not list(part.children()) and any(p.dim() > 1 for p in part.parameters(recurse=False))
    )
    return PassResult(replace(loaded), decisions, (*notes, describe_training(NAME, log)), gather_numbers(NAME, log))


def _student_model(
    student: Student, loaded: TorchModel, sample: Mapping[str, Tensor], context: ModelContext
) -> TorchModel:
    """Return the student as it starts: blocks of `loaded` (changed in place), or a new model. PassError.

    `sample`: feeds of one sample, by parameter. The same whenever it is called.
    """
    if not student.separate:
        return _keep_some_blocks(student, loaded, sample, context)
    if context.student is None:
        raise PassError("distill: there is nothing to make a student with: an onnx: source has no torch model")
    made = context.student(student, context.seed)
    if made.input_names != loaded.input_names:
        raise PassError(
            f"distill: the student takes {', '.join(made.input_names)}, the teacher {', '.join(loaded.input_names)}; "
            "give one that takes the same"
        )
    if not student.config:
        return made
    start_from(made.module, loaded.module, student.starts)
    changed = shapes_of(made.module).since(shapes_of(loaded.module))
    return replace(made, shapes=loaded.shapes.then(changed))


def _keep_some_blocks(
    student: Student, loaded: TorchModel, sample: Mapping[str, Tensor], context: ModelContext
) -> TorchModel:
    module = loaded.module
    before, blocks = shapes_of(module), removable_blocks(module, sample)
    stay = student.stay(len(blocks))
    if problem := depth_problem(blocks, stay, len(stay)):
        raise PassError(f"distill: student: {problem}")
    skipping = Skipping(module, [block.name for block in blocks], sample)
    removed = [block.name for number, block in enumerate(blocks) if number not in stay]
    if not shorten(skipping, removed, sample):
        context.log(f"distill: {UNCONFIGURED}")
    return replace(loaded, shapes=loaded.shapes.then(shapes_of(module).since(before)))
