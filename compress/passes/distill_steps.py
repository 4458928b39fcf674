"""The steps of `distill`: teacher and student side by side, what is compared, training, what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn

from compress.blocks.trace import named_outputs
from compress.context import PassContext, PassResult, TrainSet
from compress.distill.batch import Batch
from compress.distill.layer_map import Pairs, paired
from compress.distill.lessons import Augment, batch_maker
from compress.distill.losses import Pooling
from compress.distill.objective import (
    Weighted,
    features_last,
    hidden_term,
    labels_term,
    logits_term,
    maps_term,
    next_token_term,
    outputs_term,
    pooled_outputs,
    projection_name,
    total_loss,
)
from compress.distill.sequences import Writing, written
from compress.distill.teacher import Answer, keep_outputs
from compress.distill.train import Around, Lessons, train
from compress.distill.training_log import TrainLog, numbers, summary
from compress.distill.watch import Seen, Watched, attention_modules, module_names
from compress.errors import PassError
from compress.facts import LayerDecision, Note
from compress.passes.distill import TEXTS, UNIFORM, Distill, Terms
from compress.structure.find import find_structure

if TYPE_CHECKING:
    from compress.models.load import LoadedModel

NAME = "distill"


@dataclass(frozen=True)
class Pair:
    """Student and teacher, and samples that both are tried on."""

    student: nn.Module
    teacher: nn.Module
    probe: Batch


@dataclass(frozen=True)
class Compared:
    """What of both models is looked at. `projections` are learned with the student."""

    hidden: Pairs
    maps: Pairs
    projections: nn.ModuleDict
    notes: tuple[Note, ...] = ()


def apply_distill(knobs: Distill, loaded: LoadedModel, context: PassContext) -> PassResult:
    """Train `loaded.module` in place. PassError: no training set, no teacher, other outputs than its, a broken loss."""
    trainset, teacher = _given(knobs, context)
    assert loaded.module is not None and loaded.parameters is not None
    terms = knobs.terms(loaded.task)
    augment = Augment(knobs.augment.flip, knobs.augment.crop, knobs.augment.mixup)
    batch_of = batch_maker(trainset, loaded.parameters, augment, loaded.task == TEXTS)
    pair = Pair(loaded.module, teacher.requires_grad_(False).eval(), batch_of(np.arange(min(2, trainset.n)), None))
    _check_outputs(pair)
    course = knobs.course(trainset.n, context.seed)
    compared = _compared(terms, pair, knobs.by_default, course.seed)
    keep_bytes = knobs.cache_bytes(loaded, trainset.n) if context.work is not None else 0
    pupil = nn.ModuleDict({"student": pair.student.requires_grad_(True), "projections": compared.projections})
    with ExitStack() as stack:
        student = stack.enter_context(Watched(pair.student, *_own(compared)))
        answer = stack.enter_context(Watched(pair.teacher, *_others(compared)))
        pooling: Pooling = "none" if terms.output is None else terms.output.pooling
        told = _told(answer, pair.teacher, pooling)
        if keep_bytes:
            assert context.work is not None
            told = keep_outputs(told, lambda rows: batch_of(rows, None), trainset.n, context.work, context.progress)
        loss = _loss(_weighted(terms, compared, loaded.task), student, told, pooling)
        after = _zero_keeper(pair.student) if knobs.keep_zeros else _nothing
        around = Around(NAME, context.log, context.progress, context.work, after_step=after)
        log = train(pupil, Lessons(trainset.n, batch_of, loss), course, around)
    pair.student.requires_grad_(False)
    return _result(loaded, log, compared.notes)


def _given(knobs: Distill, context: PassContext) -> tuple[TrainSet, nn.Module]:
    """What is learned from, and from whom."""
    if context.train is None:
        raise PassError("distill: there is no training set; give the recipe data.train")
    if context.teacher is None:
        raise PassError("distill: there is no teacher: an onnx: source has no torch model; give a torch source")
    teacher = context.teacher().module
    if knobs.sequences is None:
        return context.train, teacher
    seed = context.seed if knobs.seed is None else knobs.seed
    how = Writing(knobs.sequences.prompt_tokens, knobs.sequences.temperature, seed)
    return written(teacher, context.train, how, context.work, context.progress), teacher


def _check_outputs(pair: Pair) -> None:
    """PassError unless both give outputs of the same names and shapes."""
    with torch.no_grad():
        own, other = (named_outputs(module.eval()(**pair.probe.feeds)) for module in (pair.student, pair.teacher))
    shapes = [{name: list(out.shape) for name, out in outputs.items()} for outputs in (own, other)]
    if shapes[0] != shapes[1]:
        raise PassError(
            f"distill: the student gives {_shown(shapes[0])}, the teacher {_shown(shapes[1])}: outputs of one name "
            "and shape are compared; give the student the teacher's"
        )


def _shown(shapes: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def _compared(terms: Terms, pair: Pair, by_default: bool, seed: int) -> Compared:
    """The modules that are watched. By default a model without blocks goes without their hidden states."""
    blocks = (_blocks(pair.student, pair), _blocks(pair.teacher, pair)) if _needs_blocks(terms) else ((), ())
    names = [list(module_names(module)) for module in (pair.student, pair.teacher)]
    hidden: Pairs = ()
    notes: tuple[Note, ...] = ()
    if terms.hidden is not None and by_default and not all(blocks):
        notes = (Note("info", "distill: no chain of blocks was found; hidden states are left out of the loss"),)
    elif terms.hidden is not None:
        hidden = paired(terms.hidden.layers, names[0], names[1], blocks)
    maps = _map_pairs(terms, pair, names, blocks)
    return Compared(hidden, maps, _projections(pair, hidden, seed), notes)


def _needs_blocks(terms: Terms) -> bool:
    return any(term is not None and term.layers == UNIFORM for term in (terms.hidden, terms.attention))


def _blocks(module: nn.Module, pair: Pair) -> Sequence[str]:
    """Names of its blocks, none where it is one block."""
    one = {name: tensor[:1] for name, tensor in pair.probe.feeds.items()}
    blocks = find_structure(module, one, compute=True).blocks
    return tuple(block.name for block in blocks) if len(blocks) > 1 else ()


def _map_pairs(
    terms: Terms, pair: Pair, names: Sequence[Sequence[str]], blocks: tuple[Sequence[str], Sequence[str]]
) -> Pairs:
    """Pairs of modules that give attention maps; a block stands for the one inside it."""
    if terms.attention is None:
        return ()
    found = [attention_modules(module, pair.probe.feeds) for module in (pair.student, pair.teacher)]
    wanted = paired(terms.attention.layers, names[0], names[1], blocks)
    return tuple((_inside(own, found[0]), _inside(other, found[1])) for own, other in wanted)


def _inside(name: str, giving: Sequence[str]) -> str:
    found = [one for one in giving if one == name or one.startswith(f"{name}.") or not name]
    if len(found) != 1:
        raise PassError(
            f"distill: attention: {name or 'the model'} has {len(found)} modules that give an attention map, one is "
            f"needed; those of the model: {', '.join(giving) or 'none'}"
        )
    return found[0]


def _projections(pair: Pair, hidden: Pairs, seed: int) -> nn.ModuleDict:
    """From a student's width to the teacher's, where they differ; PassError for other differences of shape."""
    found = nn.ModuleDict()
    if not hidden:
        return found
    with torch.no_grad(), Watched(pair.student, [a for a, _ in hidden]) as student:
        own = student(pair.probe.feeds).hidden
    with torch.no_grad(), Watched(pair.teacher, [b for _, b in hidden]) as teacher:
        other = teacher(pair.probe.feeds).hidden
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for a, b in hidden:
            x, y = features_last(own[a]), features_last(other[b])
            if x.shape[:-1] != y.shape[:-1]:
                raise PassError(
                    f"distill: hidden: {a} gives {list(own[a].shape)}, {b} of the teacher {list(other[b].shape)}"
                )
            if x.shape[-1] != y.shape[-1]:
                found[projection_name(a, b)] = nn.Linear(x.shape[-1], y.shape[-1], bias=False)
    return found


def _own(compared: Compared) -> tuple[list[str], list[str]]:
    return [name for name, _ in compared.hidden], [name for name, _ in compared.maps]


def _others(compared: Compared) -> tuple[list[str], list[str]]:
    return [name for _, name in compared.hidden], [name for _, name in compared.maps]


def _told(watched: Watched, module: nn.Module, pooling: Pooling) -> Answer:
    """The teacher's answers, on whichever device the batch is."""

    def answer(batch: Batch) -> Seen:
        module.to(batch.weights.device)
        with torch.no_grad():
            return pooled_outputs(watched(batch.feeds), batch, pooling)

    return answer


