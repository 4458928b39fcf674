"""The work of `int8` and `fp8` in its order, each part a call into `compress.rounding`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from compress.context import Feeds, PassResult
from compress.errors import PassError
from compress.facts import LayerDecision, LayerFacts, ModelFacts, Note, matches
from compress.formats.schemes import PRESETS
from compress.graph.convolutions import shortcuts_to_convolutions
from compress.graph.layers import GraphLayer, find_layers
from compress.graph.run import clone
from compress.passes.eight_bit import EightBit
from compress.passes.int8 import Int8
from compress.rounding.budgets import BudgetMissed, Prices
from compress.rounding.fastest import (
    PlacementChoice,
    PlacementTimes,
    choose_fastest,
    digest_structure,
    keep_integer,
    list_zero_based,
)
from compress.rounding.int8 import (
    INT8,
    Setting,
    choose_ranges,
    correct_biases,
    leave_unseen,
    observe_state,
    round_layer,
    tensors_of,
    with_integer_layers,
)
from compress.rounding.latency import pretend_ranges, round_roughly
from compress.rounding.measure import (
    COLLAPSE,
    blame,
    hold_choices,
    layer_sqnr_db,
    measure_groups,
    output_cosine,
    outputs_of,
    restore_until_held,
    sensitivities,
    spread,
)
from compress.rounding.mixed import Groups, Verdict, group_fused, price_bytes, price_time, restore_within_budget
from compress.rounding.observers import Observer
from compress.rounding.placement import Kind, decide_kind
from compress.rounding.qdq import write_state
from compress.rounding.quantized_weight import QuantizedWeight
from compress.rounding.state import GraphState
from compress.timing.kept import name_given
from compress.work.contexts import GraphContext

MEASURE_BATCHES = 16
"""Calibration batches on which errors are measured (not observed: that is all of them)."""


HEALS = 0.1
"""Part of the lost likeness (1 - cosine) that an operator kind in float must give back. Of PP-OCRv5's detector Conv
gave 62 %, then Add 1 %, which only cost time."""


def apply_eight_bit(config: EightBit, state: GraphState, context: GraphContext) -> PassResult[GraphState]:
    try:
        scheme = replace(INT8, bits=config.weight_bits) if isinstance(config, Int8) else PRESETS["FP8"].weights
        state, taken, kept = place_layers(config, state, partial(round_layer, scheme=scheme))
        seen = observe_state(state, context.progress(context.batches, f"{config.kind}: observing"))
    except ValueError as error:
        raise PassError(f"{config.kind}: {error}") from error
    state, unseen = leave_unseen(state, seen)
    if unseen and not state.integer:
        raise PassError(f"{config.kind}: no layer is left: {next(iter(unseen.values()))}; look at data.calibration")
    if not state.dynamic:
        state = replace(state, ranges={**state.ranges, **choose_ranges(seen, _make_settings(config, state))})
    if config.bias_correction:
        state = replace(state, biases={**state.biases, **correct_biases(state, seen)})
    whole = state
    state, choice = take_fastest(config, whole, taken, context)
    sample = list(islice(context.batches, MEASURE_BATCHES))
    state, notes = _heal_collapse(config, state, seen, sample, context)
    if choice is not None and state.leave_out != whole.leave_out:
        # What was fastest may be no more: kernels that read and write int8 give way to float ones between DQ and Q.
        # Four PP-OCR detectors, healed so, were 0.63 to 0.67 times as fast as float.
        state, again = take_fastest(config, replace(whole, leave_out=state.leave_out), taken, context)
        choice = again and replace(again, before=choice)
    restored = _restore(config, state, context)
    state = restored.state
    measured = _measure(state, seen, restored.sensitivity, sample, context)
    decisions = [
        _decide(config, layer.name, layer.type, state, choice, unseen.get(layer.name, restored.reason))
        for layer in taken
    ]
    told = [*_tell_unseen(config, unseen), *_tell_choice(config, choice, state.timed_for), *notes, *restored.notes]
    return PassResult(state, (*decisions, *kept), tuple(told), measured, choice=_record(choice))


def place_layers(
    config: EightBit, state: GraphState, rounded: Callable[[GraphLayer], QuantizedWeight]
) -> tuple[GraphState, list[LayerFacts], list[LayerDecision]]:
    """Return the state with all layers that the pass takes in eight bits, `rounded` so, and those it takes and leaves.

    Raises ValueError as `with_integer_layers` does.
    """
    kind = _choose_placement(config, state)
    if kind == "all":
        state = replace(state, model=clone(state.model))
        shortcuts_to_convolutions(state.model)
    taken, kept = config.choose(state.facts())
    names = [layer.name for layer in taken]
    return with_integer_layers(state, names, kind, config.attention, config.is_dynamic, rounded), taken, kept


def foresee_eight_bit(config: EightBit, state: GraphState, facts: ModelFacts, context: GraphContext) -> GraphState:
    """Return the state with the layers in eight bits that will be so if the gates allow.

    Ranges are those of the calls that are timed, or where nothing is timed, none that were seen.
    """
    try:
        state, taken, _ = place_layers(config, state, round_roughly)
        if context.timing is not None and not state.dynamic:
            seen = observe_state(state, context.timing.feeds)
            state, _ = leave_unseen(state, seen)
            state = replace(state, ranges={**state.ranges, **choose_ranges(seen, lambda name: ("minmax", 100.0))})
    except ValueError as error:
        raise PassError(f"{config.kind}: {error}") from error
    state, _ = take_fastest(config, state, taken, context)
    return pretend_ranges(state)


@dataclass(frozen=True)
class Chosen:
    """What was found fastest, the key under which it is kept, and its times; None where a bundle's lock gave it.

    `before`: what was chosen before outputs that had collapsed were healed.
    """

    choice: PlacementChoice
    key: tuple[object, ...]
    times: PlacementTimes | None
    before: Chosen | None = None


def take_fastest(
    config: EightBit, state: GraphState, taken: Sequence[LayerFacts], context: GraphContext
) -> tuple[GraphState, Chosen | None]:
    """Return the state with the layers in int8 that gain from it on this machine, and the choice.

    All of them, and None, where the pass does not ask for that, nothing can be timed, or a pass before has layers in
    eight bits already, whose placement is kept. A choice that was made before for such a graph is taken up again.
    """
    timer = context.timing
    others = set(state.integer) - {layer.name for layer in taken}
    if timer is None or not config.chooses_by_time or not state.integer or state.in_float8 or others:
        return state, None
    form = [digest_structure(state.model), state.integer, state.placement, state.attention, state.dynamic]
    key = (*timer.call, *form, list_zero_based(state), *state.leave_out)
    given = timer.clock.kept.read_given("placement", key)
    kept = given or timer.clock.kept.read("placement", key)
    if kept is None:
        choice, times = choose_fastest(state, timer, context.log)
        kept = {"choice": asdict(choice), "times": asdict(times)}
        timer.clock.kept.write("placement", key, kept)
    choice = PlacementChoice.from_record(kept["choice"])
    names = [name for name in state.integer if name not in choice.in_float]
    measured = None if given is not None else PlacementTimes(**kept["times"])
    chosen = replace(keep_integer(state, names, choice.kind), timed_for=timer.target, untimed_placement=state.placement)
    return chosen, Chosen(choice, key, measured)


def _record(chosen: Chosen | None) -> dict[str, Any]:
    """Return what a bundle's lock says of the choice: all that decides the file, and no time."""
    if chosen is None:
        return {}
    record = {"key": name_given("placement", chosen.key), **asdict(chosen.choice)}
    return record if chosen.before is None else {**record, "before": _record(chosen.before)}


