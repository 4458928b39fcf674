"""The work of `sparsify_iteratively`: trainings one after another, between them masks and the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compress.blocks.layers import is_layer
from compress.blocks.tables import layer_facts
from compress.context import PassResult
from compress.distill.rewind import Rewind
from compress.distill.schedule import TrainingSchedule
from compress.distill.train import Dataset, TrainOptions, train
from compress.distill.training_log import TrainLog, numbers
from compress.distill.watch import module_names
from compress.errors import PassError
from compress.facts import LayerDecision, LayerFacts, Note
from compress.models.load import TorchModel
from compress.passes.sparsify_iteratively import SparsifyIteratively
from compress.pruning.masks import round_shares, set_to_zero, smallest
from compress.work.contexts import ModelContext
from compress.work.training import (
    describe_training,
    gather_numbers,
    make_dataset,
    objective,
    teacher_module,
    training_set,
    zero_keeper,
)

NAME = "sparsify_iteratively"


@dataclass(frozen=True)
class Round:
    """One training. `share`: of the weights, those that were zero in it."""

    share: float
    log: TrainLog


def apply_sparsify_iteratively(
    config: SparsifyIteratively, loaded: TorchModel, context: ModelContext
) -> PassResult[TorchModel]:
    """Train `loaded.module` in place, in rounds.

    PassError: no training set, no teacher, other outputs than its, a layer that would have no weight left, a training
    that ends before the point to go back to, a broken loss.
    """
    trainset, student = training_set(NAME, context), loaded.module
    teacher = teacher_module(NAME, context, loaded) if config.needs_teacher(loaded.task) else None
    modules: dict[str, Any] = {name: part for name, part in module_names(student).items() if is_layer(part)}
    taken, kept = config.choose_layers([layer_facts(name, part) for name, part in modules.items()])
    weights: dict[str, Tensor] = {layer.name: modules[layer.name].weight for layer in taken}
    schedule = config.make_schedule(trainset.n, context.seed)
    with objective(config, loaded, student, teacher, trainset, context) as goal:
        pupil = nn.ModuleDict({"student": student.requires_grad_(True), "projections": goal.projections})
        dataset = make_dataset(config, trainset, loaded, goal.loss)
        rounds = _IterativePruning(config, pupil, _drop_repeated(weights), dataset, schedule, context).run()
    student.requires_grad_(False)
    decisions, figures = _count_zeros(config, taken, weights)
    figures |= {f"{NAME}: with {training.share:.1%} zeros": numbers(training.log) for training in rounds}
    notes = (*goal.notes, *_make_notes(config, _drop_repeated(weights), rounds))
    return PassResult(replace(loaded), (*decisions, *kept), notes, figures | gather_numbers(NAME, rounds[-1].log))


def _drop_repeated(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights, those that several layers share once."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, weight in weights.items():
        first.setdefault(id(weight), (name, weight))
    return dict(first.values())


@dataclass(frozen=True, eq=False)
class _IterativePruning:
    """What all trainings share. `pupil`: what is trained, the student in it; `weights`: those that become sparse."""

    config: SparsifyIteratively
    pupil: nn.ModuleDict
    weights: Mapping[str, Tensor]
    dataset: Dataset
    schedule: TrainingSchedule
    context: ModelContext

    def run(self) -> list[Round]:
        """Run all trainings, in order; those that a killed run has finished are read from its work."""
        rounds, rewind = [], None
        if self.config.rewind != "never":
            rewind = Rewind(self.pupil, round(self.config.rewind * self.schedule.steps), self.context.work)
            rounds.append(Round(0.0, self._train(0, rewind.after_step)))
        for number, share in enumerate(round_shares(self.config.sparsity, self.config.rounds), start=1):
            masks = smallest(self.weights, share)
            emptied = [name for name, mask in masks.items() if bool(mask.all())]
            if emptied:
                raise PassError(
                    f"{NAME}: round {number} of {self.config.rounds} leaves none of the weights of {emptied[0]}; "
                    "ignore it, or take a lower sparsity"
                )
            if rewind is not None and not rewind.restore():
                raise PassError(
                    f"{NAME}: the first training ended before step {rewind.step}, to which rewind "
                    f"{self.config.rewind} goes back; use a lower rewind, or leave max_seconds out"
                )
            set_to_zero(self.weights, masks)
            rounds.append(Round(share, self._train(number)))
        return rounds

    def _train(self, number: int, also: Callable[[int], None] | None = None) -> TrainLog:
        """Train with the zeros that there are. `also`: called after each step."""
        keep = zero_keeper(self.pupil["student"])

        def after(step: int) -> None:
            keep(step)
            if also is not None:
                also(step)

        what = f"{NAME}, round {number} of {self.config.rounds}" if number else f"{NAME}, before the first round"
        run, folder = self.context, self._make_folder(number)
        options = TrainOptions(what, run.log, run.progress, folder, after_step=after, device=run.device)
        return train(self.pupil, self.dataset, self.schedule, options)

    def _make_folder(self, number: int) -> Path | None:
        """Make the folder where a training keeps its state; None where none is kept."""
        if self.context.work is None:
            return None
        folder = self.context.work / f"round-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _count_zeros(
    config: SparsifyIteratively, taken: Sequence[LayerFacts], weights: Mapping[str, Tensor]
) -> tuple[list[LayerDecision], dict[str, dict[str, float]]]:
    """Return each layer's share of zeros: as decisions, and as numbers."""
    decisions, figures = [], {}
    for decision in map(config.decision, taken):
        weight = weights[decision.layer]
        share = int((weight == 0).sum()) / weight.numel()
        decisions.append(replace(decision, reason=f"{share:.3g} of its weights: {decision.reason}"))
        figures[decision.layer] = {"sparsity": share}
    return decisions, figures


def _make_notes(config: SparsifyIteratively, weights: Mapping[str, Tensor], rounds: Sequence[Round]) -> list[Note]:
    """Say how much is zero, what each training reached, how the last one went; and where one of the others broke."""
    n = sum(weight.numel() for weight in weights.values())
    zero = sum(int((weight == 0).sum()) for weight in weights.values())
    losses = [
        f"{training.log.best_loss:.4g} with {training.share:.0%}"
        for training in rounds
        if training.log.best_loss is not None
    ]
    reached = f"; loss held out {', '.join(losses)}" if losses else ""
    text = f"{NAME}: {zero / n:.1%} of {n} weights are zero, after {config.rounds} round(s){reached}"
    broken = [describe_training(NAME, training.log) for training in rounds[:-1] if training.log.end == "diverged"]
    return [Note("info", text), *broken, describe_training(NAME, rounds[-1].log)]
