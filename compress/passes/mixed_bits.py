"""Bits that differ from layer to layer under one budget: what a recipe asks for, which get equal bits, the plan."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from compress.facts import FLOAT_BYTES, LayerDecision, LayerFacts, ModelFacts, Note, PassPlan, Structure
from compress.formats.schemes import BLOCK_BITS, Scheme
from compress.formats.targets import Target
from compress.passes.layer_schemes import count_layer_bytes, count_stored_bits
from compress.rounding.allocate import join_groups
from compress.specs import Record, one_of
from runtime.words import did_you_mean, size_text

MEASURED_TOKENS = 8192
"""Of the calibration data, at most, on which what each choice of bits costs is measured."""
COMPARED_TOKENS = 32768
"""The same, on which two choices are compared: half a hundredth of a nat is then beyond the texts' own noise."""
Bits = Annotated[int, Field(ge=2, le=8)]


def _check_format(name: str) -> str:
    """Return the format's name in capitals. Raises ValueError if it is none of llama.cpp's."""
    if name.upper() not in BLOCK_BITS:
        raise ValueError(
            f"there is no format {name!r}{did_you_mean(name, BLOCK_BITS)}; there are {', '.join(BLOCK_BITS)}, and bits"
        )
    return name.upper()


BlockFormat = Annotated[
    str, AfterValidator(_check_format), WithJsonSchema({"type": "string", "enum": list(BLOCK_BITS)})
]
Choice = int | str
"""Bits, or the name of one of llama.cpp's formats."""


def count_choice_bits(choice: Choice) -> float:
    """Return the bits of a choice, of a format with its share of the scales."""
    return BLOCK_BITS[choice] if isinstance(choice, str) else choice


def name_choice(choice: Choice) -> str:
    """Return a choice in words: "4 bits", "Q4_K"."""
    return choice if isinstance(choice, str) else f"{choice} bits"


BUDGETS = ("average", "size_ratio", "speedup")
FLOAT_BITS = 8 * FLOAT_BYTES


