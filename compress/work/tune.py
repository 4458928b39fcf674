"""The work of `tune`: what to start from, blocks one by one where memory asks for it, then the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from compress.blocks.sharing import share, sum_over_processes
from compress.blocks.skeleton import without_cache
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.blocks.tables import find_tables
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.facts import LayerDecision, Note
from compress.passes.gptq import Gptq
from compress.passes.tune import SAID, How, Tune, is_selected
from compress.passes.weight_only import WeightPass
from compress.rounding.learn import RoundingSchedule, TuneLog, learn
from compress.rounding.learned_batches import length, mark_next_tokens
from compress.rounding.outputs import gives_logits
from compress.rounding.quantized_weight import QuantizedWeight
from compress.rounding.tune import student_of, tune_module, vectors
from compress.work import apply_pass
from compress.work.learning import (
    block_batches,
    float_matrix,
    float_module,
    full_names,
    integers,
    modules,
    open_saved_run,
    samples,
    split,
    vectors_of,
)
from runtime.encode.language import IDS

ROUNDING_RATE = 0.004
"""How far one step moves a weight, in levels; a scale half as far, as a part of it, and norms and biases, as a part of
their mean magnitude. tinystories656k in 2 bits ends at 3.582, 3.572 and 3.587 nats per token by 0.002, 0.004, 0.008."""
END = "end to end"
"""The name under which the report has what was measured of the whole model."""


@dataclass
class Learned:
    """What is to be written into the model, and said."""

    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    floats: dict[str, Tensor] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    decisions: tuple[LayerDecision, ...] = ()
    """What `gptq` did, where it came first."""


def apply_tune(config: Tune, model: StreamedModel, context: PassContext) -> PassResult[StreamedModel]:
    """Learn, then write all of it in one stream without data. PassError: no data."""
    if not len(context.batches):
        raise PassError("tune: there is no calibration data; give the recipe a calibration set")
    masks = context.loss_masks
    if config.text_share and masks is not None and not any(mask[1:].any() for mask in masks):
        raise PassError(
            "tune: text_share: the assistant says nothing in the calibration conversations as they were cut; give "
            "others, a larger preprocess.max_length or chat.loss_on: all, or leave text_share out"
        )
    rounded, learned = _round_first(config, model, context)
    chosen = _choose_layers(config, rounded)
    start = {layer: integers(rounded, layer) for layer in chosen}
    how = config.how(*_count_weights(rounded, start))
    learned.notes.append(Note("info", f"tune: {SAID[how]}"))
    if how == "blocks" and config.text_share:
        learned.notes.append(Note("warning", "tune: text_share: blocks see no tokens; the texts' own were not learned"))
    current = rounded
    if how != "whole":
        current = _learn_blocks(config, rounded, chosen, context, learned, how)
    if how != "blocks":
        _learn_whole(config, rounded, current, chosen, context, learned, how)
    return _write_learned(model, rounded, start, learned, context)


def _list_samples(config: Tune, model: StreamedModel, context: PassContext) -> list[dict[str, Tensor]]:
    """Return the calibration data sample by sample; with `text_share` beside each the tokens that are learned."""
    all_samples = samples(context.batches, model.parameters)
    if not config.text_share:
        return all_samples
    masks = [None] * len(all_samples) if context.loss_masks is None else context.loss_masks
    ids = model.parameters[IDS]
    return [mark_next_tokens(sample, ids, mask) for sample, mask in zip(all_samples, masks, strict=True)]


def _round_first(config: Tune, model: StreamedModel, context: PassContext) -> tuple[StreamedModel, Learned]:
    """Return the model with integers in it: those of earlier passes, or those that `gptq` gives now."""
    if model.quantized_layers():
        return model, Learned()
    shared = {name: getattr(config, name) for name in WeightPass.model_fields if name != "kind"}
    result = apply_pass(Gptq(kind="gptq", **shared), model, _with_folder(context, "gptq"))
    first = Note("info", "tune: nothing was rounded yet: gptq did it first")
    learned = Learned(notes=[first, *result.notes], decisions=result.decisions)
    learned.measured |= {layer: dict(numbers) for layer, numbers in result.measured.items()}
    return result.model, learned


def _choose_layers(config: Tune, model: StreamedModel) -> list[str]:
    """Choose the layers to learn. PassError where there are none."""
    module = model.build()
    layers, tables = modules(module), find_tables(module, model.structure, model.tied)
    wanted = [
        layer
        for layer in model.quantized_layers()
        if not tables.holds(layer)  # learned as a product's weight it would drift from what is looked up
        and is_selected(config, layer, type(layers[layer]).__name__)
    ]
    if not wanted:
        raise PassError("tune: no quantized layer is left to tune; check targets and ignore")
    return wanted


def _learn_blocks(
    config: Tune, model: StreamedModel, chosen: Sequence[str], context: PassContext, learned: Learned, how: How
) -> StreamedModel:
    """Learn each block against the float block; return the model with what came of it."""
    stream = Stream(model, _with_folder(context, "blocks"), float_too=True, input_groups_outside=False)
    wanted = set(chosen)
    seconds = None if config.max_seconds is None else config.max_seconds / (len(stream) + (how != "blocks"))
    for block in stream:
        names = [layer for layer in block.layers if layer in wanted]
        if not names:
            continue
        places = full_names(vectors(block.module), block.name)
        start = {layer: block.quantized[layer] for layer in names}
        floats = {layer: block.float_matrix(layer) for layer in names}
        schemes = {layer: model.schemes[layer].weights for layer in names}
        student = student_of(block.module, block.layers, start, floats, places, schemes=schemes)
        batches, kept = block_batches(block, config.held_out)
        schedule = _make_schedule(config, config.block_steps, context.seed + block.index, seconds)
        where = block.name or "the model"
        saved = open_saved_run(context, f"block-{block.index:05d}", f"tune: {where}")
        log = learn(student, batches, kept, schedule, context.progress, sum_over_processes, saved)
        weights, values = student.freeze()
        for layer, weight in weights.items():
            block.put(layer, weight, model.schemes[layer])
        for name, value in values.items():
            block.replace(name, value)
        block.say(notes=[_make_note(where, log)], measured={block.name: _numbers(log)})
    result = stream.result()
    learned.notes += result.notes
    learned.measured |= {name: dict(numbers) for name, numbers in result.measured.items()}
    learned.weights |= {layer: integers(result.model, layer) for layer in chosen}
    learned.floats |= _find_changed(model, result.model)
    return result.model


def _learn_whole(
    config: Tune,
    before: StreamedModel,
    model: StreamedModel,
    chosen: Sequence[str],
    context: PassContext,
    learned: Learned,
    how: How,
) -> None:
    """Learn the model end to end; with its rounding, unless the blocks have learned that already.

    The teacher is what `before` holds of the float model, since blocks that were learned have other norms.
    """
    student, teacher = model.materialise(), float_module(before)
    for module in (student.to(context.device), teacher.to(context.device)):
        without_cache(module)
        module.requires_grad_(False)
    layers = modules(student)
    all_samples = _list_samples(config, model, context)
    batch_size = config.find_batch_size(sum(map(length, all_samples)) / len(all_samples))
    batches, kept = split(all_samples, config.held_out, batch_size)
    weights, floats, log = tune_module(
        student,
        {layer: layers[layer] for layer in chosen},
        {layer: integers(model, layer) for layer in chosen},
        batches,
        teacher,
        _make_schedule(config, config.steps, context.seed, _remaining_seconds(config, learned, how)),
        kept_aside=kept,
        kind="kl" if gives_logits(student) else "hidden",  # what nobody calls logits is compared as it is
        floats={layer: float_matrix(model, layer, layers[layer]).to(context.device) for layer in chosen},
        places=vectors_of(student, model),
        learn_rounding=how == "whole",
        schemes={layer: model.schemes[layer].weights for layer in chosen},
        progress=context.progress,
        reduce=sum_over_processes,
        rank=share().rank,
        size=share().size,
        rows=context.rows,
        text_share=config.text_share,
        saved=open_saved_run(context, "whole", f"tune: {END}"),
    )
    learned.weights |= weights
    learned.floats |= {name: value.cpu() for name, value in floats.items()}
    learned.notes.append(_make_note(END, log))
    learned.measured[END] = _numbers(log)


def _write_learned(
    model: StreamedModel,
    rounded: StreamedModel,
    start: Mapping[str, QuantizedWeight],
    learned: Learned,
    context: PassContext,
) -> PassResult[StreamedModel]:
    """Write all that was learned into the files of this pass."""
    weights = {layer: integers(rounded, layer) for layer in rounded.quantized_layers()} if rounded is not model else {}
    weights |= learned.weights
    left = dict(learned.floats)
    stream = Stream(model, context, data=False)
    for number, block in enumerate(stream):
        alone = [d for d in learned.decisions if d.layer not in start and d.action != "kept"]
        decisions = alone if number == 0 else []
        for layer in (name for name in block.layers if name in weights and f"{name}.weight" not in rounded.tied):
            sharers = [name for name, owner in rounded.tied.items() if owner == f"{layer}.weight"]
            block.put(
                layer,
                weights[layer],
                rounded.schemes[layer],
                rounded.activation_scales.get(layer),
                [name.removesuffix(".weight") for name in sharers],
            )
            if layer in start:
                changed = float((weights[layer].values != start[layer].values).mean())
                block.say(measured={layer: {"changed": changed}})
                reason = f"{changed:.1%} of its integers changed"
                decisions.append(LayerDecision(layer, type(block.layers[layer]).__name__, "tuned", reason))
        for name in [name for name in left if name in block.part.holders]:
            block.replace(name, left.pop(name))
        block.say(decisions, learned.notes if number == 0 else (), learned.measured if number == 0 else None)
    if left:
        raise PassError(f"tune: {next(iter(left))} was learned, but no block holds it")
    return stream.result()


def _make_note(what: str, log: TuneLog) -> Note:
    """Return a note of what learning came to."""
    if log.steps and not log.best_step:
        return Note("warning", f"tune: {what}: {log.steps} steps led to nothing better than the start, which is kept")
    text = f"loss on what was kept aside {log.start_loss:.4g} -> {log.end_loss:.4g}"
    return Note("info", f"tune: {what}: {text} in {log.steps} steps (best at step {log.best_step})")


def _numbers(log: TuneLog) -> dict[str, float]:
    counts = {"steps": log.steps, "best_step": log.best_step, "learning_seconds": round(log.seconds, 3)}
    return {"start_loss": log.start_loss, "end_loss": log.end_loss, **counts}


def _make_schedule(config: Tune, steps: int, seed: int, max_seconds: float | None) -> RoundingSchedule:
    rates = (ROUNDING_RATE, ROUNDING_RATE / 2, ROUNDING_RATE / 2)
    return RoundingSchedule(steps, *rates, max_seconds=max_seconds, seed=seed)


def _remaining_seconds(config: Tune, learned: Learned, how: How) -> float | None:
    """Return the seconds for the whole model: all, or what one block had."""
    if config.max_seconds is None or how == "whole":
        return config.max_seconds
    blocks = sum("best_step" in numbers for numbers in learned.measured.values())
    return config.max_seconds / (blocks + 1)


def _count_weights(model: StreamedModel, start: Mapping[str, QuantizedWeight]) -> tuple[int, int]:
    """Return (weights that are learned, all weights)."""
    total = sum(int(np.prod(model.store.shape(name))) for name in model.store.names() if name not in model.tied)
    return sum(weight.values.size for weight in start.values()), total


def _find_changed(before: StreamedModel, after: StreamedModel) -> dict[str, Tensor]:
    """Return the vectors that have other values than before."""
    names = [name for name in after.store.names() if len(after.store.shape(name)) == 1]
    vectors_after = {name: after.store.read(name) for name in names}
    return {name: value for name, value in vectors_after.items() if not torch.equal(value, before.store.read(name))}


def _with_folder(context: PassContext, name: str) -> PassContext:
    """Return the same context, with a folder of its own for unfinished work."""
    work: Path | None = None if context.work is None else context.work / name
    return replace(context, work=work)