def _weighted(terms: Terms, compared: Compared, task: str) -> list[Weighted]:
    """The terms of the loss that are asked for."""
    found = []
    if terms.logits is not None:
        found.append(
            Weighted(terms.logits.weight, logits_term(terms.logits.temperature, terms.logits.divergence, task == TEXTS))
        )
    if terms.labels is not None:
        found.append(Weighted(terms.labels.weight, next_token_term if task == TEXTS else labels_term))
    if terms.output is not None:
        found.append(Weighted(terms.output.weight, outputs_term(terms.output.loss)))
    if terms.hidden is not None and compared.hidden:
        found.append(
            Weighted(terms.hidden.weight, hidden_term(terms.hidden.loss, compared.hidden, compared.projections))
        )
    if terms.attention is not None:
        found.append(Weighted(terms.attention.weight, maps_term(compared.maps)))
    return found


def _loss(terms: Sequence[Weighted], student: Watched, teacher: Answer, pooling: Pooling) -> Callable[[Batch], Tensor]:
    def loss(batch: Batch) -> Tensor:
        seen = pooled_outputs(student(batch.feeds), batch, pooling)
        return total_loss(terms, batch, seen, teacher(batch))

    return loss


def _zero_keeper(module: nn.Module) -> Callable[[int], None]:
    """Puts back the zeros that matrices and kernels have now."""
    masks = [(p, p.detach() != 0) for p in module.parameters() if p.dim() > 1 and bool((p == 0).any())]

    def put_back(step: int) -> None:
        with torch.no_grad():
            for parameter, mask in masks:
                parameter.mul_(mask.to(parameter.device))

    return put_back


def _nothing(step: int) -> None:
    pass


def _result(loaded: LoadedModel, log: TrainLog, notes: tuple[Note, ...]) -> PassResult:
    """What the report says: a decision for each layer, the numbers, and the curves as step -> loss."""
    assert loaded.module is not None
    held = "nothing" if log.best_step == 0 else f"{log.best_step} steps"
    decisions = tuple(
        LayerDecision(name, type(part).__name__, "distilled", held)
        for name, part in module_names(loaded.module).items()
        if not list(part.children()) and any(p.dim() > 1 for p in part.parameters(recurse=False))
    )
    measured = {
        NAME: numbers(log),
        f"{NAME}: training loss": {str(step): loss for step, loss in log.curve},
        f"{NAME}: loss held out": {str(step): loss for step, loss in log.looks},
    }
    stood_still = log.start_loss is not None and not log.best_step
    level: Literal["info", "warning"] = "warning" if log.end == "diverged" or stood_still else "info"
    return PassResult(replace(loaded), decisions, (*notes, Note(level, summary(NAME, log))), measured)
