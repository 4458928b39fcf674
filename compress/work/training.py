"""What the passes that train share around the loop: the loss by terms, zeros that stay, what the report says of it.

The loss has student and teacher side by side: what is compared, and how far apart it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import convert_conv2d_weight_memory_format

from compress.blocks.forward import name_outputs
from compress.context import TrainSet
from compress.distill.attention import use_fused_attention
from compress.distill.batch import Batch
from compress.distill.datasets import Augment, BatchOf, batch_maker
from compress.distill.losses import Distance, Pooling
from compress.distill.objective import (
    LEARNED,
    Pairs,
    Term,
    Weighted,
    features_last,
    head_boxes_term,
    head_classes_term,
    hidden_term,
    maps_term,
    outputs_term,
    pair_modules,
    pool_outputs,
    projection_name,
    total_loss,
)
from compress.distill.student import rename_inputs
from compress.distill.teacher import Answer, keep_outputs
from compress.distill.train import Dataset
from compress.distill.training_log import TrainLog, numbers, summary
from compress.distill.vocabulary import Head, find_head, reduce_weights, share_tables
from compress.distill.watch import Seen, Watched, attention_modules, module_names
from compress.errors import PassError
from compress.facts import Note
from compress.models.load import TorchModel
from compress.passes.training import LARGE_TABLE, UNIFORM, LearningPass, Terms
from compress.structure.find import find_structure
from compress.tasks import find_torch_task
from compress.work.contexts import TrainingContext


@dataclass(frozen=True)
class Pair:
    """Student and teacher, and samples that both are tried on."""

    student: nn.Module
    teacher: nn.Module
    probe: Batch


@dataclass(frozen=True)
class ComparedOutputs:
    """What of both models is looked at. `projections` are learned with the student."""

    hidden: Pairs
    maps: Pairs
    projections: nn.ModuleDict
    notes: tuple[Note, ...] = ()


NOTHING = ComparedOutputs((), (), nn.ModuleDict())


@dataclass(frozen=True)
class Objective:
    """What is learned towards. `projections`: learned with the student; `notes`: what is to be said of it."""

    loss: Callable[[Batch], Tensor]
    projections: nn.ModuleDict
    notes: tuple[Note, ...] = ()


def training_set(kind: str, context: TrainingContext) -> TrainSet:
    """Return the training set. PassError where there is none. `kind`: the pass, for the message."""
    if context.train is None:
        raise PassError(f"{kind}: there is no training set; give the recipe data.train")
    return context.train


def teacher_module(kind: str, context: TrainingContext, student: TorchModel) -> nn.Module:
    """Return the model as it came, called as the student is. PassError where there is none.

    Its kernels are held channels last as the images are (measured: ResNet-56 in bfloat16 on a CPU answers 1.3 times as
    fast).
    """
    if context.teacher is None:
        raise PassError(f"{kind}: there is no teacher: an onnx: source has no torch model; give a torch source")
    given = context.teacher()
    module = given.module.requires_grad_(False).eval()
    module = convert_conv2d_weight_memory_format(module, torch.channels_last)
    return rename_inputs(module, given.parameters, student.parameters)


def keep_tables(config: LearningPass, loaded: TorchModel, teacher: nn.Module, trainset: TrainSet) -> tuple[Note, ...]:
    """Freeze, in place, the large tables of a language model that are still the teacher's, and share them with it."""
    if find_torch_task(loaded.task).loss != "next tokens":
        return ()
    head = find_head(loaded.module, batches_of(config, trainset, loaded)(np.arange(1), None).feeds, LARGE_TABLE)
    names = share_tables(loaded.module, teacher, head, LARGE_TABLE)
    return (Note("info", f"{config.kind}: not trained: {', '.join(names)}, as the teacher has them"),) if names else ()


def batches_of(config: LearningPass, trainset: TrainSet, loaded: TorchModel) -> BatchOf:
    """Return a function that makes batches: samples as the model reads them, images changed at random."""
    changes = config.changes
    augment = Augment(changes.flip, changes.crop, changes.mixup)
    return batch_maker(trainset, loaded.parameters, augment, find_torch_task(loaded.task).task.generates)


def make_dataset(
    config: LearningPass, trainset: TrainSet, loaded: TorchModel, loss: Callable[[Batch], Tensor]
) -> Dataset:
    """Return what the pass learns from: the training set as `batches_of` makes it, and the loss."""
    return Dataset(trainset.n, batches_of(config, trainset, loaded), loss)