def _tell_unseen(config: EightBit, unseen: Mapping[str, str]) -> list[Note]:
    """Return a note for each reason for which layers stay float, with their names."""
    return [
        Note("warning", f"{config.kind}: in float: {', '.join(name for name in unseen if unseen[name] == why)}: {why}")
        for why in dict.fromkeys(unseen.values())
    ]


def _tell_choice(config: EightBit, chosen: Chosen | None, target: str) -> list[Note]:
    if chosen is None or not chosen.choice.in_float:
        return []
    n = len(chosen.choice.in_float)
    layers = "1 layer computes" if n == 1 else f"{n} layers compute"
    text = f"{layers} in float from int8 weights, faster so on {target} (`placement: auto` computes all in int8)"
    notes = [Note("info", f"{config.kind}: {text}")]
    if chosen.times is not None:
        gains = f"all in int8 would run at {chosen.times.everywhere:.2f}x, this at {chosen.times.chosen:.2f}x"
        notes.append(Note("info", f"{config.kind}: {gains} here", here=True))
    return notes


def _choose_placement(config: EightBit, state: GraphState) -> Kind:
    placed = config.choose_tensors()
    if placed != "auto":
        return placed
    names = {facts.name for facts in config.choose(state.facts())[0]}
    return decide_kind([layer for layer in find_layers(state.model) if layer.name in names])


