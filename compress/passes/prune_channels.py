"""`prune_channels`: channels, neurons, heads and widths that matter least are removed, and the rest is fitted anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from compress.facts import LayerDecision, LayerFacts, ModelFacts, Note, PassPlan, Prunable, matches
from compress.formats.targets import Target
from compress.passes.base import Pass, Stage
from compress.specs import LayerPattern, one_of

Kind = Literal["channels", "neurons", "heads", "width"]
BUDGETS = ("ratio", "widths", "max_params", "max_flops", "speedup")
TOGETHER = (["max_params", "max_flops"], ["max_params", "speedup"])
"""Budgets of which two may be kept to at once."""
Importance = Literal["obs", "obd", "activation", "l1", "l2", "bn_scale", "taylor", "fisher", "random"]
Units = Mapping[str, int]
"""Dimension -> how many of its units stay."""
TRIES = 4
"""Times that a choice of widths is measured, and made anew with what that taught."""
STEPS = 200
"""Ratios that are tried for a budget."""
MOST = (STEPS - 1) / STEPS


class PruneChannels(Pass):
    """Remove what is coupled, as a whole: the model that is left is a smaller one of the same kind, without masks.

    `ratio`, `widths`, or `max_params` with or without `max_flops` or `speedup`, or one of these two, say how much goes.
    """

    stage: ClassVar[Stage] = "model"
    needs_calibration: ClassVar[bool] = True
    calibration_runs: ClassVar[float] = 20.0
    uses_coupling: ClassVar[bool] = True

    kind: Literal["prune_channels"] = "prune_channels"
    ratio: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the units of every dimension that goes."""
    max_params: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the weights that may be left; with `max_flops` both are kept to."""
    max_flops: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the multiply-accumulates that may be left."""
    speedup: Annotated[float, Field(gt=1)] | None = None
    """How many times faster the model is to be, on the target; widths are chosen by measured layer times. With
    `max_params` both are kept to."""
    timed_in: Literal["float32", "int8"] = "float32"
    """With `speedup`: the numbers in which model and layers are timed. int8, where the pass `int8` follows: which
    widths are fast is another question there."""
    widths: dict[str, Annotated[int, Field(ge=1)]] | None = None
    """How many units of each dimension stay, by the layer that names it; others stay whole. What a budget chose."""
    or_nearest: bool = False
    """Where budgets are out of reach, go as far as widths can, and say so, instead of ending."""
    dimensions: tuple[Kind, ...] = ("channels", "neurons", "heads")
    """What may go: channels of convolutions, neurons of feed-forward layers, attention heads (of grouped queries, a
    key-value head with its queries), and the width of what blocks add to."""
    targets: tuple[LayerPattern, ...] = ()
    """Layers whose outputs may go, by name, `re:` pattern or type; empty: all that can."""
    ignore: tuple[LayerPattern, ...] = ()
    """Layers whose outputs stay."""
    importance: Importance = "obs"
    """By what the least is told: obs: the error that is left where a unit was read, once the readers are fitted to the
    rest (grouped Optimal Brain Surgeon), obd: without that fit; the others score a unit by its activation, its weights
    (l1, l2), its batch norm's scale (bn_scale), its gradient (taylor, fisher), or by chance."""
    compensate: bool = True
    """Fit the layers that are left to what the whole model gives on the calibration data, by least squares."""
    round_to: Annotated[int, Field(ge=1)] = 8
    """Channels, neurons and widths that are left are a multiple of it, which kernels are fast at."""

    @model_validator(mode="after")
    def _require_one_budget(self) -> PruneChannels:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if given not in TOGETHER:
            one_of(self, BUDGETS, ", or max_params and one of max_flops and speedup")
        if self.or_nearest and (self.ratio is not None or self.widths is not None):
            raise ValueError("or_nearest is for budgets: ratio and widths are kept to anyhow; leave it out")
        if self.timed_in != "float32" and self.speedup is None:
            raise ValueError("timed_in says what a speedup is measured in; give speedup, or leave it out")
        return self

    @property
    def time_budget(self) -> Literal["graph", "module"] | None:
        return None if self.speedup is None else "module"

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        if facts.prunable is None:
            return PassPlan(facts, problems=(f"{self.kind}: works on torch models; an ONNX file cannot be pruned",))
        types = {layer.name: layer.type for layer in facts.layers}
        taken = [group for group in facts.prunable if self.takes(group, types)]
        problems = [*self._pattern_problems(facts), *self._sparse_problems(facts)]
        if not taken:
            found = ", ".join(sorted({group.kind for group in facts.prunable})) or "nothing"
            why = Counter(facts.unprunable.values()).most_common(3)  # reasons
            stays = "".join(f"; {n} layer{'s stay' if n > 1 else ' stays'}: {reason}" for reason, n in why)
            text = f"nothing is left to prune (of this model {found} could be; see dimensions{stays})"
            problems.append(f"{self.kind}: {text}")
        if problems:
            return PassPlan(facts, problems=tuple(problems))
        if problems := self._find_width_problems(taken):
            return PassPlan(facts, problems=tuple(problems))
        ratio = 0.0 if self.widths is not None else self.ratio or self._find_ratio(facts, taken)
        if ratio is None and not self.or_nearest:
            return PassPlan(facts, problems=(self._explain_out_of_reach(facts, taken),))
        beyond = [] if ratio is not None else [Note("warning", self._explain_out_of_reach(facts, taken))]
        ratio = MOST if ratio is None else ratio
        units = {group.name: self._count_kept(group, ratio) for group in taken}  # as `plan_units` gives them
        problems = [
            f"{self.kind}: ratio {ratio:g} would leave nothing of the {group.n_units} {group.kind} of {group.name}; "
            f"use at most {1 - 1 / group.n_units:.3g}, or ignore it"
            for group in taken
            if not units[group.name]
        ]
        whole = [group for group in taken if self.ratio is not None and units[group.name] == group.n_units]
        problems += [self._explain_too_few_heads(group) for group in whole if _count_queries(group) > 1]
        if problems:
            return PassPlan(facts, problems=tuple(problems))
        after = shrunk(facts, taken, units)
        decisions, notes = self._decide_layers(facts, taken, units), self._make_notes(facts, after)
        return PassPlan(after, decisions, (*notes, *beyond), units=units)

    def plan_units(self, facts: ModelFacts) -> dict[str, int]:
        """Return how many units of each group that is cut are to stay; under a budget, about."""
        types = {layer.name: layer.type for layer in facts.layers}
        taken = [group for group in facts.prunable or () if self.takes(group, types)]
        ratio = 0.0 if self.widths is not None else self.ratio or self._find_ratio(facts, taken)
        ratio = MOST if ratio is None and self.or_nearest else ratio
        return {} if ratio is None else {group.name: self._count_kept(group, ratio) for group in taken}

    def takes(self, group: Prunable, types: Mapping[str, str]) -> bool:
        """Return whether the coupled group may be cut. `types`: layer -> its type."""
        among = any(matches(p, name, types[name]) for p in self.targets for name in group.writers)
        ignored = any(matches(p, name, types[name]) for p in self.ignore for name in group.writers)
        return group.kind in self.dimensions and not ignored and (among or not self.targets)

    def _find_width_problems(self, taken: Sequence[Prunable]) -> list[str]:
        units = {group.name: group.n_units for group in taken}
        return [
            f"{self.kind}: widths: {name}: "
            + (f"has {units[name]} units, not {width}" if name in units else "names no dimension that can be cut")
            + f"; there are {', '.join(f'{key} of {n}' for key, n in list(units.items())[:4])}"
            for name, width in (self.widths or {}).items()
            if width > units.get(name, 0)
        ]

    def _explain_too_few_heads(self, group: Prunable) -> str:
        """Explain that the ratio removes less than one whole group of query heads and their key-value head."""
        return (
            f"{self.kind}: ratio {self.ratio:g} takes no head of {group.name}: a key-value head goes with the "
            f"{_count_queries(group)} query heads that share it, and one of {group.n_units} is the least; use a "
            f"ratio of {1 / group.n_units:.3g} or more, or leave heads out of dimensions"
        )

    def _pattern_problems(self, facts: ModelFacts) -> list[str]:
        writers = {name for group in facts.prunable or () for name in group.writers}
        types = {layer.name: layer.type for layer in facts.layers}
        problems = []
        for field, patterns in (("targets", self.targets), ("ignore", self.ignore)):
            for pattern in patterns:
                if not any(matches(pattern, name, types[name]) for name in writers):
                    why = next(
                        (f": {facts.unprunable[n]}" for n in facts.unprunable if matches(pattern, n, types[n])), ""
                    )
                    some = ", ".join(sorted(writers)[:3])
                    problems.append(
                        f"{self.kind}: {field}: {pattern!r} selects nothing that could go{why} (e.g. {some} could)"
                    )
        return problems

    def _sparse_problems(self, facts: ModelFacts) -> list[str]:
        sparse = [layer.name for layer in facts.layers if layer.sparse]
        if not sparse or not self.compensate:
            return []
        way = f"put {self.kind} before the pass that makes it sparse, or set compensate: false"
        return [f"{self.kind}: {sparse[0]} is sparse, and compensation would fill its zeros; {way}"]

    def _list_limits(self) -> list[tuple[str, float]]:
        """Return of each budget its name and the share that may be left of what it limits."""
        shares = (("max_params", self.max_params), ("max_flops", self.max_flops), ("speedup", self.speedup))
        given = [(name, share) for name, share in shares if share is not None]
        return [(name, 1 / share if name == "speedup" else share) for name, share in given]

    def _find_ratio(self, facts: ModelFacts, taken: list[Prunable]) -> float | None:
        """Find the least ratio, alike for all, that meets the budget: for the forecast; a run chooses the widths."""

        def holds(ratio: float) -> bool:
            after = shrunk(facts, taken, {group.name: self._count_kept(group, ratio) for group in taken})
            return all(
                count_cost(name, after) <= share * count_cost(name, facts) for name, share in self._list_limits()
            )

        return least_ratio(holds)

    def _count_kept(self, group: Prunable, ratio: float) -> int:
        """Count the units that a ratio leaves; under a budget, which chooses by itself, no fewer than may be chosen."""
        if self.widths is not None:
            return self.widths.get(group.name, group.n_units)
        units = count_kept_units(group.n_units, group.kind, ratio, self.round_to)
        return units if self.ratio is not None else max(units, self._find_minimum(group))

    def _find_minimum(self, group: Prunable) -> int:
        """Return the fewest units that a budget may choose."""
        return 1 if group.kind == "heads" else min(self.round_to, group.n_units)

    def _explain_out_of_reach(self, facts: ModelFacts, taken: list[Prunable]) -> str:
        reached = {name: self.least_share(facts, taken, name) for name, _ in self._list_limits()}
        field = next(name for name, share in self._list_limits() if reached[name] > share)
        best = reached[field]
        reach = f"speedup: {1 / best:.2f} by multiply-accumulates" if field == "speedup" else f"{field}: {best:.3g}"
        return (
            f"{self.kind}: {field} {getattr(self, field):g} is out of reach: the best, with the least of every "
            f"dimension left, is {reach}{'' if self.or_nearest else '; ask for less, or allow more dimensions'}"
        )

    def least_share(self, facts: ModelFacts, taken: Sequence[Prunable], budget: str = "max_flops") -> float:
        """Return the least share that can be left of what a budget limits; `taken`: the groups that may be cut."""
        least = shrunk(facts, taken, {group.name: self._find_minimum(group) for group in taken})
        return count_cost(budget, least) / count_cost(budget, facts)

    def _decide_layers(
        self, facts: ModelFacts, taken: list[Prunable], units: dict[str, int]
    ) -> tuple[LayerDecision, ...]:
        about = "expected: " if self.ratio is None and self.widths is None else ""
        said = {
            name: (group, f"{about}{units[group.name]} of {group.n_units} {group.kind} stay")
            for group in taken
            for name in group.writers
        }
        decisions = []
        for layer in facts.layers:
            if layer.name in said and units[said[layer.name][0].name] < said[layer.name][0].n_units:
                decisions.append(LayerDecision(layer.name, layer.type, "pruned", said[layer.name][1]))
            else:
                reason = facts.unprunable.get(
                    layer.name, "not selected" if layer.name not in said else "as wide as it was"
                )
                decisions.append(LayerDecision(layer.name, layer.type, "kept", reason))
        return tuple(decisions)

    def _make_notes(self, facts: ModelFacts, after: ModelFacts) -> tuple[Note, ...]:
        how = "" if self.ratio is not None or self.widths is not None else "about "
        text = (
            f"{self.kind}: {how}{after.n_bytes / facts.n_bytes:.0%} of the weights and "
            f"{after.macs / max(facts.macs, 1):.0%} of the multiply-accumulates stay"
        )
        return (Note("info", text),)