class BitBudget(Record):
    """Bits chosen for each group of layers, those that lose least in all under one budget.

    Exactly one of `average`, `size_ratio` and `speedup` is the budget. Layers that read one tensor (q, k and v; gate
    and up), and the experts of a mixture, get equal bits: engines compute them as one. llama.cpp does not: there each
    matrix gets its own, and a part of all experts (up, or down) one.
    """

    average: float | None = None
    """Bits of the integers, on average over all weights that the pass rounds, those that `overrides`, `embeddings` and
    `lm_head` name included. Scales come on top, and are as many whatever the bits."""
    size_ratio: Annotated[float, Field(gt=1)] | None = None
    """How many times smaller the whole model's file is to be than the float one, at least: scales, zero points,
    embeddings and all that stays float are counted, as the target's file holds them."""
    speedup: Annotated[float, Field(gt=1)] | None = None
    """How many times faster than in float the whole model is to be on the target, at least (of a decoder: the time of a
    further token); each layer is timed at each choice, and what is chosen is timed whole."""
    choices: tuple[Bits | BlockFormat, ...]
    """The bits that a layer may get, two at least; under `size_ratio` also llama.cpp's formats by name: Q3_K."""

    @model_validator(mode="after")
    def _check_choices(self) -> BitBudget:
        one_of(self, BUDGETS)
        if len(set(self.choices)) < 2 or len(set(self.choices)) < len(self.choices):
            given = ", ".join(map(str, self.choices))
            raise ValueError(f"choices are {given or 'none'}; give two or more that differ, or bits: a number")
        named = [choice for choice in self.choices if isinstance(choice, str)]
        if named and self.size_ratio is None:
            raise ValueError(
                f"{named[0]} is a format of GGUF files, whose bytes size_ratio counts; use it as the budget"
            )
        least, most = count_choice_bits(self.ordered[0]), count_choice_bits(self.ordered[-1])
        if self.average is not None and not least <= self.average <= most:
            raise ValueError(
                f"average {self.average:g} is outside of the choices, {least} to {most}; give one between them"
            )
        return self

    @property
    def ordered(self) -> tuple[Choice, ...]:
        """Return the choices, the fewest bits first."""
        return tuple(sorted(self.choices, key=lambda choice: (count_choice_bits(choice), str(choice))))

    @property
    def nominal(self) -> Choice:
        """Return the choice that stands for all where one is asked for: that next to the average."""
        if self.speedup is not None:
            return self.ordered[(len(self.choices) - 1) // 2]
        wanted = self.average if self.average is not None else FLOAT_BITS / (self.size_ratio or 1)
        return min(self.ordered, key=lambda choice: abs(count_choice_bits(choice) - wanted))

    def describe(self) -> str:
        """Format the budget as a recipe gives it: "size_ratio 5"."""
        name = next(name for name in BUDGETS if getattr(self, name) is not None)
        return f"{name} {getattr(self, name):g}"

    def describe_choices(self) -> str:
        """Format the choices, the fewest bits first: "2, 3 or 4 bits", "Q3_K or Q4_K"."""
        *fewer, most = self.ordered
        tell = name_choice if any(isinstance(choice, str) for choice in self.choices) else str
        return f"{', '.join(map(tell, fewer))} or {name_choice(most)}"

    def find(self, layer: str) -> Choice:
        """Return what a layer gets; the nominal choice as long as nothing has been chosen."""
        return self.nominal

    def explain(self, layer: str) -> str:
        """Return why a layer got its bits; "" where they are not chosen."""
        return ""

    def choose(self, by_layer: Mapping[str, Choice], reasons: Mapping[str, str]) -> ChosenBits:
        """Return the same budget with the bits of each layer, and why."""
        return ChosenBits(**dict(self), by_layer=dict(by_layer), reasons=dict(reasons))


class ChosenBits(BitBudget):
    """A budget whose bits have been chosen: no recipe has it, but the pass works with it."""

    by_layer: dict[str, Choice]
    reasons: dict[str, str]

    def find(self, layer: str) -> Choice:
        return self.by_layer.get(layer, self.nominal)

    def explain(self, layer: str) -> str:
        return self.reasons.get(layer, "")


@dataclass(frozen=True)
class Allocation:
    """What is to be chosen. `groups`: layers that get equal bits; `sizes`: the weights of each.

    `fixed_weights`, `fixed_bits`: weights whose bits the recipe gives, and their bits in all. `split`: a layer whose
    bits are given -> one that would have to get the same, and is to be chosen.
    """

    groups: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]
    fixed_weights: int
    fixed_bits: int
    split: Mapping[str, str]

    @property
    def free(self) -> set[str]:
        """Return the layers whose bits are chosen."""
        return {name for group in self.groups for name in group}

    @property
    def n_weights(self) -> int:
        """Return the weights that the average is over."""
        return sum(self.sizes) + self.fixed_weights

    def budget(self, average: float) -> int:
        """Return the bits that are left for the groups."""
        return int(average * self.n_weights + 1e-6) - self.fixed_bits

    def find_average(self, average: float) -> float:
        """Return the bits that each weight of the groups may take, on average."""
        return self.budget(average) / max(sum(self.sizes), 1)

    def explain_split(self) -> list[str]:
        """Return a sentence on each layer whose bits are given beside one that would have to get the same."""
        return [
            f"overrides give {given} bits of its own, and {other}, which engines compute together with it, has none; "
            "give both the same, or neither"
            for given, other in self.split.items()
        ]

    def explain_unreachable(self, budget: BitBudget) -> str:
        """Return why no choice keeps the budget, as far as bits alone tell; "" where some does."""
        if not self.groups:
            return "bits: every layer has bits that the recipe gives; give bits a number"
        if budget.average is None:
            return ""
        least, most = (count_choice_bits(budget.ordered[i]) for i in (0, -1))
        left = self.find_average(budget.average)
        if least <= left <= most:
            return ""
        return (
            f"bits: average {budget.average:g} leaves {left:.2f} bits for what is to be chosen, because overrides, "
            f"embeddings or lm_head give {self.fixed_weights:,} of {self.n_weights:,} weights "
            f"{self.fixed_bits / self.fixed_weights:.2f} bits; the choices go from {least} to {most}"
        )

    def spread(self, budget: BitBudget, left: float) -> dict[str, Choice]:
        """Return a choice for each layer, `left` bits on average, as they might come out: two around it, in turn.

        It stands for what will be measured where a plan asks what an export or an engine makes of layers that differ.
        """
        ordered = budget.ordered
        low = next((choice for choice in reversed(ordered) if count_choice_bits(choice) < left), ordered[0])
        high = next((choice for choice in ordered if count_choice_bits(choice) > left), ordered[-1])
        by_layer: dict[str, Choice] = {}
        used = seen = 0.0
        for group, size in zip(self.groups, self.sizes, strict=True):
            seen += size
            chosen = high if used + count_choice_bits(high) * size <= left * seen else low
            used += count_choice_bits(chosen) * size
            by_layer |= dict.fromkeys(group, chosen)
        return by_layer


