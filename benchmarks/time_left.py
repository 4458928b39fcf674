"""How true the remaining times are that a run's log tells: "gptq, blocks 8 of 26: 60 s so far, about 122 s left".

A reading is right within a quarter of what was then left of its stage. Those of a stage's first fifth are left out,
and what was told in its last second. Scripts whose runs last minutes claim that nine of ten are right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from common import Claim, at_least

READING = re.compile(r"^ *([\d.]+)s  (.+): (\d+) s so far, about (\d+) s left$", re.MULTILINE)
END = re.compile(r"^ *([\d.]+)s  (.+): ([\d.]+) s$", re.MULTILINE)
FIRST, NEAR, RIGHT = 0.2, 0.25, 0.9


def list_readings(log: Path) -> Iterator[tuple[float, float]]:
    """Yield (told, true) seconds left of each reading of a log that counts."""
    text = log.read_text(encoding="utf-8")
    ends = [(float(end), name, float(took)) for end, name, took in END.findall(text)]
    for time, place, passed, told in READING.findall(text):
        now, begun = float(time), float(time) - float(passed)
        stages = [e for e in ends if place.startswith(e[1]) and e[0] >= now + 1 and abs(e[0] - e[2] - begun) <= 1]
        for end, _, took in stages[:1]:
            if float(passed) >= FIRST * took:
                yield float(told), end - now


def claim_readings(name: str, logs: Iterable[Path]) -> list[Claim]:
    """Return the claim of all readings of these logs; none where no stage lasts long enough to tell any."""
    readings = [reading for log in logs for reading in list_readings(log)]
    right = sum(abs(told - true) <= NEAR * true for told, true in readings)
    return [at_least(f"{name}: remaining times that are right", right / len(readings), RIGHT)] if readings else []
