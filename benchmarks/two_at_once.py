"""Claims about two builds at once: threads wait for one another as `compress` has them wait.

Channels are removed from the digits CNN and it is distilled (recipes/prune-distill-int8.yaml), and a random Llama of
two layers is rounded by `gptq`; on all cores, one build alone and two of them at once, with libgomp's own way to wait
and with that of `compress`, in turns. Of two at once a pass takes at most 0.9 of the time that it takes with libgomp's
way; alone at most 1.1 of it (medians of the rounds' ratios).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from common import ROOT, Call, Claim, Measured, Row, apply_recipe, at_most, pass_seconds, run_script
from random_models import make_work

from compress.commands.endings import SPIN_KEY, SPINS

NEEDS = ()
NOT_JUDGED = "validate={benchmark: {processes: 1, iterations: 1}}"
LAYERS, ROUNDS = 2, 3
LIBGOMP = "300000"
"""What libgomp takes where nothing is set: GOMP_SPINCOUNT in its manual."""
WAYS = {"libgomp": LIBGOMP, "compress": SPINS}
BARS = {1: 1.1, 2: 0.9}
"""Builds at once -> the most of libgomp's time that ours may take."""


def measure(call: Call) -> Measured:
    digits = (ROOT / "recipes/prune-distill-int8.yaml", (NOT_JUDGED,))
    subjects = {"distill": digits, "gptq": (make_work(call.out / "work", LAYERS, call).recipe, ())}
    rows: list[Row] = []
    claims: list[Claim] = []
    for kind in call.choose(subjects, quick=len(subjects)):
        for n_builds, bar in BARS.items():
            n_rounds = 1 if call.quick else ROUNDS
            found = [take_turns(number, n_builds, kind, *subjects[kind], call) for number in range(n_rounds)]
            rows += [{"pass": kind, "builds": n_builds, **seconds} for seconds in found]
            ratio = float(np.median([seconds["compress"] / seconds["libgomp"] for seconds in found]))
            claims.append(at_most(f"{kind}, builds at once {n_builds}: time over libgomp's", ratio, bar))
    return claims, rows


def take_turns(
    number: int, n_builds: int, kind: str, recipe: Path, sets: tuple[str, ...], call: Call
) -> dict[str, float]:
    """Mean seconds of the pass with each way to wait, the other one first in every second round."""
    seconds = {}
    for way, turns in list(WAYS.items())[:: -1 if number % 2 else 1]:

        def build(which: int, way: str = way, turns: str = turns) -> float:
            place = call.out / f"{kind}-{n_builds}-{number}-{way}-{which}"
            apply_recipe(recipe, sets, place, place.with_name(f"{place.name}-cache"), {**os.environ, SPIN_KEY: turns})
            return pass_seconds(place, (kind,)) or np.nan

        with ThreadPoolExecutor(n_builds) as pool:
            seconds[way] = float(np.mean(list(pool.map(build, range(n_builds)))))
    return seconds


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