@contextmanager
def objective(
    config: LearningPass,
    loaded: TorchModel,
    student: nn.Module,
    teacher: nn.Module | None,
    trainset: TrainSet,
    context: TrainingContext,
) -> Iterator[Objective]:
    """Yield the loss of `student` against `teacher` (None: against the labels alone).

    `student` takes `loaded`'s inputs. Modules are watched while the context is open. PassError: other outputs than
    the teacher's, modules that cannot be compared.
    """
    terms, batch_of = config.terms(loaded.task), batches_of(config, trainset, loaded)
    by_token = find_torch_task(loaded.task).loss == "next tokens" and terms.output is None
    reduced = config.precision == "bfloat16"

    def head_of(module: nn.Module, like: Head | None = None) -> Head | None:
        layer = find_head(module, batch_of(np.arange(1), None).feeds, LARGE_TABLE) if by_token else None
        return None if layer is None else Head(layer, reduced, like)

    if teacher is None:
        with use_fused_attention(student), Watched(config.kind, student, head=head_of(student)) as watched:
            yield Objective(
                _make_loss(_weigh_terms(terms, NOTHING, loaded), watched, _no_answer, "none"), nn.ModuleDict()
            )
        return
    pair = Pair(student, teacher, batch_of(np.arange(min(2, trainset.n)), None))
    _check_outputs(pair, config.kind)
    compared = _pair_modules(terms, pair, config, config.make_schedule(trainset.n, context.seed).seed)
    pooling = terms.pooling(loaded.task)
    own_head = head_of(student)
    other_head = head_of(teacher, own_head)
    if own_head is None or other_head is None:
        own_head = other_head = None
    with ExitStack() as stack:
        if terms.attention is None:
            stack.enter_context(use_fused_attention(student, teacher))
        hidden, maps = compared.hidden, compared.maps
        watched = stack.enter_context(
            Watched(config.kind, student, [own for own, _ in hidden], [own for own, _ in maps], own_head)
        )
        answering = stack.enter_context(
            Watched(config.kind, teacher, [other for _, other in hidden], [other for _, other in maps], other_head)
        )
        answer = _make_answer(answering, teacher, pooling)
        again = trainset.redraw is None  # a sample that is drawn anew has another answer
        if context.work is not None and again and config.cache_bytes(loaded, trainset.n):
            answer = keep_outputs(answer, lambda rows: batch_of(rows, None), trainset.n, context.work, context.progress)
        elif reduced:
            reduce_weights(teacher)  # from here on it is run in autocast alone
        weighted = _weigh_terms(terms, compared, loaded)
        yield Objective(_make_loss(weighted, watched, answer, pooling), compared.projections, compared.notes)


def _check_outputs(pair: Pair, kind: str) -> None:
    """Raise PassError unless both give outputs of the same names and shapes."""
    with torch.no_grad():
        own, other = (name_outputs(module.eval()(**pair.probe.feeds)) for module in (pair.student, pair.teacher))
    shapes = [{name: list(out.shape) for name, out in outputs.items()} for outputs in (own, other)]
    if shapes[0] != shapes[1]:
        raise PassError(
            f"{kind}: the student gives {_format_shapes(shapes[0])}, the teacher {_format_shapes(shapes[1])}: "
            "outputs of one name and shape are compared; give the student the teacher's"
        )


