"""The loss of a distillation: terms, each one number a sample, weighed and added; which modules are paired. Torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.distill.batch import Batch
from compress.distill.detections import box_error, class_error, read_head
from compress.distill.losses import (
    Distance,
    Pooling,
    attention_error,
    average_masked,
    cosine_error,
    divergence,
    each_label,
    label_loss,
    number_error,
    pool_tokens,
    relative_error,
    set_loss,
)
from compress.distill.vocabulary import measure_in_pieces
from compress.distill.watch import Seen
from compress.errors import PassError
from runtime.bundle.detections import Detections
from runtime.words import did_you_mean

Term = Callable[[Batch, Seen, Seen], Tensor]
"""(batch, what the student gave, what the teacher gave) -> [b]."""
Pairs = tuple[tuple[str, str], ...]
"""(student's module, teacher's module)."""
LayerMap = str | Pairs
"""Pairs, "uniform", or `re:` and a regular expression."""
UNIFORM, REGEX = "uniform", "re:"
UNLABELLED = -100
"""Of labels [b, 2]: nothing is learned of it."""


@dataclass(frozen=True)
class Weighted:
    """A term with its weight."""

    weight: float
    term: Term


def total_loss(terms: Sequence[Weighted], batch: Batch, student: Seen, teacher: Seen) -> Tensor:
    """Return the mean over the batch's samples, each counted by its weight, of the weighed sum of the terms."""
    losses = sum(
        (each.weight * each.term(batch, student, teacher).float() for each in terms), batch.weights.new_zeros(())
    )
    return (losses * batch.weights).sum() / batch.weights.sum().clamp_min(1e-12)


def logits_term(temperature: float) -> Term:
    """Return a term: KL divergence of the first outputs [b, C]."""
    return lambda batch, student, teacher: average_masked(divergence(student.first, teacher.first, temperature), None)


def set_logits_term(temperature: float) -> Term:
    """Return a term: KL divergence of each label of the first outputs [b, C], as a choice of yes or no; mean."""
    return lambda batch, student, teacher: average_masked(
        divergence(each_label(student.first), each_label(teacher.first), temperature), None
    )


def numbers_term(temperature: float) -> Term:
    """Return a term: the squared error of the first outputs, numbers; they have no distribution to be softened."""
    return lambda batch, student, teacher: number_error(student.first, teacher.first)


def token_logits_term(temperature: float) -> Term:
    """Return a term: KL divergence of the first outputs [b, T, C], mean over a text's tokens."""
    return lambda batch, student, teacher: average_masked(
        divergence(student.first, teacher.first, temperature), batch.mask
    )


def next_token_logits_term(temperature: float) -> Term:
    """Return a term: KL divergence of the first outputs [b, T, V], mean over a text's predicted tokens."""

    def term(batch: Batch, student: Seen, teacher: Seen) -> Tensor:
        chosen = _mask_predicted(batch)
        own, other = student.first[:, :-1][chosen], teacher.first[:, :-1][chosen]
        if student.head is None or teacher.head is None:
            return _mean_by_row(divergence(own, other, temperature), chosen)
        answer = teacher.head

        def measure(tokens: slice) -> Callable[[Tensor, slice], Tensor]:
            with torch.no_grad():
                wanted = answer(other[tokens])
            return lambda logits, rows: divergence(logits, wanted[rows], temperature)

        return _mean_by_row(measure_in_pieces(measure, own, student.head), chosen)

    return term


def labels_term(measure: Callable[[Tensor, Tensor], Tensor]) -> Term:
    """Return a term: `measure` of the first outputs and the labels; of a blended sample, of both of its."""

    def term(batch: Batch, student: Seen, teacher: Seen) -> Tensor:
        assert batch.labels is not None
        loss = measure(student.first, batch.labels)
        if batch.mixed is None or batch.mixed.labels is None:
            return loss
        other = measure(student.first, batch.mixed.labels)
        return batch.mixed.share * loss + (1 - batch.mixed.share) * other

    return term


def next_token_term(batch: Batch, student: Seen, teacher: Seen) -> Tensor:
    """Return the cross-entropy of every token given those before it, mean over a text's."""
    chosen = _mask_predicted(batch)
    ids = batch.feeds["input_ids"][:, 1:][chosen]
    own = student.first[:, :-1][chosen]
    if student.head is None:
        return _mean_by_row(F.cross_entropy(own.float(), ids, reduction="none"), chosen)

    def measure(tokens: slice) -> Callable[[Tensor, slice], Tensor]:
        return lambda logits, rows: F.cross_entropy(logits.float(), ids[tokens][rows], reduction="none")

    return _mean_by_row(measure_in_pieces(measure, own, student.head), chosen)


