"""Learning what a student gives to be what a teacher gave: steps over batches, judged on batches kept aside. Torch.

Which parameters are learned is the student's affair; what the loss is, the batches'.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from compress.rounding.fake import FakeWeight
from compress.rounding.quantized_weight import QuantizedWeight
from compress.store.training_state import (
    SavedRun,
    Tensors,
    add_prefix,
    optimizer_state,
    remove_prefix,
    restore_optimizer,
)
from runtime.progress import Progress, no_progress

WARMUP = 10
"""Steps over which Adam's rates rise, or a tenth of all if that is fewer."""
Reduce = Callable[[Tensor], Tensor]


class LossBatch(Protocol):
    """A piece of the calibration data."""

    @property
    def n_rows(self) -> int:
        """Return the weight of its loss in a mean over batches."""
        ...

    @property
    def part(self) -> float:
        """Return its share of the step's rows, which several processes may split."""
        ...

    def loss(self) -> Tensor:
        """Return the mean over the rows of how far the student is from the teacher; >= 0, with gradients."""
        ...


@dataclass(frozen=True)
class RoundingSchedule:
    """How to learn.

    Rates are of one step: of positions in levels, of scales as a part of the start's, of float parameters as a part of
    the mean magnitude of each. `method` "adam": Adam, rates falling as a half cosine; "sign": the sign of the gradient,
    rates falling linearly. `max_seconds`: rates fall to zero by then, too (what a run gives then depends on the
    machine). `checks`: how often the batches kept aside are looked at, the end included.
    """

    steps: int
    rounding_rate: float
    scale_rate: float
    float_rate: float = 0.0
    method: Literal["adam", "sign"] = "adam"
    max_seconds: float | None = None
    checks: int = 4
    seed: int = 0


@dataclass
class TuneLog:
    """What happened. Losses are means over the batches kept aside; `best_step` 0: the start was best and was kept.

    `end_loss` is that of the best step so far while there are steps to come.
    """

    start_loss: float
    end_loss: float
    best_step: int = 0
    steps: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    """Of the steps, each on its own batch."""


class LearnedParts:
    """Parts of a module that are learned: fake weights of layers, and float parameters.

    `places`: float parameter's name -> (module, key) of all that hold it. The module itself is not changed: its parts
    are stood in for while `learning()`.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        weights: Mapping[str, FakeWeight],
        places: Mapping[str, Sequence[tuple[nn.Module, str]]] | None = None,
    ) -> None:
        self.layers, self.weights, self.places = layers, weights, places or {}
        for name, fake in weights.items():
            fake.to(_find_device(layers[name]))
        self.floats = {name: _copy_parameter(held[0]) for name, held in self.places.items()}
        self.sizes = {name: max(float(value.detach().abs().mean()), 1e-3) for name, value in self.floats.items()}

    def parameters(self) -> list[nn.Parameter]:
        fakes = [p for fake in self.weights.values() for p in (*fake.rounding(), *fake.scaling())]
        return fakes + list(self.floats.values())

    def groups(self, schedule: RoundingSchedule) -> list[dict[str, Any]]:
        """Return the parameters with their rates, as an optimizer takes them."""
        fakes = self.weights.values()
        groups = [{"params": [p for fake in fakes for p in fake.rounding()], "lr": schedule.rounding_rate}]
        groups.append({"params": [p for fake in fakes for p in fake.scaling()], "lr": schedule.scale_rate})
        groups += [{"params": [p], "lr": schedule.float_rate * self.sizes[name]} for name, p in self.floats.items()]
        return [group for group in groups if group["params"]]

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Let the module compute with what is learned while the context is open; gradients flow where they are on."""
        standing: list[tuple[nn.Module, str, Any]] = [
            (self.layers[name], "weight", self._compute_weight(name)) for name in self.weights
        ]
        standing += [(*place, self.floats[name]) for name, places in self.places.items() for place in places]
        held = [module._parameters[key] for module, key, _ in standing]
        try:
            for module, key, value in standing:
                module._parameters[key] = value
            yield
        finally:
            for (module, key, _), value in zip(standing, held, strict=True):
                module._parameters[key] = value

    def freeze(self) -> tuple[dict[str, QuantizedWeight], dict[str, Tensor]]:
        """Return what was learned: integers by layer, float parameters by name."""
        floats = {name: value.detach().clone() for name, value in self.floats.items()}
        return {name: fake.freeze() for name, fake in self.weights.items()}, floats

    def confine(self) -> None:
        for fake in self.weights.values():
            fake.confine()

    def _compute_weight(self, name: str) -> Tensor:
        value = self.weights[name]()
        return value.t() if is_transposed(self.layers[name]) else value


