"""What happened in a training run: numbers for the report, lines for the log. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from compress.distill.schedule import TrainingSchedule

POINTS = 200
"""Of the loss curve, at most."""


@dataclass
class TrainLog:
    """All that a resumed run needs to know of the past.

    Losses on the samples held out: `start_loss`, and `best_loss` after `best_step` steps (0: the start was best); None
    where none are held out. `curve`: (step, mean loss of the steps since the last point); `evaluations`: (step, loss
    held out), which took `evaluating_s` in all. `end`: "steps", "time" or "diverged".
    """

    step: int = 0
    seconds: float = 0.0
    evaluating_s: float = 0.0
    start_loss: float | None = None
    best_loss: float | None = None
    best_step: int = 0
    end: str = ""
    curve: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    pending: list[float] = field(default_factory=list)
    """Losses of the steps since the curve's last point."""

    def add(self, loss: float, steps: int) -> None:
        """Record one more step, of `steps` in all."""
        self.step += 1
        self.pending.append(loss)
        if len(self.pending) >= max(steps // POINTS, 1) or self.step == steps:
            self.curve.append((self.step, sum(self.pending) / len(self.pending)))
            self.pending = []

    def look(self, loss: float) -> bool:
        """Record a loss on the samples held out; return True if it is the least so far."""
        self.evaluations.append((self.step, loss))
        self.start_loss = loss if self.start_loss is None else self.start_loss
        if self.best_loss is not None and not math.isnan(self.best_loss) and not loss < self.best_loss:
            return False
        self.best_loss, self.best_step = loss, self.step
        return True

    def looked(self) -> bool:
        """Return whether the state as it is has been looked at."""
        return bool(self.evaluations) and self.evaluations[-1][0] == self.step


def log_of(record: dict[str, Any]) -> TrainLog:
    """Make a log from JSON, which has lists for pairs."""
    points = {name: [tuple(point) for point in record[name]] for name in ("curve", "evaluations")}
    return TrainLog(**record | points)


def line(name: str, log: TrainLog, schedule: TrainingSchedule, seconds: float) -> str:
    """Return a line for the log, after a look at the samples held out."""
    text = f"{name}: step {log.step} of {schedule.steps}: held out {log.evaluations[-1][1]:.4g}"
    if not log.step:
        return text
    text += " (best)" if log.best_step == log.step else ""
    since = [loss for step, loss in log.curve if step > log.evaluations[-2][0]]
    text += f", training {sum(since) / len(since):.4g}" if since else ""
    left = seconds / log.step * (schedule.steps - log.step)
    if schedule.max_seconds is not None:
        left = min(left, schedule.max_seconds - seconds)
    return f"{text}; at most {max(left, 0):.0f} s left"


def make_divergence_error(name: str, log: TrainLog, schedule: TrainingSchedule) -> str:
    """Return the error where nothing better than the start was found before the loss broke."""
    return (
        f"{name}: the loss became NaN or infinite in step {log.step + 1} and nothing better than the start had been "
        f"found; lower learning_rate ({schedule.learning_rate:g})"
    )


def summary(name: str, log: TrainLog) -> str:
    """Return one sentence for the report."""
    # No seconds: a bundle's bytes may not hang on the clock.
    text = f"{name}: {log.step} steps{', as max_seconds says' if log.end == 'time' else ''}"
    if log.end == "diverged":
        text += f"; then the loss was NaN or infinite, and the state after step {log.best_step} was kept"
    if log.start_loss is None or log.best_loss is None:
        return f"{text}; the last state was kept, as held_out is 0"
    if not log.best_step:
        return f"{text}; nothing was better than the start (loss held out {log.start_loss:.4g}), which was kept"
    return f"{text}; loss held out {log.start_loss:.4g} to {log.best_loss:.4g} (after step {log.best_step}, kept)"


def numbers(log: TrainLog) -> dict[str, float]:
    """Return what the report's table says of a training: its length, and what it did to the loss held out."""
    figures = {"steps": float(log.step), "best_step": float(log.best_step)}
    if log.start_loss is not None and log.best_loss is not None:
        figures |= {"loss_before": log.start_loss, "loss_after": log.best_loss}
    return figures
