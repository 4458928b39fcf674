"""Reach a recipe's goal: which chain of passes, with which numbers, in the time there is.

Cheap evidence first. Formats alone are foreseen (sizes from the plan, times measured on models made like them), and the
most hopeful are judged. What they leave to be gained is cut out of the structure, in several mixtures of whole blocks
and channels, each fitted to size and time untrained; these race with a little training. The winner is trained with all
the time that is left. Each of these is a trial of one study, in a space of chains that grows, so that a run that is
stopped goes on, and the best so far is on disk at every moment.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from compress.errors import PlanError
from compress.planning.inputs import read_inputs
from compress.planning.make_plan import make_plan
from compress.recipe.goal import is_better_higher, list_directions
from compress.recipe.network import restrict_network
from compress.recipe.points import SearchSpace, open_space
from compress.recipe.schema import Recipe
from compress.recipe.search import Racing, Search, Space
from compress.search.chains import (
    CACHED,
    DEPTHS,
    LEAST_GAIN,
    Ground,
    Needs,
    Passes,
    PrunedStructure,
    Yields,
    count_cut,
    count_left,
    design,
    find_numbers,
    ground_of,
    list_formats,
    list_removed,
    make_training,
    probes,
    take_blocks,
    train_rounded,
)
from compress.search.foresight import Foresight, is_size, is_speed
from compress.search.study import LOG, REPORTS, Study, name_trial, open_study
from compress.search.sweep import NO_TIME, OutOfTime, Prior, Sweep, finish_study
from compress.search.trials import Run, Trial, write_json
from compress.search.workers import start_workers
from compress.store.run_log import choose_log
from runtime.bundle.format import Gate
from runtime.metrics import MEASURED

EVIDENCE = "evidence.json"
"""In the study's folder: what was found out before and between the trials."""
GIVEN = "given"
"""The chain that stands in the recipe."""
BUDGET_S = 3600.0
"""Where no time is given: an hour."""
REACHED = "the goal is reached"
UNTRAINED, TRAINED = "-untrained", "-trained"
"""Of a structure's name, its chain before the race, and behind it."""
FACTOR = 16
"""By which the short rung is shorter than the full one, where nothing else follows."""
SHORT, FULL = 0, 1
"""The rungs: a little training, all of it."""
MORE = 1.1
"""Times what a judged format is foreseen to give, from which on another is worth a look."""
RACE = 0.35
"""Part of the time left that the race may take."""
LEAST_TASTE_S = 20.0
CUT_S, JUDGING_S = 40.0, 60.0
"""What cutting a structure takes, and building and judging a format, before anything was measured."""
ROOM = {"size": 1.02, "speed": 1.06}
"""By how much structures are made to pass the goal: a file is foreseen better than a time."""
ENOUGH = {"size": 1.02, "speed": 1.03}
"""What of that room may be lacking in what was measured: a file has its size, a time is measured again."""
FAR = 1.1
"""How many times less than what is needed a structure may give and still be compared with the others."""
TOLD, MOST_PROCESSES = 0.04, 36
"""Half of an interval of speed, as a share of it, up to which one measurement tells structures apart; and the processes
that time at most, four times the usual ones. On a Xeon with AMX, whose calls of 0.2 ms scatter by 13 % between
processes, nine of them took a ResNet-20 of 3.04x [2.84, 3.90] for too slow, which ended at 3.9x where 3 was asked."""
MOST_FITTINGS, USUAL_FITTINGS = 3, 1.5
"""Times that a structure is judged untrained and changed."""
SLACK = 0.04
"""How far a structure may be beyond what is asked for and still be taken as it is."""
OVERHEAD, SPARE_S = 1.25, 15.0
"""Times what judging took in the study so far, and seconds: what is left for it behind the last training."""


def is_near(kind: str, left: float) -> bool:
    """Return whether a structure gives what is needed of "size" or "speed", and not much more; see `Needs`."""
    return 1 - SLACK <= left <= ENOUGH[kind]


def find_lack(left: Needs) -> float:
    """Return how many times less than what is needed a structure gives; 1 or less: it gives enough."""
    return max(left.size / ENOUGH["size"], left.speed / ENOUGH["speed"])