def token_labels_term(batch: Batch, student: Seen, teacher: Seen) -> Tensor:
    """Return the cross-entropy of each token's class, mean over a text's that have one: labels [b, >= T], else -100."""
    assert batch.labels is not None
    labels = batch.labels[:, : student.first.shape[1]]
    chosen = labels >= 0
    gaps = F.cross_entropy(student.first[:, : labels.shape[1]][chosen].float(), labels[chosen], reduction="none")
    return _mean_by_row(gaps, chosen)


def target_token_logits_term(temperature: float) -> Term:
    """Return a term: KL divergence of the first outputs [b, T, V], mean over the tokens of a reference."""

    def term(batch: Batch, student: Seen, teacher: Seen) -> Tensor:
        assert batch.labels is not None
        chosen = batch.labels[:, : student.first.shape[1]] >= 0
        gaps = divergence(student.first[chosen], teacher.first[chosen], temperature)
        return _mean_by_row(gaps, chosen)

    return term


def head_classes_term(spec: Detections, n_classes: int, temperature: float) -> Term:
    """Return a term: the divergence of a detector's classes, place by place."""
    return lambda batch, student, teacher: class_error(
        read_head(student.outputs, spec, n_classes),
        read_head(teacher.outputs, spec, n_classes),
        spec,
        temperature,
    )


def head_boxes_term(spec: Detections, n_classes: int) -> Term:
    """Return a term: the distance of a detector's boxes where the teacher sees objects."""
    return lambda batch, student, teacher: box_error(
        read_head(student.outputs, spec, n_classes), read_head(teacher.outputs, spec, n_classes), spec
    )


def pixel_logits_term(temperature: float) -> Term:
    """Return a term: KL divergence of the first outputs [b, C, h, w], mean over an image's pixels."""
    return lambda batch, student, teacher: average_masked(
        divergence(_read_pixels(student), _read_pixels(teacher), temperature), None
    )


def pixel_labels_term(batch: Batch, student: Seen, teacher: Seen) -> Tensor:
    """Return the cross-entropy of each pixel's class, mean over an image's that have one: labels [b, H, W], else -1.

    Logits are resized to the labels.
    """
    assert batch.labels is not None
    logits = _read_pixels(student).movedim(-1, 1)
    resized = F.interpolate(logits, batch.labels.shape[1:], mode="bilinear", align_corners=False)
    chosen = batch.labels >= 0
    gaps = F.cross_entropy(resized, batch.labels.clamp_min(0), reduction="none")
    return (gaps * chosen).flatten(1).sum(1) / chosen.flatten(1).sum(1).clamp_min(1)


def _read_pixels(seen: Seen) -> Tensor:
    """Return the first output's logits [b, C, h, w] as [b, h, w, C]; one channel's as those of two classes."""
    logits = features_last(seen.first).float()
    return F.pad(logits, (1, 0)) if logits.shape[-1] == 1 else logits


def span_logits_term(temperature: float) -> Term:
    """Return a term: KL divergence of where an answer begins and ends, mean of the outputs [b, T] without padding."""

    def term(batch: Batch, student: Seen, teacher: Seen) -> Tensor:
        gaps = [
            divergence(_hide_padding(own, batch), _hide_padding(teacher.outputs[name], batch), temperature)
            for name, own in student.outputs.items()
        ]
        return torch.stack(gaps).mean(0)

    return term


def span_labels_term(batch: Batch, student: Seen, teacher: Seen) -> Tensor:
    """Return the cross-entropy of an answer's first and last token, mean over both: labels [b, 2], 0 of no label."""
    assert batch.labels is not None
    gaps = [
        F.cross_entropy(_hide_padding(logits, batch), batch.labels[:, k], ignore_index=UNLABELLED, reduction="none")
        for k, logits in enumerate(student.outputs.values())
    ]
    return torch.stack(gaps).mean(0)


def _hide_padding(logits: Tensor, batch: Batch) -> Tensor:
    """Return logits [b, T] with such as cannot be where there is padding."""
    return logits.float() if batch.mask is None else logits.float().masked_fill(batch.mask == 0, -1e4)


LEARNED: dict[str, tuple[Callable[[float], Term], Term]] = {
    "classes": (logits_term, labels_term(label_loss)),
    "label sets": (set_logits_term, labels_term(set_loss)),
    "numbers": (numbers_term, labels_term(number_error)),
    "token classes": (token_logits_term, token_labels_term),
    "pixel classes": (pixel_logits_term, pixel_labels_term),
    "answer spans": (span_logits_term, span_labels_term),
    "next tokens": (next_token_logits_term, next_token_term),
    "target tokens": (target_token_logits_term, token_labels_term),
}
"""What is learned -> the terms for logits and for labels; of anything else those of classes."""


def outputs_term(distance: Distance) -> Term:
    """Return a term: the distance of the outputs, mean over the model's."""

    def term(batch: Batch, student: Seen, teacher: Seen) -> Tensor:
        gaps = [
            _measure_distance(distance, student.outputs[name], target, batch)
            for name, target in teacher.outputs.items()
        ]
        return sum(gaps[1:], gaps[0]) / len(gaps)

    return term


