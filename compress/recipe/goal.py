"""`goal:`, what a recipe is to reach, in words: "size >= 6x, latency_p50 >= 3.5x, top1 drop <= 0.013". No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runtime.bundle.format import Gate
from runtime.metrics import MEASURED
from runtime.tasks.metrics import METRICS, is_own
from runtime.words import did_you_mean

TERM = re.compile(
    r"(?P<metric>\S+)(?:\s+(?P<word>[a-z]+))?\s*(?P<sign>>=|<=)\s*(?P<number>[0-9.eE+-]+)\s*(?P<unit>\S*)"
)
FORMS = "size >= 6x, size <= 2MB, latency_p50 >= 3.5x, latency_p50 <= 2ms, top1 drop <= 0.01, top1 >= 0.9"
WORSE = {True: "drop", False: "rise"}
"""How a metric gets worse, by whether higher is better."""
BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SIZE, SIZE_RATIO = "size", "size_ratio"


def split_goal(text: str) -> list[str]:
    """Return the terms of a goal, which commas, semicolons or "and" part."""
    return [term.strip() for term in re.split(r",|;|\band\b", text) if term.strip()]


def read_goals(terms: Sequence[str]) -> tuple[Gate, ...]:
    """Return the gates that the terms of a goal stand for. Raises ValueError, which names a wrong term and its rule."""
    gates = tuple(map(read_term, terms))
    named = [(gate.metric, rule) for gate in gates for rule in gate.bounds]
    if twice := next((metric for metric, rule in named if named.count((metric, rule)) > 1), None):
        raise ValueError(f"'{twice}' is bounded twice; keep one of them")
    return gates


def read_term(term: str) -> Gate:
    """Return the gate of one term, such as "size >= 6x". Raises ValueError with the term and the forms there are."""
    found = TERM.fullmatch(term.strip())
    if found is None:
        raise ValueError(f"'{term}' is no goal; write a metric, >= or <=, and a number: {FORMS}")
    metric, word, sign, unit = found["metric"], found["word"] or "", found["sign"], found["unit"]
    _check_metric(metric, term)
    try:
        number = float(found["number"])
    except ValueError as error:
        raise ValueError(f"'{term}': '{found['number']}' is no number") from error
    if word:
        return _read_change(term, metric, word, sign, number, unit)
    if unit == "x":
        return _read_ratio(term, metric, sign, number)
    return _read_value(term, metric, sign, number * _read_unit(term, metric, unit))


def _check_metric(metric: str, term: str) -> None:
    known = [*METRICS, *MEASURED]
    if metric in known or is_own(metric):
        return
    raise ValueError(f"'{term}': there is no metric '{metric}'{did_you_mean(metric, known)}")


def is_better_higher(metric: str) -> bool | None:
    """Return whether more of a metric is better; None of a recipe's own, which says so when it is computed."""
    if metric in MEASURED:
        return MEASURED[metric].higher_is_better
    return METRICS[metric].higher_is_better if metric in METRICS else None


def _read_change(term: str, metric: str, word: str, sign: str, number: float, unit: str) -> Gate:
    """Read "top1 drop <= 0.01", "nats rise <= 0.05", "top1 retained >= 0.99"."""
    if unit:
        raise ValueError(f"'{term}': a number in the metric's own unit stands here: drop '{unit}'")
    if word == "retained" and sign == ">=":
        return Gate(metric, min_retained=number)
    higher = is_better_higher(metric)
    fit = [WORSE[higher]] if higher is not None else list(WORSE.values())
    if word not in fit or sign != "<=":
        raise ValueError(f"'{term}': write {metric} {fit[0]} <= {number:g}, or {metric} retained >= 0.99")
    return Gate(metric, max_drop=number)


def _read_ratio(term: str, metric: str, sign: str, number: float) -> Gate:
    """Read "size >= 6x": so many times better than the float model, whatever the metric."""
    if metric not in MEASURED or sign != ">=":
        way = f"{metric} >= {number:g}x" if metric in MEASURED else f"{metric} retained >= 0.99"
        raise ValueError(f"'{term}': x is how many times better a time, size or memory is; write {way}")
    if metric in (SIZE, SIZE_RATIO):
        return Gate(SIZE_RATIO, min=number)
    return Gate(metric, min_speedup=number) if MEASURED[metric].speed else Gate(metric, min_retained=number)


def _read_value(term: str, metric: str, sign: str, number: float) -> Gate:
    higher = is_better_higher(metric)
    if higher is not None and (sign == ">=") != higher:
        better, right = ("higher", ">=") if higher else ("lower", "<=")
        times = f", or {metric} >= {number:g}x" if metric in MEASURED and sign == ">=" else ""
        raise ValueError(f"'{term}': {better} {metric} is better; write {metric} {right} {number:g}{times}")
    return Gate(metric, min=number) if sign == ">=" else Gate(metric, max=number)


def _read_unit(term: str, metric: str, unit: str) -> float:
    """Return by what a number is multiplied for its unit, which the metric must have."""
    own = MEASURED[metric].unit if metric in MEASURED else ""
    if unit in ("", own):
        return 1.0
    if own == "bytes" and unit in BYTES:
        return float(BYTES[unit])
    fit = f"B, {', '.join(list(BYTES)[1:])}" if own == "bytes" else own or "none"
    raise ValueError(f"'{term}': {metric} has no unit '{unit}'; its own: {fit}")


def list_directions(gates: Sequence[Gate]) -> tuple[str, ...]:
    """Return what a search for these gates looks for, as `search.goals` words it: each metric once, the best of it."""
    metrics = dict.fromkeys(SIZE if gate.metric == SIZE_RATIO else gate.metric for gate in gates)
    return tuple(f"{'maximize' if is_better_higher(metric) else 'minimize'} {metric}" for metric in metrics)