def gives_too_much(left: Needs) -> bool:
    """Return whether a structure is smaller and faster than what is needed, by more than `SLACK` in both."""
    return max(left.size, left.speed) < 1 - SLACK


@dataclass
class GoalEvidence:
    """What a study of a goal found out, as it is kept on disk.

    `sizes`, `speeds`: format -> times smaller, and faster, as foreseen. `base`: the format that structures end in.
    `structures`: name -> what is cut. `fitted`: depth -> the structure that has what is needed; `raced`: those
    of them that may be the best. `rough`: whether they are compared on a part of the samples; None: not decided.
    `yields`: what was learned of how size and time follow. `planned_s`: of the last training, as it was planned for the
    race. `processes`: how many time a structure; None: as many as the recipe says.
    """

    sizes: dict[str, float] = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)
    base: str = ""
    structures: dict[str, dict[str, Any]] = field(default_factory=dict)
    fitted: dict[str, str] = field(default_factory=dict)
    raced: list[str] = field(default_factory=list)
    rough: bool | None = None
    yields: Yields = field(default_factory=Yields)
    planned_s: float = 0.0
    processes: int | None = None

    @classmethod
    def read(cls, file: Path) -> GoalEvidence:
        if not file.exists():
            return cls()
        data = json.loads(file.read_text())
        yields = data["yields"]
        return cls(**{**data, "yields": Yields(**{**yields, "removed": tuple(yields.get("removed", ()))})})


def pursue(
    recipe: Recipe,
    out: Path | str,
    cache: Path | None = None,
    *,
    budget_s: float | None = None,
    jobs: int = 1,
    ray: str | None = None,
    quiet: bool = False,
) -> Study:
    """Find passes with which the recipe reaches its `goal`; see `compress.search.sweep.sweep` for what is on disk.

    Ends as soon as a bundle holds all gates, or the budget (seconds; default: an hour) is used up. Raises what `sweep`
    raises, and PlanError for a goal that no passes reach, with the nearest that they do.
    """
    deadline = time.monotonic() + (budget_s or BUDGET_S)
    log = choose_log(quiet)
    restrict_network(recipe)
    bare = recipe.model_copy(update={"goal": (), "passes": ()})
    ground = look(recipe, cache)
    formats = _list_formats(recipe, ground)
    ahead = Foresight(bare, recipe.goal_gates, ground, formats, cache, log)
    ahead.refuse_unreachable()
    first = _make_space(bare, recipe.goal_gates, formats)
    start = first.recipe_at(first.start())
    make_plan(start, cache, twins=False, log=choose_log(quiet=True))  # what is wrong is said at once
    with (
        open_study(Study, Path(out), first, recipe) as study,
        start_workers(recipe.held, jobs, ray, study.folder / LOG) as workers,
    ):
        sweep = Sweep(study, workers, cache, deadline, 0, Prior(), log, refuses=False)
        work = Pursuit(sweep, ahead)
        finish_study(study, work.run)
    return study


def look(recipe: Recipe, cache: Path | None) -> Ground:
    """Return what chains are made for: the model's facts with all that can be cut, and which sets there are."""
    asked = recipe.model_copy(update={"passes": probes(), "goal": ()})
    inputs = read_inputs(asked, cache)
    if inputs.problems:
        raise PlanError(list(inputs.problems))
    return ground_of(inputs.facts, recipe.target, list(inputs.data))


def _list_formats(recipe: Recipe, ground: Ground) -> dict[str, Passes]:
    """Return the chains without a cut: that of the recipe, if it has one, and each format alone."""
    given = [pass_.model_dump(mode="json") for pass_ in recipe.passes]
    formats = list_formats(ground)
    if not formats and not given:
        raise PlanError(f"goal: no format for {ground.target.name} takes this model; name passes, or another target")
    return ({GIVEN: given} if given else {}) | formats


