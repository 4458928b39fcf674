"""A goal's structures: what a measurement teaches, without building one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from test_chains import ground

from compress.facts import LayerFacts, ModelFacts
from compress.recipe.schema import Recipe
from compress.search.chains import Needs, Passes, PrunedStructure, Yields, ground_of, list_formats
from compress.search.foresight import Foresight
from compress.search.pursue import FAR, FULL, MOST_PROCESSES, OVERHEAD, SPARE_S, GoalEvidence, Pursuit
from compress.search.sweep import OutOfTime
from compress.search.trials import GateMiss, GoalValue, Run
from runtime.bundle.format import Gate


class Measured(Pursuit):
    """A pursuit whose trials left what it is told, as times that are needed over what was measured; 1: just so."""

    def __init__(self, left: dict[str, Needs], runs: dict[str, Run] | None = None) -> None:
        self.left, self.ground, self.runs = left, ground(), runs or dict.fromkeys(left, run(0.9, 0.01))
        gates = (Gate("size_ratio", min=5.0), Gate("latency_p50", min_speedup=3.0))
        recipe = Recipe.model_validate(
            {"version": 1, "name": "a", "model": {"source": "python:a:b", "task": "generic"}}
        )
        self.ahead = Foresight(recipe, gates, self.ground, {}, None, print)
        structures = {"cut": {"keep": 6, "max_params": 0.8, "speedup": 1.2}}
        self.known = GoalEvidence(structures=structures, yields=Yields(time_by_channels=0.5))

    def read_needs(self, name: str) -> Needs:
        return self.left[name]

    def report_of(self, name: str) -> Any:
        return {"layers": [{"layer": "blocks.0.up", "type": "Conv2d", "action": "pruned", "width": 32}]}

    def run_of(self, name: str, rung: int) -> Run | None:
        return self.runs.get(name) if name in self.left else None


def run(top1: float, half: float) -> Run:
    goals = {"top1": GoalValue(top1, None, top1 - half, top1 + half), "latency_p50": GoalValue(1.0, 3.0, 2.9, 3.1)}
    return Run(0, 0.5, "judged", goals=goals)


def test_no_speed_is_foreseen_of_what_is_too_large_beside_others() -> None:
    class Told(Foresight):
        def foresee_speed(self, passes: Passes) -> float:
            return 2.0

    def foresee(size: float) -> tuple[dict[str, float], ...]:
        layers = (LayerFacts("a", "Linear", "MatMul", "a.weight", (256, 256), 65_536),)
        facts = ground_of(ModelFacts("torch", "Net", "generic", (), (), layers), "onnxruntime-cpu", ("evaluation",))
        gates = (Gate("size_ratio", min=size), Gate("latency_p50", min_speedup=1.5))
        return Told(Measured({}).ahead.recipe, gates, facts, list_formats(facts), None, print).foresee(lambda: None)

    sizes, speeds = foresee(5.0)
    assert sizes["w8"] < 5 < sizes["w4"]
    assert speeds == {name: 2.0 if size >= 5 else 1.0 for name, size in sizes.items()}
    assert set(foresee(50.0)[1].values()) == {2.0}, "none is small enough"


def test_a_winner_that_was_slower_in_the_race_is_cut_by_what_it_lacked() -> None:
    fast = PrunedStructure(6, 0.8, 1.2)
    assert Measured({"cut": Needs(1.0, 1.0)}).correct("cut") == fast
    slower = Measured({"cut": Needs(1.0, 1.08)}).correct("cut")
    assert slower.speedup == pytest.approx(1.2 * 1.08**2, abs=1e-3)  # half of what channels promise is measured
    assert slower.max_params is not None and slower.keep == 6
    hiccup = Measured({"cut": Needs(1.0, 3.0)}).correct("cut")
    assert hiccup.speedup == pytest.approx(1.2 * FAR**2, abs=1e-3)
    alone = {"cut-untrained": Needs(1.0, 1.08)}  # one alone was in no race
    assert Measured(alone).correct("cut") == slower


def test_a_structure_that_was_measured_twice_lacks_what_both_say() -> None:
    twice = {"cut-untrained": Needs(1.0, 0.9), "cut": Needs(1.0, 1.1)}
    assert Measured(twice).correct("cut") == PrunedStructure(6, 0.8, 1.2)
    twice["cut-untrained"] = Needs(1.0, 1.08**2)
    assert Measured(twice | {"cut": Needs(1.0, 1.0)}).correct("cut").speedup == pytest.approx(1.2 * 1.08**2, abs=1e-3)


@pytest.mark.parametrize(("half", "processes"), [(0.02, None), (0.039, None), (0.06, 21), (0.16, MOST_PROCESSES)])
def test_where_times_scatter_more_processes_time_structures(half: float, processes: int | None) -> None:
    pursuit = Measured({})
    told = {"latency_p50": [2 - 2 * half, 2 + 2 * half], "throughput": [1.0, 3.0]}
    report = {"ratio_intervals": told, "benchmark": {"processes": 9}}
    pursuit.report_of = lambda name: report  # type: ignore[method-assign]
    assert pursuit.count_processes() == processes
    pursuit.known.processes = processes
    assert pursuit.recipe.validate_.benchmark.processes == processes


def put(structure: PrunedStructure, tried: dict[PrunedStructure, Needs]) -> PrunedStructure | None:
    """What is judged instead of a structure, those tried having left so much."""
    pursuit = Measured({})
    pursuit.known.structures = {each.name: asdict(each) for each in tried}
    return pursuit.put_between(structure, Needs(1.7, 4.0), {each.name: left for each, left in tried.items()})


def test_blocks_that_were_too_many_and_too_few_have_those_between_tried() -> None:
    many, few = {PrunedStructure(6): Needs(0.8, 1.1)}, {PrunedStructure(4): Needs(0.7, 0.9)}
    for found in (6, 4, 2):
        assert put(PrunedStructure(found), many | few) == PrunedStructure(5)
    assert put(PrunedStructure(3), many) == PrunedStructure(3)
    assert put(PrunedStructure(4, 0.9), few) == PrunedStructure(4, 0.9)  # its blocks are enough, its weights too many
    channels = put(PrunedStructure(6), many | {PrunedStructure(5): Needs(0.7, 0.9)})  # none between: 6 and channels
    assert channels is not None and channels.keep == 6 and channels.speedup is not None
    mixed = PrunedStructure(6, 0.8, 1.3)
    assert put(mixed, many | few) == mixed and put(PrunedStructure(None, 0.8), few) == PrunedStructure(None, 0.8)


def test_channels_that_give_no_more_for_being_asked_leave_it_to_blocks() -> None:
    first, second = PrunedStructure(6, 0.8, 1.5), PrunedStructure(6, 0.8, 2.0)
    pursuit = Measured({})
    pursuit.known.structures = {each.name: asdict(each) for each in (first, second)}

    def ends(before: Needs, left: Needs) -> bool:
        return pursuit.is_at_its_end(second, {first.name: before, second.name: left})

    assert not pursuit.is_at_its_end(first, {first.name: Needs(1.0, 1.3)})
    assert ends(Needs(1.0, 1.3), Needs(1.0, 1.29)) and not ends(Needs(1.0, 1.3), Needs(1.0, 1.1))
    assert ends(Needs(1.1, 1.3), Needs(1.0, 1.29))  # what it lacks stood still
    assert not ends(Needs(0.0, 1.2), Needs(0.0, 1.1)) and not ends(Needs(0.0, 1.2), Needs(0.0, 0.0))  # speed alone
    assert ends(Needs(1.2, 0.0), Needs(1.2, 0.0))
    tried = {first.name: Needs(1.0, 1.3), second.name: Needs(1.0, 1.29)}
    better = pursuit.improve(second, Needs(1.7, 4.0), 0.4, tried)
    assert better is not None and better.keep is not None and better.keep < 6 and better.speedup == 2.0


def test_those_race_that_have_what_is_needed_and_may_be_the_best() -> None:
    runs = {"a-untrained": run(0.88, 0.03), "b-untrained": run(0.84, 0.03), "c-untrained": run(0.86, 0.03)}
    pursuit = Measured({name: Needs(1.0, 1.0) for name in runs}, runs)
    pursuit.known.fitted = {"1.0": "a", "0.7": "b", "0.4": "", "0.0": "c"}
    assert pursuit.choose_racing() == ["a", "c"]  # 0.87 is below the best
    pursuit.left["a-untrained"] = Needs(1.0, 1.2)
    assert pursuit.choose_racing() == ["b", "c"]  # of a slow one, quality says little
    pursuit.left = {name: Needs(2.0, 1.0) for name in runs}
    assert pursuit.choose_racing() == ["a", "c"]


def test_a_depth_is_left_where_another_gave_something_better() -> None:
    pursuit = Measured({"a-untrained": Needs(1.0, 1.0)}, {"a-untrained": run(0.88, 0.03)})
    assert not pursuit.is_beaten(run(0.80, 0.03))  # nothing is fitted yet
    pursuit.known.fitted = {"1.0": "a", "0.7": ""}
    assert pursuit.is_beaten(run(0.87, 0.03)) and not pursuit.is_beaten(run(0.89, 0.03))


class Hurried(Measured):
    """A pursuit whose trials take 100 seconds each."""

    def __init__(self, seconds: float, left: dict[str, Needs]) -> None:
        super().__init__(left)
        self.seconds, self.tried = seconds, list[tuple[str, int]]()
        self.formats = {"int8": [{"kind": "int8"}]}
        self.known.base = "int8"

    @property
    def chains(self) -> dict[str, Any]:
        return {}

    def keep(self) -> None: ...

    def seconds_left(self) -> float:
        return self.seconds

    def judging_s(self) -> float:
        return 100.0

    def cut_first(self, structure: PrunedStructure) -> None:
        self.tried.append((structure.name, -1))
        self.seconds -= 300

    def try_chain(self, name: str, rung: int, *_: Any, **__: Any) -> Run | None:
        self.tried.append((name, rung))
        self.seconds -= 100
        return run(0.9, 0.01)


@pytest.mark.parametrize(
    ("seconds", "left", "n_tried"),
    [
        (1000.0, 1.0, 3),
        (600.0, 1.0, 2),
        (510.0, 1.0, 1),
        (510.0, 1.1, 1),
        (510.0, 1.3, 3),
        (510.0, 0.7, 3),
        (400.0, 1.3, 2),
    ],
)
def test_fitting_leaves_the_last_training_its_time_and_half_of_it_while_nothing_is_right(
    seconds: float, left: float, n_tried: int
) -> None:
    pursuit = Hurried(seconds, {})
    cuts = iter(PrunedStructure(keep) for keep in range(8, 0, -1))
    pursuit.design = lambda *_: next(cuts)  # type: ignore[method-assign]
    pursuit.improve = lambda *_: next(cuts)  # type: ignore[method-assign]
    pursuit.learn_yields = lambda *_: None  # type: ignore[method-assign]
    pursuit.read_needs = lambda name: Needs(left, left)  # type: ignore[method-assign]
    pursuit.run_of = lambda name, rung: run(0.9, 0.01)  # type: ignore[method-assign]
    pursuit.fit(Needs(1.5, 1.5), 1.0, 400.0)
    assert len(pursuit.tried) == n_tried


def test_without_time_to_train_a_structure_is_judged_as_it_was_cut() -> None:
    right = {"cut-untrained": Needs(1.0, 1.0)}
    assert (pursuit := Hurried(150.0, right)).train_in_full("cut") and pursuit.tried == [("cut-untrained", FULL)]
    with pytest.raises(OutOfTime):
        Hurried(90.0, right).train_in_full("cut")
    assert (pursuit := Hurried(900.0, right)).train_in_full("cut") and pursuit.tried[0][0].endswith("-trained")


def test_a_structure_that_was_not_judged_is_cut_before_its_training_is_given_its_time() -> None:
    pursuit, given = Hurried(900.0, {"cut-untrained": Needs(1.0, 1.05)}), list[float]()
    pursuit.chain_of = lambda structure, seconds: [{"seconds": given.append(seconds)}]  # type: ignore[method-assign]
    assert pursuit.train_in_full("cut") and [rung for _, rung in pursuit.tried] == [-1, FULL]
    assert given == [900.0 - 300.0 - OVERHEAD * 100.0 - SPARE_S]


def test_blocks_that_give_the_speed_stay_and_channels_do_the_rest() -> None:
    pursuit, needs = Measured({}), Needs(1.7, 1.7)
    blocks = PrunedStructure(14, 0.94)
    assert pursuit.may_keep_blocks(blocks, needs, Needs(1.07, 1.016))  # a hair slower than asked with room: enough
    assert not pursuit.may_keep_blocks(blocks, needs, Needs(1.0, 1.08))
    assert not pursuit.may_keep_blocks(blocks, needs, Needs(1.0, 0.9))
    assert pursuit.may_keep_blocks(blocks, Needs(1.7, 1.0), Needs(1.0, 0.5))  # chosen for size alone
    both = PrunedStructure(16, 0.8, 1.1)
    assert pursuit.may_keep_blocks(both, needs, Needs(0.9, 1.1)) and not pursuit.may_keep_blocks(
        both, needs, Needs(0.9, 0.9)
    )
    assert pursuit.may_keep_blocks(PrunedStructure(None, 0.5, 1.4), needs, Needs(2.0, 2.0))


def test_a_smaller_cache_is_worth_a_look_where_speed_or_memory_alone_is_lacking() -> None:
    def judge(**short: float) -> Run:
        gates = tuple(GateMiss(metric, "min 2", "undecided", False, "", short=by) for metric, by in short.items())
        return Run(1, 1.0, "judged", gates=gates)

    def worth(**short: float) -> bool:
        return Measured({"w4": Needs(1.0, 1.0)}, {"w4": judge(**short)}).is_worth_caching("w4")

    assert worth(nll=0.0, tpot=0.2) and worth(peak_memory=0.1)
    assert not worth(size_ratio=0.5, tpot=0.0) and not worth(nll=0.1, tpot=0.2)
    assert not Measured({}).is_worth_caching("w4")  # not judged yet