@dataclass(frozen=True)
class FileBytes:
    """What the bytes of a model's file are made of.

    `whole`: of the float file; `fixed`: of the result, what no choice changes; `by_group`: [group][choice].
    """

    whole: int
    fixed: int
    by_group: tuple[tuple[int, ...], ...]

    @property
    def reachable(self) -> float:
        """Return how many times smaller the file is with the cheapest choice of every group."""
        return self.whole / (self.fixed + sum(map(min, self.by_group)))

    def find_room(self, size_ratio: float) -> float:
        """Return the bytes that are left for the groups."""
        return self.whole / size_ratio - self.fixed

    def explain_unreachable(self, budget: BitBudget, size_ratio: float) -> str:
        """Return why no choice makes the file so small, with what can be reached; "" where some does."""
        if size_ratio <= self.reachable:
            return ""
        nearest, least = math.floor(100 * self.reachable) / 100, name_choice(budget.ordered[0])
        return (
            f"bits: size_ratio {size_ratio:g} is out of reach: with {least} in every group the file is "
            f"{nearest:g} times smaller, of which {size_text(self.fixed)} stay whatever is chosen (embeddings, output "
            f"layer, norms, layers with bits of their own); ask for at most {nearest:g}, or round more of them"
        )


def count_file_bytes(
    layers: Sequence[LayerFacts],
    other_bytes: int,
    allocation: Allocation,
    schemes: Sequence[Mapping[str, Scheme]],
    target: Target,
    float_bytes: int = FLOAT_BYTES,
) -> FileBytes:
    """Count what the file holds that the target gets, names and nodes aside.

    `layers`: of the whole model, each with the bits that it is stored in now, and a weight of its own where it is to be
    rounded apart. `schemes`: for each choice layer -> how it is stored. `other_bytes`: float32, outside of layers.
    `float_bytes`: of a number in the source's files, which a checkpoint keeps; a graph has float32, a GGUF file float16
    in matrices and float32 in vectors.
    """
    float_bytes = FLOAT_BYTES if target.reads == "onnx" else float_bytes
    narrow = float_bytes / FLOAT_BYTES
    kept, kept_other = (0.5, 1.0) if target.reads == "gguf" else (narrow, narrow)
    stored = {layer.weight: layer for layer in reversed(layers)}
    stored |= {layer.weight: layer for layer in reversed(layers) if layer.name in schemes[0]}
    by_weight = {layer.name: layer.weight for layer in layers}
    free = {by_weight[name] for name in allocation.free}

    def count(layer: LayerFacts, choice: Mapping[str, Scheme]) -> int:
        if layer.name in choice:
            return count_layer_bytes(choice[layer.name], layer, target, float_bytes)
        return round(layer.n_bytes * (kept if layer.bits == FLOAT_BITS else 1))

    whole = sum(layer.n_weights for layer in stored.values()) * float_bytes + round(other_bytes * narrow)
    fixed = sum(count(layer, schemes[0]) for weight, layer in stored.items() if weight not in free)
    by_group = tuple(
        tuple(sum(count(stored[w], choice) for w in dict.fromkeys(by_weight[n] for n in group)) for choice in schemes)
        for group in allocation.groups
    )
    return FileBytes(whole, fixed + round(other_bytes * kept_other), by_group)


def find_allocation(
    taken: Sequence[LayerFacts], given: Mapping[str, int], apart: Collection[str], structure: Structure, target: Target
) -> Allocation:
    """Return what is to be chosen for the layers that a pass takes.

    `given`: layer -> bits that the recipe gives it; `apart`: those of them that engines compute by themselves (tables).
    """
    distinct = {layer.weight: layer for layer in reversed(taken)}  # of a shared weight the first
    sizes = {layer.name: layer.n_weights for layer in distinct.values()}
    groups = join_groups(
        [layer.name for layer in taken if layer.name not in apart], _list_together(taken, structure, target)
    )
    split = {}
    for group in groups:
        fixed, free = ([name for name in group if (name in given) == wanted] for wanted in (True, False))
        if fixed and free:
            split[fixed[0]] = free[0]
    chosen = [group for group in groups if not any(name in given for name in group)]
    return Allocation(
        tuple(chosen),
        tuple(sum(sizes.get(name, 0) for name in group) for group in chosen),
        sum(sizes.get(name, 0) for name in given),
        sum(bits * sizes.get(name, 0) for name, bits in given.items()),
        split,
    )


def _list_together(taken: Iterable[LayerFacts], structure: Structure, target: Target) -> list[tuple[str, ...]]:
    """Return layers that get equal bits: of one input, of one mixture of experts, of one weight.

    llama.cpp computes each matrix by itself: there only a part of all experts, which is one tensor, and one weight.
    """
    alike: dict[tuple[object, ...], list[str]] = {}
    for layer in taken:
        alike.setdefault(("weight", layer.weight), []).append(layer.name)
    for number, block in enumerate(structure.blocks):
        for name in (name for expert in block.experts for name in expert):
            part = name.rpartition(".")[2] if target.reads == "gguf" else ""
            alike.setdefault((number, part), []).append(name)
    fused = () if target.reads == "gguf" else structure.input_groups
    return [*(input_group.layers for input_group in fused), *map(tuple, alike.values())]