def _make_settings(config: EightBit, state: GraphState) -> Callable[[str], Setting]:
    """Return a function: tensor name -> (method, percentile), with the overrides of the layers that touch it.

    float8 takes the largest value, for small ones keep their precision whatever the scale is.
    """
    if not isinstance(config, Int8):
        return lambda name: ("minmax", 100.0)
    special: dict[str, Setting] = {}
    layers = find_layers(state.model)
    for override in config.overrides:
        chosen = [
            layer.name
            for layer in layers
            if any(matches(pattern, layer.name, layer.type, layer.op) for pattern in override.targets)
        ]
        setting = (override.calibration or config.calibration, override.percentile or config.percentile)
        special |= dict.fromkeys(tensors_of(state.model, chosen), setting)
    return lambda name: special.get(name, (config.calibration, config.percentile))


def _heal_collapse(
    config: EightBit, state: GraphState, seen: dict[str, Observer], sample: Sequence[Feeds], context: GraphContext
) -> tuple[GraphState, list[Note]]:
    """Compare outputs with float; where they collapsed, blame an operator kind, name its tensors, leave it float.

    The kind is left out only with placement: auto; with an explicit placement the finding is reported. So is a collapse
    that no one operator kind explains: leaving it out must give back HEALS of what is lost.
    """
    variant = context.target.variant
    held, sample = hold_choices(state, sample)
    exact = outputs_of(held.model, sample)
    cosine = output_cosine(exact, outputs_of(write_state(held, variant), sample))
    context.log(f"{config.kind}: mean cosine of the outputs to float {cosine:.5f}")
    notes: list[Note] = []
    while cosine < COLLAPSE:
        blamed = [] if held.dynamic else blame(held, seen, exact, sample, variant)
        suspects = [suspect for suspect in blamed if suspect.cosine - cosine > HEALS * (1 - cosine)]
        if not suspects:
            text = f"{config.kind}: outputs collapsed (mean cosine {cosine:.3f}), and leaving out no one operator helps"
            notes.append(Note("warning", f"{text}; the layers of lowest sqnr_db in the report are the first to ignore"))
            break
        worst = suspects[0]
        tensors = ", ".join(f"{t} (largest value {spread(seen.get(t)):.0f}x its median)" for t in worst.tensors)
        finding = (
            f"{config.kind}: outputs collapsed (mean cosine {cosine:.3f}); quantized outputs of {worst.operator} are "
            f"to blame: without them {worst.cosine:.3f}; tensors: {tensors}"
        )
        context.log(finding)
        if config.placement_is_given:
            notes.append(Note("warning", f"{finding}. Use placement: auto or inputs"))
            break
        notes.append(Note("warning", f"{finding}. They stay float"))
        held, cosine = replace(held, leave_out=[*held.leave_out, worst.operator]), worst.cosine
    return replace(state, leave_out=held.leave_out), notes


@dataclass(frozen=True)
class _Restored:
    """What went back to float, and why. `sensitivity`: of each layer, or of its group."""

    state: GraphState
    sensitivity: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    reason: str = ""


def _restore(config: EightBit, state: GraphState, context: GraphContext) -> _Restored:
    if config.restore.budget:
        return _restore_within_budget(config, state, context)
    if context.shortfalls is None or config.restore.max_layers == 0:
        return _Restored(state)
    variant, find = context.target.variant, context.shortfalls
    short = find(write_state(state, variant))
    if not short:
        return _Restored(state)
    before = find(state.model).keys()
    lost = [text for gate, text in short.items() if gate in before]
    broken = [text for gate, text in short.items() if gate not in before]
    if not broken:
        return _Restored(state, notes=(_note_shortfalls(config, "lost before, which no layer in float mends", lost),))
    context.log(f"{config.kind}: measuring each layer's sensitivity, because {'; '.join(broken)}")
    some = _take_samples(context.batches, config.restore.samples)
    sensitivity = sensitivities(
        state, some, variant, lambda names: context.progress(names, f"{config.kind}: sensitivity")
    )
    result = restore_until_held(
        state,
        broken,
        sensitivity,
        variant,
        lambda model: [text for gate, text in find(model).items() if gate not in before],
        config.restore.max_layers,
        config.restore.max_minutes,
        context.log,
    )
    notes = []
    if result.layers:
        notes.append(
            Note(
                "warning", f"{config.kind}: back to float32 for the gates: {', '.join(result.layers)} ({result.ended})"
            )
        )
    if result.shortfalls:
        notes.append(_note_shortfalls(config, result.ended, result.shortfalls))
    reason = "restored: among the most sensitive, and a gate did not hold"
    return _Restored(result.state, sensitivity, tuple(notes), reason)


def _note_shortfalls(config: EightBit, ended: str, short: Sequence[str]) -> Note:
    return Note("warning", f"{config.kind}: gates still short ({ended}): {'; '.join(short)}")