def is_transposed(layer: nn.Module) -> bool:
    """Return whether `layer` is transformers' Conv1D, whose weight is [in, out]."""
    return type(layer).__name__ == "Conv1D"


def learn(
    student: LearnedParts,
    batches: Sequence[LossBatch],
    kept_aside: Sequence[LossBatch],
    schedule: RoundingSchedule,
    progress: Progress = no_progress,
    reduce: Reduce = lambda tensor: tensor,
    saved: SavedRun | None = None,
) -> TuneLog:
    """Take the schedule's steps, one batch each, and leave the student as it was best on the batches kept aside.

    Without batches kept aside it is judged on those it learns from. Each pass over the batches has an order of its own,
    drawn from the seed; torch's and numpy's own generators are left alone. `reduce` sums a tensor over processes that
    learn together: the same number of steps, each with its part of the batch. `saved`: where the run is saved, and
    what a killed one left, from which it goes on and ends with the same bytes; None: nothing is saved.
    """
    judged, saved = kept_aside or batches, saved or SavedRun(None)
    if schedule.steps == 0 or not student.parameters():
        return TuneLog(start := _judge(student, judged, reduce), start)
    optimizer, best = _make_optimizer(student, schedule), _Best(student)
    log = _resume(student, best, optimizer, saved)
    if log is None:
        log = TuneLog(start := _judge(student, judged, reduce), start)
    check_at = {max(1, round(schedule.steps * (i + 1) / schedule.checks)) for i in range(schedule.checks)}
    order = _draw_numbers(len(batches), schedule.seed, len(log.losses))
    clock = time.monotonic() - log.seconds
    most_s = None if schedule.max_seconds is None else max(schedule.max_seconds - log.seconds, 0.0)
    for step in progress(range(len(log.losses), schedule.steps), "learning", most_s):
        done = _measure_done(step, clock, schedule, reduce)
        if done >= 1:
            break
        optimizer.at(done, step)
        with torch.enable_grad(), student.learning():
            loss = _weigh_loss(batches[next(order)]) if batches else _make_empty_loss(student)
            loss.backward()
        _share_gradients(student, reduce)
        optimizer.step()
        student.confine()
        log.losses.append(loss.item())
        log.steps, log.seconds = step + 1, time.monotonic() - clock
        if step + 1 in check_at:
            best.offer(_judge(student, judged, reduce), log)
        if saved.is_due():
            saved.save(partial(_collect_state, student, best, optimizer), asdict(log))
    if log.steps not in check_at:
        best.offer(_judge(student, judged, reduce), log)
    best.restore()
    log.seconds = time.monotonic() - clock
    return log


class _Best:
    """What the student was like when it was best: as it is now, until something better is offered."""

    def __init__(self, student: LearnedParts) -> None:
        self.student = student
        self.kept = [p.detach().clone() for p in student.parameters()]

    def offer(self, loss: float, log: TuneLog) -> None:
        """Keep the student as it is after the log's last step if it is better than the best so far, and log that."""
        if loss < log.end_loss:
            log.end_loss, log.best_step = loss, log.steps
            for kept, parameter in zip(self.kept, self.student.parameters(), strict=True):
                kept.copy_(parameter.detach())

    @torch.no_grad()
    def restore(self) -> None:
        for kept, parameter in zip(self.kept, self.student.parameters(), strict=True):
            parameter.copy_(kept)
            parameter.grad = None