def count_cost(budget: str, facts: ModelFacts) -> float:
    """Return what a budget limits: weights, or multiply-accumulates, which stand for unmeasured time, too."""
    return sum(layer.n_weights for layer in facts.distinct_layers()) if budget == "max_params" else facts.macs


def _count_queries(group: Prunable) -> int:
    """Count the query heads that share a key-value head; 1 for what is no attention."""
    sizes = group.writers.values()
    return max(sizes) // min(sizes) if group.kind == "heads" else 1


def count_kept_units(n_units: int, kind: str, ratio: float, round_to: int) -> int:
    """Return how many units stay when `ratio` of them go: a multiple of `round_to` if there are enough, heads excepted.

    0 where nothing would be left.
    """
    wanted = n_units * (1 - Fraction(str(ratio)))
    if wanted < 1:
        return 0
    step = 1 if kind == "heads" else min(round_to, n_units)
    return min(n_units, max(step, step * round(wanted / step)))


def shrunk(facts: ModelFacts, dimensions: Sequence[Prunable], units: Units) -> ModelFacts:
    """Return the model's facts once only so many units are left; a layer's bias and norm are not counted."""
    layers = {layer.name: layer for layer in facts.layers}
    for group in dimensions:
        removed = group.n_units - units.get(group.name, group.n_units)
        for name, each in group.writers.items():
            layers[name] = _shrink_layer(layers[name], 0, removed * each)
        for name, each in group.readers.items():
            layers[name] = _shrink_layer(layers[name], 1, removed * each)
    left = facts.prunable and tuple(
        replace(group, n_units=units.get(group.name, group.n_units)) for group in facts.prunable
    )
    return replace(facts, layers=tuple(layers.values()), prunable=left)


def _shrink_layer(layer: LayerFacts, axis: int, removed: int) -> LayerFacts:
    """Take `removed` outputs (`axis` 0) or inputs (1) from a layer's shape and work; a table has its width second."""
    axis = 1 if layer.type == "Embedding" else axis
    shape = list(layer.shape)
    macs = layer.macs * (shape[axis] - removed) // shape[axis]
    shape[axis] -= removed
    return replace(layer, shape=tuple(shape), macs=macs)


def least_ratio(holds: Callable[[float], bool]) -> float | None:
    """Return the least ratio, in steps of 1 / STEPS, for which `holds`, true from some ratio on; None if for none."""
    low, high = 0, STEPS - 1
    if not holds(high / STEPS):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle / STEPS) else (middle + 1, high)
    return low / STEPS