def _format_shapes(shapes: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def _pair_modules(terms: Terms, pair: Pair, config: LearningPass, seed: int) -> ComparedOutputs:
    """Pair the modules that are watched. By default a model without blocks goes without their hidden states."""
    blocks = (_find_blocks(pair.student, pair), _find_blocks(pair.teacher, pair)) if _needs_blocks(terms) else ((), ())
    names = [list(module_names(module)) for module in (pair.student, pair.teacher)]
    hidden: Pairs = ()
    notes: tuple[Note, ...] = ()
    if terms.hidden is not None and config.by_default and not all(blocks):
        text = f"{config.kind}: no chain of blocks was found; hidden states are left out of the loss"
        notes = (Note("info", text),)
    elif terms.hidden is not None:
        hidden = pair_modules(config.kind, terms.hidden.layers, names[0], names[1], blocks)
    maps = _pair_map_modules(config.kind, terms, pair, names, blocks)
    return ComparedOutputs(hidden, maps, _make_projections(config.kind, pair, hidden, seed), notes)


def _needs_blocks(terms: Terms) -> bool:
    return any(term is not None and term.layers == UNIFORM for term in (terms.hidden, terms.attention))


def _find_blocks(module: nn.Module, pair: Pair) -> Sequence[str]:
    """Return the names of a module's blocks, none where it is one block."""
    sample = {name: tensor[:1] for name, tensor in pair.probe.feeds.items()}
    blocks = find_structure(module, sample, compute=True).blocks
    return tuple(block.name for block in blocks) if len(blocks) > 1 else ()


def _pair_map_modules(
    kind: str, terms: Terms, pair: Pair, names: Sequence[Sequence[str]], blocks: tuple[Sequence[str], Sequence[str]]
) -> Pairs:
    """Pair the modules that give attention maps; a block stands for the one inside it."""
    if terms.attention is None:
        return ()
    giving = [attention_modules(module, pair.probe.feeds) for module in (pair.student, pair.teacher)]
    wanted = pair_modules(kind, terms.attention.layers, names[0], names[1], blocks)
    return tuple((_find_inside(kind, own, giving[0]), _find_inside(kind, other, giving[1])) for own, other in wanted)


def _find_inside(kind: str, name: str, giving: Sequence[str]) -> str:
    inside = [module for module in giving if module == name or module.startswith(f"{name}.") or not name]
    if len(inside) != 1:
        raise PassError(
            f"{kind}: attention: {name or 'the model'} has {len(inside)} modules that give an attention map, one is "
            f"needed; those of the model: {', '.join(giving) or 'none'}"
        )
    return inside[0]


def _make_projections(kind: str, pair: Pair, hidden: Pairs, seed: int) -> nn.ModuleDict:
    """Make projections from a student's width to the teacher's, where they differ; PassError for other differences."""
    projections = nn.ModuleDict()
    if not hidden:
        return projections
    with torch.no_grad(), Watched(kind, pair.student, [a for a, _ in hidden]) as student:
        own = student(pair.probe.feeds).hidden
    with torch.no_grad(), Watched(kind, pair.teacher, [b for _, b in hidden]) as teacher:
        other = teacher(pair.probe.feeds).hidden
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for a, b in hidden:
            x, y = features_last(own[a]), features_last(other[b])
            if x.shape[:-1] != y.shape[:-1]:
                raise PassError(
                    f"{kind}: hidden: {a} gives {list(own[a].shape)}, {b} of the teacher {list(other[b].shape)}"
                )
            if x.shape[-1] != y.shape[-1]:
                projections[projection_name(a, b)] = nn.Linear(x.shape[-1], y.shape[-1], bias=False)
    return projections


def _make_answer(watched: Watched, module: nn.Module, pooling: Pooling) -> Answer:
    """Return a function that gives the teacher's answers, on whichever device the batch is."""

    def answer(batch: Batch) -> Seen:
        module.to(batch.weights.device)
        with torch.no_grad():
            return pool_outputs(watched(batch.feeds), batch, pooling)

    return answer


def _no_answer(batch: Batch) -> Seen:
    """Answer for no teacher: with nothing."""
    return Seen({})


def _weigh_terms(terms: Terms, compared: ComparedOutputs, loaded: TorchModel) -> list[Weighted]:
    """Return the terms of the loss that are asked for."""
    by_logits, by_labels = LEARNED.get(find_torch_task(loaded.task).loss, LEARNED["classes"])
    by_output: Callable[[Distance], Term] = outputs_term
    if loaded.detections is not None:
        head = loaded.detections, len(loaded.class_names)
        by_logits, by_output = partial(head_classes_term, *head), lambda distance: head_boxes_term(*head)
    weighted = []
    if terms.logits is not None:
        weighted.append(Weighted(terms.logits.weight, by_logits(terms.logits.temperature)))
    if terms.labels is not None:
        weighted.append(Weighted(terms.labels.weight, by_labels))
    if terms.output is not None:
        weighted.append(Weighted(terms.output.weight, by_output(terms.output.loss)))
    if terms.hidden is not None and compared.hidden:
        weighted.append(
            Weighted(terms.hidden.weight, hidden_term(terms.hidden.loss, compared.hidden, compared.projections))
        )
    if terms.attention is not None:
        weighted.append(Weighted(terms.attention.weight, maps_term(compared.maps)))
    return weighted


def _make_loss(
    terms: Sequence[Weighted], student: Watched, teacher: Answer, pooling: Pooling
) -> Callable[[Batch], Tensor]:
    def loss(batch: Batch) -> Tensor:
        seen = pool_outputs(student(batch.feeds), batch, pooling)
        return total_loss(terms, batch, seen, teacher(batch))

    return loss


def zero_keeper(module: nn.Module) -> Callable[[int], None]:
    """Return a function that puts back the zeros that matrices and kernels have now."""
    matrices = [p for p in module.parameters() if p.requires_grad and p.dim() > 1]
    masks = [(p, p.detach() != 0) for p in matrices if bool((p == 0).any())]

    def put_back(step: int) -> None:
        with torch.no_grad():
            for number, (parameter, mask) in enumerate(masks):
                masks[number] = parameter, mask.to(parameter.device)  # moved once
                parameter.mul_(masks[number][1])

    return put_back


def gather_numbers(kind: str, log: TrainLog) -> dict[str, dict[str, float]]:
    """Return the numbers, and the curves as step -> loss."""
    return {
        kind: numbers(log) | {"seconds": round(log.seconds, 1)},
        f"{kind}: training loss": {str(step): loss for step, loss in log.curve},
        f"{kind}: loss held out": {str(step): loss for step, loss in log.evaluations},
    }


def describe_training(kind: str, log: TrainLog) -> Note:
    """Return a note of what training came to; a warning where it broke, or nothing was better than the start."""
    stood_still = log.start_loss is not None and not log.best_step
    level: Literal["info", "warning"] = "warning" if log.end == "diverged" or stood_still else "info"
    return Note(level, summary(kind, log))


def describe_kept_steps(log: TrainLog) -> str:
    """Say how much of it is in the weights that were kept."""
    return "nothing" if log.best_step == 0 else f"{log.best_step} steps"