def _make_space(
    recipe: Recipe, gates: tuple[Gate, ...], chains: Mapping[str, Passes], factor: int = FACTOR, rough: bool = False
) -> SearchSpace:
    """Return the recipe as one that searches among chains for what the gates bound; see `Pursuit.try_chain`."""
    search = Search(
        space={"passes": Space(choice=dict(chains))},
        goals=list_directions(gates),
        constraints=gates,
        racing=Racing(
            rungs=2, factor=min(max(factor, 2), 32), shorten=("training", "evaluation") if rough else ("training",)
        ),
    )
    return open_space(recipe.model_copy(update={"search": search}).at_root(recipe.root))


@dataclass
class Pursuit:
    """A study of a goal at work."""

    sweep: Sweep
    ahead: Foresight

    def __post_init__(self) -> None:
        self.gates, self.ground, self.formats = self.ahead.gates, self.ahead.ground, self.ahead.formats
        self.file = self.study.folder / EVIDENCE
        self.known = GoalEvidence.read(self.file)

    @property
    def study(self) -> Study:
        return self.sweep.study

    @property
    def recipe(self) -> Recipe:
        """Return the recipe of all trials, but for its passes."""
        bare, n = self.ahead.recipe, self.known.processes
        if n is None:
            return bare
        judged = bare.validate_
        timed = replace(judged, benchmark=replace(judged.benchmark, processes=n))
        return bare.model_copy(update={"validate_": timed})

    def run(self) -> str:
        """Try chains until one reaches the goal; return why there is no further one."""
        try:
            return self.try_formats() or self.try_trained()
        except OutOfTime as error:
            return str(error)

    # Formats alone

    def try_formats(self) -> str:
        """Judge the most hopeful formats; return why that is enough, "" where it is not."""
        if not self.known.sizes:
            self.known.sizes, self.known.speeds = self.ahead.foresee(self.sweep.check_time)
            self.keep()
        ordered = self.ahead.order(self.known.sizes, self.known.speeds)
        left, tried = sorted(ordered, key=lambda name: name != GIVEN), 0
        while left and tried < 3:  # formats that are judged in full
            name = left.pop(0)
            if name.endswith(CACHED) and not self.is_worth_caching(name.removesuffix(CACHED)):
                continue
            tried += 1
            run = self.try_chain(name, FULL)
            if run is None or run.state != "judged":
                continue
            if run.holds:
                return REACHED
            if why := self.explain_quality_out_of_reach(name):
                return why
            if not self.find_quality_miss(run):
                left = [other for other in left if self.gives_more(other, name)]
        self.known.base = self.choose_base()
        self.keep()
        return "" if self.known.base else "no format could be judged"

    def is_worth_caching(self, name: str) -> bool:
        """Return whether a format was judged, keeps quality and lacks speed or memory: a cache may mend it."""
        run = self.run_of(name, FULL)
        if run is None or run.state != "judged" or self.find_quality_miss(run):
            return False
        return any(gate.short for gate in run.gates if gate.metric in MEASURED and not is_size(gate.metric))

    def gives_more(self, other: str, judged: str) -> bool:
        """Return whether a format is foreseen to give more of what a judged one has too little of.

        Or is that one with a smaller cache, of which nothing is foreseen.
        """
        if other == f"{judged}{CACHED}":
            return True
        needs, known = self.read_needs(judged), self.known
        smaller = needs.size > ROOM["size"] and known.sizes[other] > MORE * known.sizes[judged]
        return smaller or (needs.speed > ROOM["speed"] and known.speeds[other] > MORE * known.speeds[judged])

    def explain_quality_out_of_reach(self, name: str) -> str:
        """Return which bound the float model itself does not keep to by its whole interval; "" where none."""
        side = self.report_of(name)["baseline"]
        for gate in self.gates:
            value = side["metrics"].get(gate.metric)
            low, high = side["intervals"].get(gate.metric) or (value, value)
            if gate.min is not None and gate.metric not in MEASURED and high is not None and high < gate.min:
                return f"{gate.metric} >= {gate.min:g} is out of reach: the float model itself has {value:.4g}"
            if gate.max is not None and gate.metric not in MEASURED and low is not None and low > gate.max:
                return f"{gate.metric} <= {gate.max:g} is out of reach: the float model itself has {value:.4g}"
        return ""

    def choose_base(self) -> str:
        """Return the judged format that structures are to end in: quality first, then what is missing of the rest."""
        names = [name for name in self.formats if name != GIVEN] or list(self.formats)
        judged = [(name, run) for name in names if (run := self.run_of(name, FULL)) and run.state == "judged"]
        ranked = sorted(judged, key=lambda pair: (self.find_quality_miss(pair[1]), self.find_measured_miss(pair[1])))
        return ranked[0][0] if ranked else ""

    # Structures that are trained

    def try_trained(self) -> str:
        """Race structures, then train the best with the time that is left; return why there is no further one."""
        if why := self.explain_untrained():
            return why
        needs = self.read_needs(self.known.base)
        self.known.processes = self.known.processes or self.count_processes()
        self.keep()
        if not needs.any:
            return self.train_whole()
        self.race(needs)
        for name in self.rank_structures():
            run = self.train_in_full(name)
            if run is not None and run.holds:
                return REACHED
        return "every structure was trained" if self.known.raced else "no structure that was cut could be judged"

    def explain_untrained(self) -> str:
        """Return why nothing can be trained; "" where it can."""
        if not self.ground.has_train:
            return "the formats alone do not reach the goal, and without data.train nothing can be trained"
        misfit = self.ground.explain_misfit([make_training(self.ground.facts.task, 1.0)])
        return f"the formats alone do not reach the goal, and {misfit}" if misfit else ""

    def count_processes(self) -> int | None:
        """Return how many processes are to time structures, by how the base's speed scattered; None: the usual ones."""
        report, gated = self.report_of(self.known.base), {gate.metric for gate in self.ahead.gates}
        ends = [ends for metric, ends in report["ratio_intervals"].items() if metric in gated and is_speed(metric)]
        half = max(((high - low) / (high + low) for low, high in ends if low and high), default=0.0)
        usual = report["benchmark"]["processes"]
        needed = min(math.ceil(usual * (half / TOLD) ** 2), MOST_PROCESSES)
        return needed if needed > usual and self.recipe.validate_.benchmark.processes is None else None

    def read_needs(self, name: str) -> Needs:
        """Return what a judged chain lacks of the goal's size and speed, with some room."""
        factors = {"size": 0.0, "speed": 0.0}
        for gate in self.report_of(name)["gates"]:
            kind = "size" if is_size(gate["metric"]) else "speed" if is_speed(gate["metric"]) else ""
            if kind and gate["value"]:
                ratio = gate["limit"] / gate["value"]
                ratio = ratio if gate["kind"].startswith("min") else 1 / ratio
                factors[kind] = max(factors[kind], ratio * ROOM[kind])
        return Needs(factors["size"], factors["speed"])

    def train_whole(self) -> str:
        """Train the whole model in the format that falls short of quality alone."""
        name = f"{self.known.base}{TRAINED}"
        if (seconds := self.seconds_to_train()) < LEAST_TASTE_S:
            raise OutOfTime(NO_TIME)
        passes = train_rounded(self.formats[self.known.base], seconds)
        if not passes or self.ground.explain_misfit(passes):
            return f"{self.known.base} falls short of quality alone, and nothing trains in it"
        run = self.try_chain(name, FULL, passes)
        return REACHED if run is not None and run.holds else f"{name} was trained"

    def race(self, needs: Needs) -> None:
        """Fit a structure to the needs for each depth; where several may be the best, train these a little."""
        taste, n = self.plan_race()
        mixtures = DEPTHS if len(self.ground.facts.removable or ()) > 1 else DEPTHS[-1:]
        last = self.seconds_left() * (1 - RACE)
        if self.known.rough is None:  # once, for what is compared is judged alike
            # Where judging is long, they are compared on a part of the samples. Of a sixteenth of 5,000 images top-1
            # was known within 3 to 5 points; a ResNet-20's structures lay 0.6 apart.
            self.known.rough = self.judging_s() > 0.1 * self.seconds_left()
        for depth in (depth for depth in map(str, mixtures) if depth not in self.known.fitted):
            if len(self.list_fitted()) >= n:
                break
            begun = self.seconds_left()
            self.known.fitted[depth] = self.fit(needs, float(depth), last)
            self.keep()
            took = begun - self.seconds_left()
            if self.list_fitted() and self.seconds_left() - took - taste < last:
                break  # the time is better spent on training what there is
        self.known.raced = self.known.raced or self.choose_racing()
        self.keep()
        for name in self.known.raced if len(self.known.raced) > 1 else ():
            self.train_a_little(name, taste)

    def list_fitted(self) -> list[str]:
        return list(dict.fromkeys(filter(None, self.known.fitted.values())))

    def choose_racing(self) -> list[str]:
        """Return the structures that may be the best: whose quality, untrained, reaches the best one's by its interval.

        Without those that are far larger or slower than what is needed, whose quality says little, unless all are.
        """
        fitted = self.list_fitted()
        near = [name for name in fitted if not self.is_far(name)] or fitted
        runs = {name: run for name in near if (run := self.run_of(f"{name}{UNTRAINED}", SHORT)) is not None}
        best = min(runs.values(), key=self.rank_key, default=None)
        return [name for name in near if best is None or self.reaches(runs[name], best)]

    def reaches(self, run: Run, best: Run) -> bool:
        """Return whether a run may be as good as another: by the better end of an interval of its quality."""
        for metric, goal in best.goals.items():
            ends = run.goals[metric].interval if metric in run.goals else None
            if metric in MEASURED or ends is None:
                continue
            if ends[1] < goal.compared if is_better_higher(metric) else ends[0] > goal.compared:
                return False
        return True

    def design(self, needs: Needs, depth: float) -> PrunedStructure | None:
        return design(self.ground, needs, depth, self.known.yields, find_numbers(self.formats[self.known.base]))

    def fit(self, needs: Needs, depth: float, last: float) -> str:
        """Judge a structure untrained, which says of size and speed what training does not change, and set it right.

        `last`: the seconds that are kept for the last training, half of them while nothing is right. Returns the
        name of the one that has what is needed, untrained the best of them; else of the nearest; "" where nothing can
        be cut so.
        """
        tried: dict[str, Needs] = {}
        structure = self.design(needs, depth)
        while structure is not None and structure.name not in tried and len(tried) < MOST_FITTINGS:
            self.known.structures[structure.name] = asdict(structure)
            self.keep()
            name, begun = f"{structure.name}{UNTRAINED}", self.seconds_left()
            passes = [*structure.passes(), *self.formats[self.known.base]]
            run = self.try_chain(name, SHORT, passes, rough=bool(self.known.rough))
            if run is None or run.state != "judged":
                break
            tried[structure.name] = left = self.read_needs(name)
            self.learn_yields(name, structure)
            if not gives_too_much(left) and self.is_beaten(run):  # changing it cuts more, and makes it no better
                break
            took = begun - self.seconds_left()
            # what lacks size or speed lacks it trained, too, and of what is cut too much no training brings all back
            is_right = find_lack(left) <= FAR and not gives_too_much(left)  # what lacks little is corrected in the end
            kept = last if is_right or self.list_fitted() else last / 2
            if self.seconds_left() - took < kept:  # another would take as long
                break
            structure = self.improve(structure, needs, depth, tried)

        def lack(name: str) -> tuple[float, ...]:
            run = self.run_of(f"{name}{UNTRAINED}", SHORT)
            assert run is not None
            return max(find_lack(tried[name]), 1.0), *self.rank_key(run)

        return min(tried, key=lack, default="")

    def improve(
        self, structure: PrunedStructure, needs: Needs, depth: float, tried: Mapping[str, Needs]
    ) -> PrunedStructure | None:
        """Return what to judge after a structure, by what it and those before it gave; None where nothing is left."""
        left, better = tried[structure.name], None
        changed = self.change(structure, f"{structure.name}{UNTRAINED}", left)
        if self.is_at_its_end(structure, tried):
            better = take_blocks(self.ground, structure, left, self.known.yields)
        elif self.may_keep_blocks(structure, needs, left):
            better = changed
        else:  # another number of blocks, by what this one gave
            better = self.put_between(self.design(needs, depth) or changed, needs, tried)
        return None if better is None or self.ground.explain_misfit(better.passes()) else better

    def is_at_its_end(self, structure: PrunedStructure, tried: Mapping[str, Needs]) -> bool:
        """Return whether a structure gave no more of what it lacks than one that asked less of its channels."""
        left = tried[structure.name]
        lacking = [kind for kind in ENOUGH if getattr(left, kind) > ENOUGH[kind]]
        others = (self.structure_of(name) for name in tried if name != structure.name)
        before = [tried[other.name] for other in others if other.asks_less(structure)]
        return any(getattr(n, kind) < LEAST_GAIN * getattr(left, kind) for n in before for kind in lacking)

    def put_between(
        self, structure: PrunedStructure, needs: Needs, tried: Mapping[str, Needs]
    ) -> PrunedStructure | None:
        """Return the structure with blocks between those that were too many and too few.

        With none between, the one that had too many with channels to do the rest; None where nothing is left to try.
        Structures whose channels do a part anyway stay as they are: no number of blocks is right or wrong for them.
        """
        if structure.keep is None or structure.speedup is not None:
            return structure
        kind = "speed" if needs.speed > LEAST_GAIN else "size"
        plain = {cut.keep: name for name in tried if (cut := self.structure_of(name)).keep and cut.speedup is None}
        lacking = {keep for keep, name in plain.items() if getattr(tried[name], kind) > ENOUGH[kind]}
        if structure.keep in plain.keys() - lacking and structure.name not in tried:
            return structure
        most = min(lacking, default=len(self.ground.facts.removable or ()))
        least = max(plain.keys() - lacking, default=0)
        if least < structure.keep < most:
            return structure
        if most - least > 1:
            return replace(structure, keep=(least + most) // 2)
        name = plain.get(most)
        return self.change(self.structure_of(name), f"{name}{UNTRAINED}", tried[name]) if name else None

    def may_keep_blocks(self, structure: PrunedStructure, needs: Needs, left: Needs) -> bool:
        """Return whether a structure's blocks give what they were chosen for, so that its channels do the rest.

        Those that share the time to go with channels are chosen anew only where both cut too much.
        """
        if structure.keep is None:
            return True
        if structure.speedup is not None:
            return not gives_too_much(left)
        return is_near("speed", left.speed) if needs.speed > LEAST_GAIN else is_near("size", left.size)

    def is_beaten(self, run: Run) -> bool:
        """Return whether a structure that is fitted already has the better quality, both untrained."""
        fitted = (self.run_of(f"{name}{UNTRAINED}", SHORT) for name in self.list_fitted())
        return any(self.rank_key(other) < self.rank_key(run) for other in fitted if other is not None)

    def plan_race(self) -> tuple[float, int]:
        """Return the seconds of training for each structure, and how many structures there is time for."""
        left = self.seconds_left()
        taste = max(0.035 * left, LEAST_TASTE_S)
        judged = 1 + USUAL_FITTINGS
        each = taste + judged * (OVERHEAD * self.judging_s() + CUT_S)
        # at most 6 are trained a little before the best is trained in full
        return taste, min(max(round(RACE * left / each), 1), 6)

    def train_a_little(self, name: str, taste: float) -> None:
        """Train a structure for a part of the time that the last training will have, and judge it."""
        if not self.known.planned_s:
            self.known.planned_s = max(self.seconds_left() * (1 - RACE), taste)
            self.keep()
        factor = max(round(self.known.planned_s / taste), 2)
        self.try_chain(name, SHORT, self.chain_of(self.structure_of(name), self.known.planned_s), factor)

    def structure_of(self, name: str) -> PrunedStructure:
        return PrunedStructure(**self.known.structures[name])

    def chain_of(self, structure: PrunedStructure, seconds: float) -> Passes:
        return [*structure.passes(), make_training(self.ground.facts.task, seconds), *self.formats[self.known.base]]

    def learn_yields(self, name: str, structure: PrunedStructure) -> None:
        """Note how time and weights followed what was cut of this structure."""
        base, left = self.read_needs(self.known.base), self.read_needs(name)
        if (self.ahead.asks_size and not left.size) or (self.ahead.asks_speed and not left.speed):
            return  # it could not be measured
        removed = max(self.known.yields.removed, list_removed(self.report_of(name)["layers"]), key=len)
        self.known.yields = replace(self.known.yields, removed=removed)
        macs, weights = count_left(self.ground.facts, structure.keep, removed)
        by_blocks, by_channels = math.log(1 / macs), math.log(structure.speedup or 1)
        yields, found = self.known.yields, dict[str, Any]()
        if self.ahead.asks_size and structure.keep is not None:
            smaller = math.log(base.size / left.size * count_cut(self.ground.facts, self.report_of(name)["layers"]))
            found["weights_by_blocks"] = smaller / math.log(1 / weights)
        if self.ahead.asks_speed and by_blocks > 2 * by_channels:
            faster = math.log(base.speed / left.speed) - yields.time_by_channels * by_channels
            found["time_by_blocks"] = faster / by_blocks
        elif self.ahead.asks_speed and by_channels:
            faster = math.log(base.speed / left.speed) - yields.time_by_blocks * by_blocks
            # Channels that lack speed and gave less may be at their end, which says nothing of those of other
            # structures. ResNet-20's, which lacked none, gave 0.41 of what they promised.
            least = 0.5 if left.speed > ENOUGH["speed"] else 0.0
            found["time_by_channels"] = max(faster / by_channels, least)
        low, high = 0.2, 1.5  # between these a measured yield is believed
        self.known.yields = replace(yields, **{key: min(max(n, low), high) for key, n in found.items()})
        self.keep()

    def rank_structures(self) -> list[str]:
        """Return the structures that were judged with a little training, the best quality first; one alone as it is."""
        if len(self.known.raced) == 1:
            return self.known.raced
        judged = {n: run for n in self.known.raced if (run := self.run_of(n, SHORT)) and run.state == "judged"}
        return sorted(judged, key=lambda name: self.rank_key(judged[name]))

    def is_far(self, name: str) -> bool:
        """Return whether a fitted structure is far larger or slower than what is needed."""
        left = self.read_needs(f"{name}{UNTRAINED}")
        return max(left.size, left.speed) > FAR

    def rank_key(self, run: Run) -> tuple[float, ...]:
        """Return what a run is ranked by: by how much quality falls short, then quality itself."""
        goals = [(metric, goal) for metric, goal in run.goals.items() if metric not in MEASURED]
        return self.find_quality_miss(run), *(-g.value if is_better_higher(metric) else g.value for metric, g in goals)

    def change(self, structure: PrunedStructure, name: str, left: Needs) -> PrunedStructure:
        """Return the structure with other numbers, where what the chain of that name has left is not near enough to 1.

        That is: what is needed, over what was measured.
        """
        speedup, params = structure.speedup, structure.max_params
        if self.ahead.asks_speed and not is_near("speed", left.speed):
            wanted = (speedup or 1.0) * left.speed ** (1 / self.known.yields.time_by_channels)
            speedup = round(wanted, 3) if wanted > LEAST_GAIN else None
        if self.ahead.asks_size and (speedup != structure.speedup or not is_near("size", left.size)):
            share = count_cut(self.ground.facts, self.report_of(name)["layers"]) / left.size
            params = max(round(share, 3), 0.001) if share < 1 / LEAST_GAIN else None
        return replace(structure, speedup=speedup, max_params=params)

    def train_in_full(self, raced: str) -> Run | None:
        """Train a structure that was raced with the time that is left, and judge it in full; untrained without time."""
        structure = self.correct(raced)
        name = f"{structure.name}{TRAINED}"
        if name in self.chains:
            return self.try_chain(name, FULL)
        if structure != self.structure_of(raced):
            self.cut_first(structure)
        seconds = self.seconds_to_train()
        if seconds >= LEAST_TASTE_S:
            return self.try_chain(name, FULL, self.chain_of(structure, seconds))
        if self.seconds_left() < self.judging_s():
            raise OutOfTime(NO_TIME)
        return self.try_chain(f"{raced}{UNTRAINED}", FULL)

    def cut_first(self, structure: PrunedStructure) -> None:
        """Cut a structure that was not judged untrained, so that what is left is known when it is to be trained.

        To cut channels by speed their layers are timed at many widths. Of goal.py's drawn-0 that took 224 s of 1,200,
        and the time was over before what it had trained was judged.
        """
        chains = {structure.name: self.chain_of(structure, LEAST_TASTE_S)}
        recipe = _make_space(self.recipe, self.gates, chains).recipe_at({"passes": structure.name})
        self.sweep.run_first(recipe, len(structure.passes()))

    def correct(self, raced: str) -> PrunedStructure:
        """Return a structure with what it lacked when it was measured, untrained and in the race, taken together.

        There may have been no time to judge it once more.
        """
        structure, names = self.structure_of(raced), (f"{raced}{UNTRAINED}", raced)
        measured = {name: self.read_needs(name) for name in names if self.run_of(name, SHORT)}
        name = list(measured)[-1]
        speed = math.prod(left.speed for left in measured.values()) ** (1 / len(measured))
        left = Needs(measured[name].size, speed)
        if find_lack(left) <= 1:
            return structure
        better = self.change(structure, name, Needs(min(left.size, FAR), min(left.speed, FAR)))
        return structure if self.ground.explain_misfit(better.passes()) else better

    def seconds_to_train(self) -> float:
        """Return the seconds that training may take, so that what follows it has its time."""
        return self.seconds_left() - OVERHEAD * self.judging_s() - SPARE_S

    def seconds_left(self) -> float:
        assert self.sweep.deadline is not None
        return max(self.sweep.deadline - time.monotonic(), 0.0)

    def judging_s(self) -> float:
        """Return what building and judging a format alone took."""
        runs = [run for name in self.formats if name != GIVEN and (run := self.run_of(name, FULL)) is not None]
        return max((run.seconds for run in runs), default=JUDGING_S)

    # One trial

    def try_chain(
        self, name: str, rung: int, passes: Passes | None = None, factor: int = 0, rough: bool = False
    ) -> Run | None:
        """Build and judge the chain of that name on a rung, unless that is done; return its run, None without one.

        `factor`: by which the short rung is shorter; `rough`: in evaluation, too, for all but quality.
        """
        self.sweep.check_time()
        if passes is not None and name not in self.chains:
            self.study.extend(self.space_of({**self.chains, name: passes}, factor, rough))
        trial = self.study.open_trial({"passes": name})
        if trial.run_at(rung) is None:
            self.sweep.try_all([trial], rung)
        return self.study.find(trial.number).run_at(rung)

    @property
    def chains(self) -> dict[str, Passes]:
        """Return the chains of the study's space so far."""
        choice = self.study.space.search.space["passes"].options
        return {name: [dict(given) for given in passes] for name, passes in choice.items()}

    def space_of(self, chains: Mapping[str, Passes], factor: int = 0, rough: bool = False) -> SearchSpace:
        return _make_space(self.recipe, self.gates, chains, factor or FACTOR, rough)

    def run_of(self, name: str, rung: int) -> Run | None:
        trial = self.find_trial(name)
        return None if trial is None else trial.run_at(rung)

    def find_trial(self, name: str) -> Trial | None:
        return next((trial for trial in self.study.trials if trial.point["passes"] == name), None)

    def report_of(self, name: str) -> Any:
        """Return the last report of a chain that was judged, as JSON values."""
        trial = self.find_trial(name)
        assert trial is not None
        files = [f"{name_trial(trial)}.json", f"{name_trial(trial)}.{SHORT}.json"]
        file = next(f for each in files if (f := self.study.folder / REPORTS / each).exists())
        return json.loads(file.read_text())

    def find_quality_miss(self, run: Run) -> float:
        """Return by how much the gates on quality are missed by their values."""
        return sum(gate.short for gate in run.gates if gate.metric not in MEASURED)

    def find_measured_miss(self, run: Run) -> float:
        return sum(gate.short for gate in run.gates if gate.metric in MEASURED)

    def keep(self) -> None:
        write_json(self.file, asdict(self.known))
