"""Claims about passes beside other programs: threads wait for one another as `compress` has them wait.

Channels are removed from the digits CNN and it is distilled (recipes/prune-distill-int8.yaml), and a random Llama of
two layers is rounded by `gptq`; on all cores, alone and beside as many spinning processes as half of them; with
libgomp's own way to wait and with that of `compress`, in turns. Beside the others ours takes at most 0.6 of the time
that a pass takes with libgomp's, alone at most 1.05 (medians of the rounds' ratios).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from common import ROOT, Call, Claim, Measured, Row, apply_recipe, at_most, pass_seconds, run_script
from random_models import make_work

from compress.commands.endings import WAITED, WAITS

NEEDS = ()
SPIN = "while True: pass"
LAYERS, ROUNDS = 2, 3
LIBGOMP = "300000"
"""What libgomp takes where nothing is set: GOMP_SPINCOUNT in its manual."""
WAYS = {"libgomp": LIBGOMP, "compress": WAITED}
BARS = {"alone": 1.05, "beside others": 0.6}


def measure(call: Call) -> Measured:
    digits = (ROOT / "recipes/prune-distill-int8.yaml", ("passes.1.epochs=3",))
    subjects = {"distill": digits, "gptq": (make_work(call.out / "work", LAYERS, call).recipe, ())}
    rows: list[Row] = []
    claims: list[Claim] = []
    for kind in call.choose(subjects, quick=len(subjects)):
        for around, n_others in (("alone", 0), ("beside others", max((os.cpu_count() or 1) // 2, 1))):
            with spinning(n_others):
                found = [take_turns(n, kind, *subjects[kind], call) for n in range(1 if call.quick else ROUNDS)]
            rows += [{"pass": kind, "around": around, **seconds} for seconds in found]
            ratio = float(np.median([seconds["compress"] / seconds["libgomp"] for seconds in found]))
            claims.append(at_most(f"{kind}, {around}: time over libgomp's", ratio, BARS[around]))
    return claims, rows


@contextmanager
def spinning(n: int) -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(n)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def take_turns(number: int, kind: str, recipe: Path, sets: tuple[str, ...], call: Call) -> dict[str, float]:
    """Seconds of the pass with each way to wait, the other one first in every second round; nothing is known before."""
    seconds = {}
    for way, turns in list(WAYS.items())[:: -1 if number % 2 else 1]:
        place = call.out / f"{kind}-{len(list(call.out.iterdir()))}"
        apply_recipe(recipe, sets, place, call.out / f"{place.name}-cache", {**os.environ, WAITS: turns})
        seconds[way] = pass_seconds(place, (kind,)) or np.nan
    return seconds


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
