"""Learning rates that are found by trying: what is tried, what is taken, and how long it takes."""

from __future__ import annotations

import math

import pytest

from compress.distill.course import Optimizer
from compress.distill.try_rates import MIDDLE, Arm, choose_arm, choose_roughly, count_few, count_units


def bowl(best: dict[Optimizer, float], floors: dict[Optimizer, float] | None = None) -> object:
    """A loss that is least at one rate of each optimizer, and infinite far above it."""

    def loss(arm: Arm, steps: int) -> float:
        away = math.log2(arm.learning_rate / best[arm.optimizer])
        return math.inf if away > 5 else (floors or {}).get(arm.optimizer, 0.0) + away**2 + 1 / steps

    return loss


@pytest.mark.parametrize("rate", [3e-5, 1e-4, 3e-4, 8e-4, 3e-3, 2e-2])
def test_the_rate_found_is_within_a_factor_of_the_best(rate: float) -> None:
    chosen, _ = choose_arm(bowl({"adamw": rate}), ("adamw",), 10)
    assert chosen is not None
    assert rate / 1.5 <= chosen.learning_rate <= 1.5 * rate


def test_the_better_optimizer_is_taken() -> None:
    rates: dict[Optimizer, float] = {"adamw": 5e-4, "sgd": 0.05}
    for optimizer in rates:
        floors: dict[Optimizer, float] = {"adamw": 1.0, "sgd": 1.0} | {optimizer: 0.0}
        chosen, _ = choose_arm(bowl(rates, floors), ("adamw", "sgd"), 10)
        assert chosen is not None
        assert chosen.optimizer == optimizer


def test_trials_take_no_more_than_they_may() -> None:
    for rate in (1e-6, 5e-4, 10.0):
        for optimizers in (("adamw", "sgd"), ("sgd",)):
            _, trials = choose_arm(bowl({"adamw": rate, "sgd": rate}), optimizers, 10)
            assert sum(trial.steps for trial in trials) <= 10 * count_units(optimizers)


def test_where_every_loss_breaks_nothing_is_chosen() -> None:
    chosen, trials = choose_arm(lambda arm, steps: math.inf, ("adamw",), 10)
    assert chosen is None
    assert min(trial.arm.learning_rate for trial in trials) < 1e-4  # lower ones were tried, too


def test_a_course_too_short_for_more_tries_the_middle_rates_of_each_optimizer_once() -> None:
    chosen, trials = choose_roughly(bowl({"adamw": 1e-4, "sgd": 0.1}), ("adamw", "sgd"), 7)
    assert [trial.arm for trial in trials] == [Arm(name, rate) for name in ("adamw", "sgd") for rate in MIDDLE[name]]
    assert len(trials) == count_few(("adamw", "sgd")) and {trial.steps for trial in trials} == {7}
    assert chosen == Arm("sgd", 0.08)
    assert choose_roughly(lambda arm, steps: math.inf, ("adamw",), 7)[0] is None
