"""`sparsify_iteratively`: train, set the smallest weights to zero, go back, again: the lottery ticket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from compress.distill.schedule import TrainingSchedule
from compress.facts import LayerDecision, LayerFacts, ModelFacts, Note, PassPlan
from compress.formats.targets import Target
from compress.passes.base import DataSize, PassCost
from compress.passes.choosing import choose_layers, pattern_problems, refuse_rounded
from compress.passes.sparsify import CONVOLUTIONS, PRODUCTS, find_tied_problems, gain
from compress.passes.training import LearningPass
from compress.specs import LayerPattern


class SparsifyIteratively(LearningPass):
    """Zeros in several rounds, each followed by training: the share that goes is the same of what is left each time.

    The weights that stay go back to what they were early in the first training (a lottery ticket), or keep what they
    have learned (`rewind: never`). `epochs` and `steps` are those of one training, `max_seconds` that of all together.
    The loss is made of the terms of `distill`; of `labels` alone it needs no teacher.
    """

    kind: Literal["sparsify_iteratively"] = "sparsify_iteratively"
    sparsity: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.8
    """Share of the weights that are zero in the end, of all layers together."""
    rounds: Annotated[int, Field(ge=1)] = 5
    """Times that weights are set to zero."""
    rewind: Annotated[float, Field(ge=0, lt=1)] | Literal["never"] = 0.0
    """To which part of the first training the weights that stay go back after each round; 0: to the weights that the
    model came with. never: they stay as they are; the model, which came trained, is not trained before the first
    round. Every training begins anew with the highest rate."""
    targets: tuple[LayerPattern, ...] = ()
    """Layers to make sparse, by name, `re:` pattern or type; empty: every matrix product and convolution."""
    ignore: tuple[LayerPattern, ...] = ("lm_head",)
    """Layers that keep their weights."""

    @property
    def trainings(self) -> int:
        """Return how often the model is trained."""
        return self.rounds + (self.rewind != "never")

    def make_schedule(self, n_samples: int, seed: int) -> TrainingSchedule:
        """Return the schedule of one training."""
        schedule = super().make_schedule(n_samples, seed)
        return (
            schedule if self.max_seconds is None else replace(schedule, max_seconds=self.max_seconds / self.trainings)
        )

    def estimate_cost(self, facts: ModelFacts, data: DataSize) -> PassCost:
        cost = super().estimate_cost(facts, data)
        return replace(cost, forwards=self.trainings * cost.forwards)

    def train_notes(self, facts: ModelFacts, n_samples: int) -> list[Note]:
        schedule = self.make_schedule(n_samples, 0)
        text = f"{self.kind}: {self.trainings} trainings of {schedule.steps} steps of {schedule.batch_size} samples"
        return [Note("info", text)]

    def choose_layers(self, layers: Sequence[LayerFacts]) -> tuple[list[LayerFacts], list[LayerDecision]]:
        """Choose the layers to make sparse, and give a decision for each of the others."""
        return choose_layers(layers, self.targets, self.ignore, _explain_unfit)

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        taken, kept = self.choose_layers(facts.layers)
        problems = [*self.training_problems(facts), *self.term_problems(facts), *refuse_rounded(self.kind, facts)]
        problems += pattern_problems(facts.layers, self.kind, self._collect_patterns())
        if not taken:
            problems.append(f"{self.kind}: no layer is left to make sparse")
        problems += find_tied_problems(self.kind, facts.layers, taken)
        notes = (Note("info", f"{self.kind}: learns by {self.describe_loss(facts.task)}"), gain("unstructured", target))
        after = facts.with_zeros(layer.name for layer in taken)
        return PassPlan(after, (*map(self.decision, taken), *kept), notes, tuple(problems))

    def decision(self, layer: LayerFacts) -> LayerDecision:
        back = "as learned" if self.rewind == "never" else f"rewound to {self.rewind:.0%} of the training"
        how = f"its part of {self.sparsity:g} by magnitude in {self.rounds} round(s), the rest {back}"
        return LayerDecision(layer.name, layer.type, "sparse", how)

    def _collect_patterns(self) -> dict[str, Sequence[str]]:
        """Return the patterns that must select something: all but `lm_head`, which is ignored wherever there is one."""
        return {"targets": self.targets, "ignore": [pattern for pattern in self.ignore if pattern != "lm_head"]}


def _explain_unfit(layer: LayerFacts) -> str | None:
    """Return why a layer cannot be taken, or None."""
    return None if layer.type in (*PRODUCTS, *CONVOLUTIONS) else "not a matrix product or convolution"
