"""Claims about the time of `gptq`, in a recipe of its own, like recipes/claims/tinystories-w4-gptq.yaml.

A random Llama of 4 layers (hidden 1024, feed-forward 2816, 16 heads, 32,000 tokens), 4 bits in groups of 128, 32
samples of 512 tokens, float32, two threads: ours takes at most half of llm-compressor's time, both in turns in one run
(median of the rounds' ratios), and the mean relative error of a layer's outputs on held-out tokens is no larger.
Timed are the pass of `compress apply`, which reads the weights from the folder and writes the rounded ones, and
llm-compressor's oneshot on a model in memory; no imports. A round whose two loads differ much compares nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from common import Call, Claim, Measured, Row, RunError, at_most, run_script, say
from random_models import Done, Work, layer_error, make_work, ours, theirs

NEEDS = ()
LAYERS = 4
ROUNDS = 3
TIME_BAR = 0.5


def measure(call: Call) -> Measured:
    work = make_work(call.out / "work", LAYERS, call)
    rows: list[Row] = []
    for number in range(1 if call.quick else ROUNDS):
        rows += turn(work, number, call)
    return claims(rows), rows


def turn(work: Work, number: int, call: Call) -> list[Row]:
    """Each once; the one that begins changes from round to round. A peer that fails has a row with the reason."""
    makers = [("ours", ours)] if call.ours else [("ours", ours), ("llm-compressor", theirs)]
    rows = []
    for name, make in makers[:: -1 if number % 2 else 1]:
        row: Row = {"model": name, "round": number, "load_before": os.getloadavg()[0]}
        try:
            done: Done = make(work, f"{name}-{number}", call)
        except RunError as error:
            if name == "ours":
                raise
            say(f"{name}: {error}")
            rows.append(row | {"failed": str(error)})
            continue
        row |= {"seconds": done.seconds, "peak_mib": done.peak_bytes / 2**20}
        rows.append(row | {"layer_error": layer_error(work, done)} if number == 0 else row)
    return rows


def claims(rows: Sequence[Row]) -> list[Claim]:
    """None where the peer did not run, or one of the times is missing."""
    own, other = ({row["round"]: row for row in rows if row["model"] == name} for name in ("ours", "llm-compressor"))
    times = [(own[i].get("seconds"), other[i].get("seconds")) for i in own if i in other]
    complete = bool(times) and all(a is not None and b is not None for a, b in times)
    ratio = float(np.median([a / b for a, b in times])) if complete else None  # type: ignore[operator]
    errors: list[Any] = [side.get(0, {}).get("layer_error") for side in (own, other)]
    return [
        at_most("gptq_time_ratio", ratio, TIME_BAR),
        at_most("gptq_layer_error_ratio", None if None in errors else errors[0] / errors[1], 1.0),
    ]


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