def hidden_term(distance: Distance, pairs: Pairs, projections: nn.ModuleDict) -> Term:
    """Return a term: the distance of hidden states, mean over the pairs of modules.

    `projections`: student's module (dots as "/") -> from its width to the teacher's.
    FitNets (Romero et al. 2015, arXiv:1412.6550), TinyBERT.
    """

    def term(batch: Batch, student: Seen, teacher: Seen) -> Tensor:
        gaps = []
        for own, other in pairs:
            values, key = features_last(student.hidden[own]), projection_name(own, other)
            values = projections[key](values) if key in projections else values
            gaps.append(_measure_distance(distance, values, features_last(teacher.hidden[other]), batch))
        return sum(gaps[1:], gaps[0]) / len(gaps)

    return term


def maps_term(pairs: Pairs) -> Term:
    """Return a term: the error of attention maps, mean over pairs of attention modules."""

    def term(batch: Batch, student: Seen, teacher: Seen) -> Tensor:
        gaps = [attention_error(student.maps[own], teacher.maps[other], batch.mask) for own, other in pairs]
        return sum(gaps[1:], gaps[0]) / len(gaps)

    return term


def pool_outputs(seen: Seen, batch: Batch, pooling: Pooling) -> Seen:
    """Return `seen` with outputs [b, T, D] as one embedding a text."""
    if pooling == "none" or batch.mask is None:
        return seen
    outputs = {k: pool_tokens(v, batch.mask, pooling) if v.dim() == 3 else v for k, v in seen.outputs.items()}
    return Seen(outputs, seen.hidden, seen.maps)


def features_last(tensor: Tensor) -> Tensor:
    """Move features last: [b, C, H, W] -> [b, H, W, C]; other tensors stay as they are."""
    return tensor.movedim(1, -1) if tensor.dim() == 4 else tensor


def projection_name(student: str, teacher: str) -> str:
    """Return the name of a pair, as a ModuleDict can hold it."""
    return f"{student} {teacher}".replace(".", "/")


def _measure_distance(distance: Distance, student: Tensor, teacher: Tensor, batch: Batch) -> Tensor:
    error = relative_error if distance == "mse" else cosine_error
    return error(student, teacher, batch.mask)


def _mask_predicted(batch: Batch) -> Tensor:
    """Return bool [b, T - 1]: where a token follows, and its prediction is learned."""
    ids = batch.feeds["input_ids"]
    follows = (torch.ones_like(ids) if batch.mask is None else batch.mask)[:, 1:] != 0
    return follows if batch.loss_mask is None else follows & (batch.loss_mask[:, 1:] != 0)


def _mean_by_row(values: Tensor, chosen: Tensor) -> Tensor:
    """Average the values at the chosen places, given in their order, over each row: [b]; 0 of none."""
    sums = values.new_zeros(len(chosen)).index_add(0, chosen.nonzero()[:, 0], values)
    return sums / chosen.sum(1).clamp_min(1)


def pair_modules(
    kind: str,
    wanted: LayerMap,
    student: Sequence[str],
    teacher: Sequence[str],
    blocks: tuple[Sequence[str], Sequence[str]],
) -> Pairs:
    """Return the pairs that `wanted` means. `student`, `teacher`: names of all modules; `blocks`: of both, in order.

    `kind`: the pass that asks, for messages. `re:`: every module of the student that matches, and the teacher's of the
    same name. PassError: a module that is not there, or nothing to pair.
    """
    if not isinstance(wanted, str):
        pairs = wanted
    elif wanted == UNIFORM:
        pairs = uniform(*blocks)
    else:
        pairs = tuple((name, name) for name in student if re.match(wanted.removeprefix(REGEX), name))
    if not pairs:
        where = "no chain of blocks was found" if wanted == UNIFORM else f"{wanted!r} matches no module"
        raise PassError(f"{kind}: {where}; name the pairs, such as layers: [[student, teacher]]")
    problems = [text for name, _ in pairs if (text := _describe_missing(name, student, "student"))]
    problems += [text for _, name in pairs if (text := _describe_missing(name, teacher, "teacher"))]
    if problems:
        raise PassError([f"{kind}: {text}" for text in problems])
    return pairs


def uniform(student: Sequence[str], teacher: Sequence[str]) -> Pairs:
    """Pair the n-th of N student's blocks with the (n M / N)-th of M teacher's, counted from 1 (TinyBERT, 4.1)."""
    n, m = len(student), len(teacher)
    return tuple((name, teacher[max(round((i + 1) * m / n) - 1, 0)]) for i, name in enumerate(student)) if m else ()


def _describe_missing(name: str, known: Sequence[str], whose: str) -> str | None:
    """Return a sentence if the model has no module of that name, or None."""
    if name in known:
        return None
    hint = did_you_mean(name, known) or f"; it has {', '.join(known[1:4])}, ..."
    return f"the {whose} has no module '{name}'{hint}"