def plan_mixed_bits(
    kind: str,
    budget: BitBudget,
    facts: ModelFacts,
    target: Target,
    plan_with: Callable[[Choice | BitBudget], PassPlan],
    allocate: Callable[[Sequence[LayerFacts], Structure], Allocation],
) -> PassPlan:
    """Plan a pass for bits that are chosen at work: each choice has to be possible, and the budget decides the size.

    `kind`: the pass's. `plan_with`: its plan with these bits. `allocate`: what is to be chosen for the layers it takes.
    """
    if problem := _explain_no_budget(budget, facts, target):
        return PassPlan(facts, problems=(f"{kind}: bits: {problem}",))
    assert facts.structure is not None
    each = [plan_with(choice) for choice in budget.ordered]
    taken = [layer for layer in facts.layers if layer.name in each[0].schemes]
    allocation = allocate(taken, facts.structure)
    problems = list(dict.fromkeys(text for plan in each for text in plan.problems))
    problems += [f"{kind}: {text}" for text in allocation.explain_split()]
    if taken and (text := allocation.explain_unreachable(budget)):
        problems.append(f"{kind}: {text}")
    if importlib.util.find_spec("scipy") is None:
        problems.append(f"{kind}: bits: a budget needs the package scipy: pip install scipy")
    if problems:
        return PassPlan(facts, problems=tuple(problems))
    left = count_choice_bits(budget.nominal) if budget.average is None else allocation.find_average(budget.average)
    if budget.size_ratio is not None:
        layers = [replace(layer, bits=facts.find_layer(layer.name).bits) for layer in each[0].facts.layers]
        schemes = [plan.schemes for plan in each]
        counted = count_file_bytes(layers, facts.other_bytes, allocation, schemes, target, facts.float_bytes)
        if text := counted.explain_unreachable(budget, budget.size_ratio):
            return PassPlan(facts, problems=(f"{kind}: {text}",))
        totals = [sum(column) for column in zip(*counted.by_group, strict=True)]
        left = float(
            np.interp(counted.find_room(budget.size_ratio), totals, list(map(count_choice_bits, budget.ordered)))
        )
    spread = allocation.spread(budget, left)
    plan = plan_with(budget.choose(spread, {}))
    free = allocation.free
    sizes = {layer.name: count_stored_bits(plan.schemes[layer.name], layer) for layer in taken}
    sizes |= {name: sizes[name] + left - count_choice_bits(spread[name]) for name in sizes.keys() & free}
    text = (
        f"{kind}: {budget.describe_choices()} for each of {len(allocation.groups)} groups of layers, chosen by "
        f"what they cost the outputs: {_explain_budget(budget, allocation)}"
    )
    notes = dict.fromkeys([Note("info", text), *(note for plan in each for note in plan.notes)])
    decisions = tuple(
        _decide_later(decision, budget) if decision.layer in free else decision for decision in plan.decisions
    )
    return replace(plan, facts=plan.facts.with_bits(sizes), decisions=decisions, notes=tuple(notes))


def _explain_budget(budget: BitBudget, allocation: Allocation) -> str:
    """Return what is kept, in words."""
    if budget.average is not None:
        return f"{budget.average:g} on average over {allocation.n_weights:,} weights, scales not counted"
    if budget.size_ratio is not None:
        return f"the whole file at least {budget.size_ratio:g} times smaller than the float one"
    return f"the whole model at least {budget.speedup:g} times as fast as in float, by times measured here"


def _explain_no_budget(budget: BitBudget, facts: ModelFacts, target: Target) -> str:
    """Return why no budget can be kept over a model's layers, with the way out; "" where one can."""
    if facts.structure is None or facts.source != "torch":
        return "a budget needs a torch model, through which gradients go; give bits a number"
    if facts.has_two_chains:
        return "a budget is kept along one chain of blocks, and this model has two; give bits a number"
    if budget.speedup is not None and target.reads != "onnx":
        return f"speedup is measured, and {target.name} reads no ONNX file that is run here; use average or size_ratio"
    return ""


def _decide_later(decision: LayerDecision, budget: BitBudget) -> LayerDecision:
    """Return a layer's decision for bits that are yet to be chosen."""
    names = [choice.lower() if isinstance(choice, str) else f"w{choice}" for choice in budget.ordered]
    return replace(decision, action=f"{names[0]}-{names[-1]}", reason=f"{budget.describe_choices()}, measured")
