"""Learning rates that are found by trying: what is tried, what is taken, and how long it takes."""

from __future__ import annotations

import math

import pytest

from compress.distill.schedule import Optimizer
from compress.distill.try_rates import (
    FEW,
    MIDDLE,
    MOST_RISE,
    Arm,
    RateTrial,
    choose_arm,
    choose_roughly,
    count_few,
    count_units,
    follow_trend,
    lower,
)


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


def test_a_rate_is_lowered_until_a_few_steps_do_not_break_the_model() -> None:
    def loss(arm: Arm, steps: int) -> float:
        return 8.5 if arm.learning_rate > 1e-4 else 0.4

    arm, trials = lower(loss, Arm("adamw", 5e-4), 3, 0.3)
    assert arm == trials[-1].arm and [trial.arm.learning_rate for trial in trials] == [5e-4, 1.25e-4, 3.13e-5]
    assert {trial.steps for trial in trials} == {FEW}
    arm, trials = lower(loss, Arm("adamw", 5e-4), 2, 0.3)
    assert len(trials) == 2 and arm.learning_rate == 3.13e-5  # the next one, untried
    assert lower(loss, Arm("adamw", 5e-4), 3, 8.0)[0].learning_rate == 5e-4


@pytest.mark.parametrize("power", [0.0, 0.2, 0.4])
def test_the_best_rate_of_a_long_course_is_foreseen_by_how_it_grew(power: float) -> None:
    def loss(arm: Arm, steps: int) -> float:
        return math.log(arm.learning_rate / (0.015 * (steps / 20) ** power)) ** 2

    chosen, trials = choose_arm(loss, ("sgd",), 20)
    assert chosen is not None
    followed = follow_trend(chosen, trials, 1000)
    assert followed.optimizer == "sgd"
    assert followed.learning_rate == pytest.approx(0.015 * 50**power, rel=0.5)


def test_a_trend_is_not_followed_far_nor_down_nor_where_there_is_none() -> None:
    arm = Arm("sgd", 0.02)

    def trials(short: float, long: float) -> list[RateTrial]:
        bests = {10: short, 20: long}
        rates = (0.005, 0.01, 0.02, 0.04, 0.08)
        return [RateTrial(Arm("sgd", r), n, math.log(r / best) ** 2) for n, best in bests.items() for r in rates]

    assert follow_trend(arm, trials(0.015, 0.03), 10**6).learning_rate == pytest.approx(0.02 * MOST_RISE)
    assert follow_trend(arm, trials(0.03, 0.015), 1000) == arm
    assert follow_trend(arm, trials(0.02, 0.02), 1000) == arm
    flat = [RateTrial(Arm("sgd", r), n, 1.0) for n in (10, 20) for r in (0.01, 0.02, 0.04)]
    assert follow_trend(arm, flat, 1000) == arm
    at_an_end = [trial for trial in trials(0.015, 0.03) if trial.steps == 20 or trial.arm.learning_rate > 0.01]
    assert follow_trend(arm, at_an_end, 1000) == arm
    broken = [
        RateTrial(t.arm, t.steps, math.inf if t.arm.learning_rate > 0.03 else t.loss) for t in trials(0.015, 0.02)
    ]
    assert follow_trend(arm, broken, 1000) == arm


def test_the_longest_trials_count_though_they_are_two() -> None:
    """Half of ResNet-56: losses of 25, 50 and 100 steps, best at 0.016, 0.014 and 0.027."""
    losses = {
        25: {0.005: 0.09499, 0.02: 0.09025, 0.08: 0.09972, 0.32: 0.14722},
        50: {0.01: 0.08814, 0.02: 0.08813, 0.04: 0.09053},
        100: {0.01: 0.08647, 0.02: 0.08427},
    }
    trials = [RateTrial(Arm("sgd", rate), n, loss) for n, each in losses.items() for rate, loss in each.items()]
    others = [RateTrial(Arm("adamw", rate), 50, 1.0) for rate in (1e-4, 2e-4)]
    followed = follow_trend(Arm("sgd", 0.02), [*trials, *others], 7000)
    assert followed.learning_rate == pytest.approx(0.097, rel=0.05)
