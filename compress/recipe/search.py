"""`search:`, the part of a recipe that says which of its values may be others, and what is looked for among them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from compress.specs import Record, one_of
from runtime.bundle.format import Gate
from runtime.metrics import MEASURED
from runtime.tasks.metrics import METRICS, is_own

Finite = Annotated[float, Field(allow_inf_nan=False)]
Number = int | Finite
DIRECTIONS = ("minimize", "maximize")
FORM = re.compile(r"(minimize|maximize) (\S+)")


class Space(Record):
    """The values that one place of the recipe may take: exactly one of `choice` and `range`."""

    choice: tuple[Any, ...] | dict[str, Any] | None = None
    """The values, one by one; or by name, {fast: ..., small: ...}, so that further places can be inside of one."""
    range: tuple[Number, Number] | None = None
    """The least and the greatest number; whole numbers where the recipe takes no others."""
    log: bool = False
    """Of a range: its numbers are drawn evenly on a logarithmic scale."""
    step: Annotated[int, Field(gt=0)] | Annotated[Finite, Field(gt=0)] | None = None
    """Of a range: only numbers so far apart, from the least on."""

    @model_validator(mode="after")
    def _refuse_empty(self) -> Space:
        one_of(self, ("choice", "range"))
        if self.range is None:
            if not self.choice:
                raise ValueError("choice is empty: name the values that may stand here")
            values = list(self.choice)
            if twice := next((v for i, v in enumerate(values) if _equals_one_of(v, values[:i])), None):
                raise ValueError(f"choice has {twice!r} twice")
            for name in self.choice if isinstance(self.choice, dict) else ():
                if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", name) is None:
                    raise ValueError(
                        f"choice: '{name}' is no name: use letters, digits, _ and -, with a letter or _ first"
                    )
            if self.log or self.step is not None:
                raise ValueError(f"{'log' if self.log else 'step'} is of a range, and this is a choice; leave it out")
        else:
            self._check_range(*self.range)
        return self

    def _check_range(self, low: float, high: float) -> None:
        if not low < high:
            raise ValueError(f"range is [{low:g}, {high:g}], which is empty: write the least number first")
        if self.log and low <= 0:
            raise ValueError(f"range begins at {low:g}, and log: true needs numbers above 0")
        if self.log and self.step is not None:
            raise ValueError("step and log do not go together; list the values as a choice")
        if self.step is not None and self.step > high - low:
            raise ValueError(f"step is {self.step:g}, more than the whole range [{low:g}, {high:g}]")

    @property
    def options(self) -> dict[str, Any]:
        """Return the named values of a choice that has names; {} of any other space."""
        return self.choice if isinstance(self.choice, dict) else {}


def _equals_one_of(value: Any, others: list[Any]) -> bool:
    """Compare as YAML does: 1, 1.0 and true are three values."""
    return any(type(value) is type(other) and value == other for other in others)


class Racing(Record):
    """Successive halving: many points tried cheaply, the best of them with more, few with all."""

    rungs: Annotated[int, Field(ge=2, le=6)] = 3
    """How often points are tried, the last time in full, on which alone the verdict rests."""
    factor: Annotated[int, Field(ge=2, le=32)] = 3
    """One of so many goes on to the next rung, where it gets so many times as much."""
    shorten: tuple[Literal["training", "evaluation", "calibration"], ...] = ("training", "evaluation")
    """What a rung before the last has less of: the training of passes that learn, and samples. Passes whose training,
    calibration and gates stay as they are, are taken up from the cache on the next rung."""

    @property
    def shares(self) -> tuple[float, ...]:
        """Return the part of the whole effort on each rung; the last is 1."""
        return tuple(float(self.factor) ** -(self.rungs - 1 - rung) for rung in range(self.rungs))

    @property
    def n_points(self) -> int:
        """Return how many points race together, of which one comes to the last rung."""
        return self.factor ** (self.rungs - 1)


class Search(Record):
    """What `compress sweep` tries. `compress apply` takes the values that stand in the recipe."""

    space: dict[str, Space]
    """Path of a value, as `--set` writes it (passes.0.ratio) -> what it may be. The value that stands there is tried
    first; without one the default, the first of a choice, the middle of a range. A choice by name takes the place of
    what stands there (`compress apply` does not), and inside of it the path goes on with the name:
    passes.small.0.ratio."""
    goals: tuple[str, ...]
    """What is looked for: minimize or maximize and a metric, such as `minimize size`. Of several the Pareto front is
    kept. Times, sizes and memory count as ratios to the float model's, which is measured in turn with the candidate."""
    constraints: tuple[Gate, ...] = ()
    """What must hold beside `validate.gates`, among which they stand in the recipe that is found."""
    trials: Annotated[int, Field(ge=1)] = 20
    """Points to try in all; `--trials` takes its place."""
    batch: Annotated[int, Field(ge=1)] = 4
    """Points that are chosen together, before any of them is tried, so that the study does not depend on how many
    processes try them. With `racing` it is the number that race together."""
    racing: Racing | None = None
    """Try points cheaply first; not given: all in full."""

    @model_validator(mode="after")
    def _refuse_nothing(self) -> Search:
        if not self.space:
            raise ValueError("space is empty: name what may be another, such as passes.0.bits: {choice: [4, 8]}")
        if not self.goals:
            raise ValueError("goals is empty: name what is looked for, such as minimize size")
        for goal in self.goals:
            if FORM.fullmatch(goal) is None:
                raise ValueError(f"goals: '{goal}': write minimize or maximize and a metric, such as minimize size")
        names = [metric for _, metric in self.split_goals()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"goals: '{twice}' is there twice")
        return self

    def split_goals(self) -> list[tuple[str, str]]:
        """Return the direction and the metric of each goal."""
        return [(goal.partition(" ")[0], goal.partition(" ")[2]) for goal in self.goals]

    @property
    def batch_size(self) -> int:
        """Return how many points are chosen together."""
        return self.batch if self.racing is None else self.racing.n_points


def find_direction(metric: str) -> str | None:
    """Return in which direction a known metric is better; None of a recipe's own, which says so when it is computed."""
    if is_own(metric) or metric not in (*METRICS, *MEASURED):
        return None
    known = MEASURED[metric] if metric in MEASURED else METRICS[metric]
    return DIRECTIONS[known.higher_is_better]