def _restore_within_budget(config: EightBit, state: GraphState, context: GraphContext) -> _Restored:
    """Return those layers to float that a budget allows and that gain most by it. PassError for one out of reach."""
    restore, variant = config.restore, context.target.variant
    write = context.write or (lambda some: write_state(some, variant))
    groups = group_fused(state)

    def log(text: str) -> None:
        context.log(f"{config.kind}: {text}")

    def judge(some: GraphState) -> Verdict:
        model = write_state(some, variant)
        short = () if context.shortfalls is None else tuple(context.shortfalls(model).values())
        return Verdict(short, None if context.score is None else context.score(model))

    try:
        if restore.size_ratio is not None:
            prices = price_bytes(state, groups, restore.size_ratio, write)
        else:
            groups = [group for group in groups if set(group) <= set(state.integer)]
            prices = _price_time(config, state, groups, context)
        log("measuring what each group of layers loses in eight bits")
        some = _take_samples(context.batches, restore.samples)
        named = {", ".join(group): group for group in groups}
        hurt = measure_groups(
            state, named, some, variant, lambda names: context.progress(names, f"{config.kind}: sensitivity")
        )
        gated = context.shortfalls is not None
        mixed = restore_within_budget(state, groups, hurt, prices, judge, gated, restore.max_minutes, log)
    except BudgetMissed as error:
        raise PassError(
            f"{config.kind}: restore: {restore.budget} is out of reach: {error}; ask for less, or quantize more layers"
        ) from error
    returned = set(mixed.layers)
    left = sum(value for group, value in zip(groups, hurt, strict=True) if not returned & set(group))
    text = (
        f"{config.kind}: {restore.budget} is kept ({mixed.text}): {len(mixed.layers)} layers in float"
        f"{': ' if mixed.layers else ''}{', '.join(mixed.layers)}; predicted loss {left:.3g} (1 - cosine), "
        f"{sum(hurt):.3g} with all in eight bits"
    )
    if mixed.tried > 1:
        text += f"; {mixed.tried} choices were held against the {'gates' if gated else 'metric'}, which decided"
    notes = [Note("info", text)]
    if mixed.verdict.short:
        notes.append(_note_shortfalls(config, f"within {restore.budget}", mixed.verdict.short))
    sensitivity = {name: value for group, value in zip(groups, hurt, strict=True) for name in group}
    return _Restored(mixed.state, sensitivity, tuple(notes), f"within {restore.budget}: among those that lose most")


def _price_time(config: EightBit, state: GraphState, groups: Groups, context: GraphContext) -> Prices:
    timing, speedup = context.timing, config.restore.speedup
    if timing is None or speedup is None:
        raise PassError(f"{config.kind}: restore: speedup needs a target that is timed here; use size_ratio")
    return price_time(state, groups, speedup, timing, context.log)


def _take_samples(batches: Iterable[Feeds], samples: int) -> list[Feeds]:
    taken: list[Feeds] = []
    count = 0
    for feeds in batches:
        taken.append(feeds)
        count += len(next(iter(feeds.values())))
        if count >= samples:
            break
    return taken


def _measure(
    state: GraphState,
    seen: dict[str, Observer],
    sensitivity: Mapping[str, float],
    sample: Sequence[Feeds],
    context: GraphContext,
) -> dict[str, dict[str, float]]:
    names = [*state.integer, *state.weight_only]
    held, sample = hold_choices(state, sample)
    noise = layer_sqnr_db(held.model, write_state(held, context.target.variant), names, sample)
    measured = {name: {"sqnr_db": round(value, 3)} for name, value in noise.items()}
    for layer in find_layers(state.model):
        observer = seen.get(layer.data_input.name or "")
        if observer is not None and layer.name in measured:
            measured[layer.name] |= {
                "input_low": round(observer.low, 5),
                "input_high": round(observer.high, 5),
                "input_spread": round(spread(observer), 2),
            }
    for name, value in sensitivity.items():
        measured.setdefault(name, {})["sensitivity"] = round(value, 8)
    return measured


def _decide(
    config: EightBit, name: str, kind: str, state: GraphState, chosen: Chosen | None, why_float: str
) -> LayerDecision:
    if chosen is not None and name in state.unpacked:
        return LayerDecision(name, kind, config.number, f"W8, computed in float: faster so on {state.timed_for}")
    if name in state.weight_only:
        return LayerDecision(name, kind, config.number, "W8, looked up as integers")
    if name in state.integer:
        return LayerDecision(name, kind, config.number, config.scheme)
    return LayerDecision(name, kind, "float32", why_float)
