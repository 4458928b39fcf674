"""Which module of the student learns from which of the teacher's: by pairs, by name, or evenly spread. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

from compress.errors import PassError

Pairs = tuple[tuple[str, str], ...]
"""(student's module, teacher's module)."""
LayerMap = str | Pairs
"""Pairs, "uniform", or `re:` and a regular expression."""
UNIFORM, REGEX = "uniform", "re:"


def pair_modules(
    kind: str,
    wanted: LayerMap,
    student: Sequence[str],
    teacher: Sequence[str],
    blocks: tuple[Sequence[str], Sequence[str]],
) -> Pairs:
    """Return the pairs that `wanted` means. `student`, `teacher`: names of all modules; `blocks`: of both, in order.

    `kind`: the pass that asks, for messages. `re:`: every module of the student that matches, and the teacher's of the
    same name. PassError: a module that is not there, or nothing to pair.
    """
    if not isinstance(wanted, str):
        pairs = wanted
    elif wanted == UNIFORM:
        pairs = uniform(*blocks)
    else:
        pairs = tuple((name, name) for name in student if re.match(wanted.removeprefix(REGEX), name))
    if not pairs:
        where = "no chain of blocks was found" if wanted == UNIFORM else f"{wanted!r} matches no module"
        raise PassError(f"{kind}: {where}; name the pairs, such as layers: [[student, teacher]]")
    problems = [text for name, _ in pairs if (text := missing(name, student, "student"))]
    problems += [text for _, name in pairs if (text := missing(name, teacher, "teacher"))]
    if problems:
        raise PassError([f"{kind}: {text}" for text in problems])
    return pairs


def uniform(student: Sequence[str], teacher: Sequence[str]) -> Pairs:
    """Pair the n-th of N student's blocks with the (n M / N)-th of M teacher's, counted from 1 (TinyBERT, 4.1)."""
    n, m = len(student), len(teacher)
    return tuple((name, teacher[max(round((i + 1) * m / n) - 1, 0)]) for i, name in enumerate(student)) if m else ()


def missing(name: str, known: Sequence[str], whose: str) -> str | None:
    """Return a sentence if the model has no module of that name, or None."""
    if name in known:
        return None
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean '{near[0]}'?" if near else f"; it has {', '.join(known[1:4])}, ..."
    return f"the {whose} has no module '{name}'{hint}"
