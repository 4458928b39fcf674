"""Turns: who is called when, how often, and what other work took of the time; never how long anything really took."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from runtime.clock import turns
from runtime.clock.turns import MIN_ROUNDS, MOST_EXTRA, Turns, take_off_others, time_in_turns


class Machine:
    """A wall clock, the processor's clock and how often the process was switched out, which calls move on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.own = 0.0
        self.switches = 0
        self.diary: list[tuple[str, int]] = []
        clocks = SimpleNamespace(perf_counter=lambda: self.wall, process_time=lambda: self.own)
        monkeypatch.setattr("runtime.clock.turns.time", clocks)
        monkeypatch.setattr("runtime.clock.turns.count_switches", lambda: self.switches)

    def call(
        self, name: str, seconds: float, taken: Callable[[int], float] = lambda n: 0.0, threads: int = 1
    ) -> Callable[[int], object]:
        """Return a model whose calls compute for so long; of the n-th call of all, other work takes `taken`."""

        def run(n: int) -> None:
            others = taken(len(self.diary))
            self.diary.append((name, n))
            self.own += threads * seconds
            self.wall += seconds + others
            self.switches += others > 0

        return run


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_each_round_gives_each_model_one_block_whose_first_call_is_not_counted(machine: Machine) -> None:
    timed = time_in_turns([machine.call("a", 0.001), machine.call("b", 0.002)], 12, warmup=1)
    assert timed.seconds.shape == (2, MIN_ROUNDS, 3), "three calls of the slower one last longer than a block"
    blocks = [machine.diary[2:][start : start + 4] for start in range(0, 8 * MIN_ROUNDS, 4)]
    assert all(len({name for name, _ in block}) == 1 for block in blocks)
    for number, pair in enumerate(zip(blocks[::2], blocks[1::2], strict=True)):
        assert {block[0][0] for block in pair} == {"a", "b"}
        assert [n for _, n in pair[0]] == [3 * number, *range(3 * number, 3 * number + 3)]
    assert timed.typical_ms == pytest.approx([1.0, 2.0])


def test_slow_calls_are_all_counted(machine: Machine) -> None:
    time_in_turns([machine.call("a", 0.1)], 1, warmup=1)
    assert len(machine.diary) == 1 + MIN_ROUNDS


def test_the_order_within_a_round_is_random_and_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    def firsts(seed: int) -> list[str]:
        machine = Machine(monkeypatch)
        time_in_turns([machine.call(name, 0.1) for name in "ab"], 30, seed=seed, warmup=1)
        return [name for name, _ in machine.diary[2::2]]

    assert set(firsts(0)) == {"a", "b"}
    assert firsts(0) == firsts(0) != firsts(1)


@pytest.mark.parametrize(
    ("count", "budget_s", "lasting_s", "rounds"),
    [(100, 60.0, 0.0, 100), (100, 0.0, 0.0, MIN_ROUNDS), (100, 1.0, 0.0, 10), (1, 60.0, 2.0, 20)],
)
def test_rounds_are_as_many_as_are_wanted_within_the_budget_and_as_last(
    machine: Machine, count: int, budget_s: float, lasting_s: float, rounds: int
) -> None:
    call = machine.call("a", 0.1)
    assert time_in_turns([call], count, budget_s=budget_s, lasting_s=lasting_s).seconds.shape == (1, rounds, 1)


def test_as_many_are_made_as_an_earlier_process_made(machine: Machine) -> None:
    assert time_in_turns([machine.call("a", 0.1)], 1, shape=(7, 2)).seconds.shape == (1, 7, 2)


def test_what_other_work_takes_of_one_thread_is_taken_off(machine: Machine) -> None:
    half = machine.call("a", 0.01, taken=lambda n: 0.01)
    timed = time_in_turns([half, machine.call("b", 0.02)], 20)
    assert timed.typical_ms == pytest.approx([10.0, 20.0])
    assert timed.taken == pytest.approx(1 / 4, abs=1e-4)


def test_a_clock_that_shows_next_to_nothing_is_not_believed() -> None:
    passed = np.array([1.0, 1.0, 1.0, 1.0])
    assert take_off_others(passed, np.array([0.5, 1.2, 0.0, -0.1])).tolist() == [0.5, 1.0, 1.0, 1.0]


def test_of_several_threads_disturbed_rounds_are_set_apart_where_others_can_be_had(machine: Machine) -> None:
    some = machine.call("a", 0.1, taken=lambda n: 0.3 if n % 3 == 0 else 0.0, threads=2)
    timed = time_in_turns([some], 10, one_thread=False, warmup=1)
    assert timed.seconds.shape == (1, 10, 1)
    assert timed.seconds.max() == pytest.approx(0.1) and timed.set_apart > 0 and timed.taken > 0


def test_where_nothing_else_can_be_had_the_disturbed_rounds_are_taken_and_it_is_said(machine: Machine) -> None:
    every = machine.call("a", 0.1, taken=lambda n: 0.3, threads=2)
    timed = time_in_turns([every], 10, one_thread=False, warmup=1)
    assert len(machine.diary) == 1 + MOST_EXTRA * 10
    assert timed.seconds.min() == pytest.approx(0.4) and timed.taken == 1.0


def test_a_ratio_is_that_of_the_rounds_whatever_the_pace_of_the_machine() -> None:
    pace = np.linspace(1, 3, 40)[None, :, None]
    timed = Turns(np.array([2.0, 1.0])[:, None, None] * pace)
    first, second = timed.typical_ms
    assert first / second == pytest.approx(2.0)


def test_garbage_is_collected_again_afterwards() -> None:
    import gc

    with turns.no_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
