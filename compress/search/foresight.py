"""What formats are foreseen to give before anything is built, and which goals no passes reach.

Sizes follow from the plan; times are measured on models made like those that the passes would leave.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from compress.errors import CompressError, PlanError
from compress.planning.make_plan import make_plan
from compress.planning.timing import explain_untimed
from compress.planning.usual import parse_pass
from compress.recipe.goal import SIZE, SIZE_RATIO
from compress.recipe.schema import Recipe
from compress.search.chains import CACHED, Ground, Passes, find_least_bytes, find_smallest, foresee_size
from compress.store.run_log import choose_log
from runtime.bundle.format import Gate
from runtime.metrics import MEASURED


def is_size(metric: str) -> bool:
    return metric in (SIZE, SIZE_RATIO)


def is_speed(metric: str) -> bool:
    return metric in MEASURED and MEASURED[metric].speed and metric != "load_time"


@dataclass(frozen=True)
class Foresight:
    """A goal before the first trial. `recipe`: without passes and goal. `formats`: the chains without a cut."""

    recipe: Recipe
    gates: tuple[Gate, ...]
    ground: Ground
    formats: Mapping[str, Passes]
    cache: Path | None
    log: Callable[[str], None]

    @property
    def asks_speed(self) -> bool:
        return any(is_speed(gate.metric) for gate in self.gates)

    @property
    def asks_size(self) -> bool:
        return any(is_size(gate.metric) for gate in self.gates)

    def refuse_unreachable(self) -> None:
        """Raise PlanError for a goal on size that no passes reach, and for one on time where nothing can be timed."""
        sizes = [gate for gate in self.gates if is_size(gate.metric)]
        problems = [text for gate in sizes if (text := self.explain_size_out_of_reach(gate))]
        for gate in self.gates:
            timed = gate.metric in MEASURED and MEASURED[gate.metric].speed
            if timed and (why := explain_untimed(self.recipe, layers=False)):
                problems.append(f"goal: {gate.metric} cannot be measured: {why}; choose a target that runs here")
        if problems:
            raise PlanError(problems)

    def explain_size_out_of_reach(self, gate: Gate) -> str:
        """Return what the least is that passes leave of the weights, where a gate asks for less; "" where not."""
        wanted, before = self.read_wanted(gate), self.ground.facts.n_bytes
        least, chain = find_least_bytes(self.ground, self.formats)
        if wanted is None or before / least >= wanted:
            return ""
        how = ", ".join(str(given["kind"]) for given in chain) or "nothing"
        asked = f"size >= {gate.min:g}x" if gate.metric == SIZE_RATIO else f"size <= {gate.max:g} bytes"
        reach = f"{before / least:.3g}x" if gate.metric == SIZE_RATIO else f"{least:g} bytes"
        way = "" if self.ground.has_train else "; with data.train the structure could be cut, too"
        return f"goal: {asked} is out of reach: the least that passes leave of the weights is {reach} ({how}){way}"

    def read_wanted(self, gate: Gate) -> float | None:
        """Return how many times better than the float model a gate asks for; None where only a judgement tells."""
        if gate.metric == SIZE:
            return self.ground.facts.n_bytes / gate.max if gate.max else None
        return gate.min if gate.metric == SIZE_RATIO else gate.min_speedup

    def foresee(self, check_time: Callable[[], None]) -> tuple[dict[str, float], ...]:
        """Return how many times smaller, and how many times faster, each format is foreseen to make the model.

        Of formats that are too large beside others that are small enough no speed is foreseen, which of a model of half
        a billion parameters takes 40 s each: 1. Raises PlanError where even the smallest structure would not be fast
        enough, and what `check_time` raises.
        """
        sizes = {name: foresee_size(self.ground, passes) for name, passes in self.formats.items()}
        large = {name for name, ratio in sizes.items() if round(self._miss(is_size, ratio), 1)}
        speeds: dict[str, float] = {}
        same: dict[str, float] = {}  # what comes before a format prepares for it, and changes no speed
        for name, passes in self.formats.items():
            if name in large and len(large) < len(sizes):
                speeds[name] = 1.0
                self.log(f"{name}: {sizes[name]:.2f}x smaller, foreseen")
                continue
            if name.endswith(CACHED):  # what a smaller cache gives is told by a judgement alone
                speeds[name] = speeds[name.removesuffix(CACHED)]
                continue
            last = json.dumps(passes[-1], sort_keys=True)
            speeds[name] = same[last] = same.get(last) or self.foresee_speed(passes)
            self.log(f"{name}: {sizes[name]:.2f}x smaller, {speeds[name]:.2f}x as fast, foreseen")
            check_time()
        self.refuse_too_fast(speeds)
        return sizes, speeds

    def foresee_speed(self, passes: Passes) -> float:
        """Return how many times faster the passes are foreseen to make the model; 1 where that cannot be told."""
        if not self.asks_speed:
            return 1.0
        recipe = self.recipe.model_copy(update={"passes": tuple(map(parse_pass, passes))})
        try:
            plan = make_plan(recipe, self.cache, log=choose_log(quiet=True))
        except CompressError as error:
            self.log(f"not foreseen: {error}")
            return 1.0
        return plan.latency.speedup if plan.latency is not None else 1.0

    def refuse_too_fast(self, speeds: Mapping[str, float]) -> None:
        """Raise PlanError for a speed that even the smallest structure does not come near."""
        wanted = max((gate.min_speedup or 0 for gate in self.gates if is_speed(gate.metric)), default=0)
        name = max(speeds, key=speeds.__getitem__)
        best = speeds[name]
        if best >= wanted:
            return
        smallest = find_smallest(self.ground) if self.ground.has_train else []
        if smallest:
            best = max(best, self.foresee_speed([*smallest, *self.formats[name]]))
        if best < wanted:
            how = "the smallest structure" if smallest else "the fastest format"
            raise PlanError(
                f"goal: {wanted:g}x as fast is out of reach: {how} that passes leave here, in {name}, is {best:.3g}x"
            )

    def order(self, sizes: Mapping[str, float], speeds: Mapping[str, float]) -> list[str]:
        """Return the formats from the most hopeful on: the least that is foreseen to be missing, then most bits."""

        def miss(name: str) -> tuple[float, float]:
            return round(self._miss(is_size, sizes[name]) + self._miss(is_speed, speeds[name]), 1), sizes[name]

        return sorted(self.formats, key=miss)

    def _miss(self, asks: Callable[[str], bool], ratio: float) -> float:
        """Return the logarithm of what gates lack where the model becomes so many times smaller, or faster; 0: nothing.

        `asks`: which gates, by their metric.
        """
        wanted = [self.read_wanted(gate) for gate in self.gates if asks(gate.metric)]
        return sum(max(math.log(each / ratio), 0.0) for each in wanted if each is not None)