class _Adam:
    """Adam with rates that rise over the first steps and fall as a half cosine."""

    def __init__(self, groups: list[dict[str, Any]], steps: int) -> None:
        self.warmup = max(1, min(WARMUP, steps // 10))
        self.inner = torch.optim.Adam(groups, betas=(0.9, 0.95), eps=1e-12)
        self.rates = [group["lr"] for group in self.inner.param_groups]

    def at(self, done: float, step: int) -> None:
        """Set the rates: `done` of the schedule is over."""
        factor = min(1.0, (step + 1) / self.warmup) * 0.5 * (1 + math.cos(math.pi * done))
        for group, rate in zip(self.inner.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor

    def step(self) -> None:
        self.inner.step()
        self.inner.zero_grad()

    def state(self) -> Tensors:
        return optimizer_state(self.inner)

    def restore(self, state: Tensors) -> None:
        restore_optimizer(self.inner, state)


class _Sign:
    """Steps of one size against the sign of the gradient, that size falling linearly."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.groups, self.factor = groups, 1.0

    def at(self, done: float, step: int) -> None:
        self.factor = 1 - done

    @torch.no_grad()
    def step(self) -> None:
        for group in self.groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign_(), alpha=group["lr"] * self.factor)
                parameter.grad = None

    def state(self) -> Tensors:
        """Return nothing: a step follows from its number and its gradient."""
        return {}

    def restore(self, state: Tensors) -> None:
        pass


def _make_optimizer(student: LearnedParts, schedule: RoundingSchedule) -> _Adam | _Sign:
    groups = student.groups(schedule)
    return _Adam(groups, schedule.steps) if schedule.method == "adam" else _Sign(groups)


def _collect_state(student: LearnedParts, best: _Best, optimizer: _Adam | _Sign) -> Tensors:
    """Return all that changes in a run, but for the log: tensors that are held anyway, not copies."""
    now = {str(i): p.detach().cpu().contiguous() for i, p in enumerate(student.parameters())}
    kept = {str(i): tensor.cpu().contiguous() for i, tensor in enumerate(best.kept)}
    return add_prefix("now", now) | add_prefix("best", kept) | add_prefix("optimizer", optimizer.state())


@torch.no_grad()
def _resume(student: LearnedParts, best: _Best, optimizer: _Adam | _Sign, saved: SavedRun) -> TuneLog | None:
    """Put back what a killed run saved and return its log; None where there is none."""
    left = saved.take()
    if left is None:
        return None
    tensors, record = left
    now, kept = remove_prefix("now", tensors), remove_prefix("best", tensors)
    for i, parameter in enumerate(student.parameters()):
        parameter.copy_(now[str(i)])
        best.kept[i].copy_(kept[str(i)])
    optimizer.restore(remove_prefix("optimizer", tensors))
    return TuneLog(**record)


@torch.no_grad()
def _judge(student: LearnedParts, batches: Sequence[LossBatch], reduce: Reduce) -> float:
    """Return the mean loss over batches, each counted by its rows."""
    total = torch.zeros(2, dtype=torch.float64)
    with student.learning():
        for batch in batches:
            total += torch.tensor([batch.loss().item() * batch.n_rows, batch.n_rows], dtype=torch.float64)
    loss, rows = reduce(total).tolist()
    return loss / rows if rows and math.isfinite(loss) else math.inf


def _measure_done(step: int, clock: float, schedule: RoundingSchedule, reduce: Reduce) -> float:
    """Return the part of the schedule that is over, by steps or by time, the same for all processes."""
    done = step / schedule.steps
    if schedule.max_seconds is None:
        return done
    spent = reduce(torch.tensor([time.monotonic() - clock, 1.0], dtype=torch.float64))
    return max(done, float(spent[0] / spent[1]) / schedule.max_seconds)


def _draw_numbers(n: int, seed: int, first: int = 0) -> Iterator[int]:
    """Yield numbers below `n` without end, from the `first`-th on, each pass in an order of its own; none if n is 0."""
    generator = np.random.default_rng(seed)
    skipped = 0
    while n:
        order = generator.permutation(n).tolist()
        yield from order[max(first - skipped, 0) :]
        skipped += n


def _weigh_loss(batch: LossBatch) -> Tensor:
    """Return what a process adds to the step's loss: that of its batch, times its part of the rows."""
    loss = batch.loss()
    return loss if batch.part == 1 else loss * batch.part


def _share_gradients(student: LearnedParts, reduce: Reduce) -> None:
    """Replace each parameter's gradient by its sum over processes."""
    for parameter in student.parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = reduce(gradient)


def _make_empty_loss(student: LearnedParts) -> Tensor:
    """Return the loss of a process that has no batch, while others have: 0, with gradients of 0."""
    return torch.stack([parameter.sum() for parameter in student.parameters() if parameter.requires_grad]).sum() * 0


def _find_device(layer: nn.Module) -> torch.device:
    """Return where a layer's weight lies."""
    weight: Any = layer.weight
    return weight.device


def _copy_parameter(place: tuple[nn.Module, str]) -> nn.Parameter:
    module, key = place
    value = module._parameters[key]
    assert value is not None
    return nn.Parameter(value.detach().clone().float())
