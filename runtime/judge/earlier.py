"""Hold a judgement against an earlier one: a regression beyond noise fails it (`--baseline`).

What counts: the metrics of the gates, all that are measured against labels or texts, size, and the medians of speed.
Without any quality among these all quality counts. Nearness to the float model alone, which moves with every build,
does not count beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from runtime.bundle.manifest import Judgement
from runtime.errors import UsageError
from runtime.judge.evidence import list_wanted_metrics
from runtime.judge.findings import Side
from runtime.judge.pairing import compare_reports, find_incomparable
from runtime.metrics import MEASURED
from runtime.metrics.base import Columns
from runtime.report.report import Report
from runtime.report.samples import EvaluatedOn
from runtime.report.stored import StoredReport
from runtime.tasks.metrics import METRICS, is_own

MEDIANS = ("latency_p50", "throughput", "ttft", "tpot")


def check_earlier(
    earlier: StoredReport, name: str, task: str, judgement: Judgement, samples: str | None = None
) -> None:
    """Refuse, before anything runs, an earlier report that says nothing of what will be judged.

    `samples`: the digest of the evaluation set; None where it is not loaded yet. Raises UsageError with every problem.
    """
    evaluation = earlier.report.evaluation if samples is None else EvaluatedOn(samples)
    nothing = Side()
    now = StoredReport(name, Report("unjudged", name, "", nothing, nothing, task=task, evaluation=evaluation))
    problems, then = find_incomparable(earlier, now), earlier.report.candidate.metrics
    problems += [
        f"gate on '{gate.metric}': {earlier.name} has no value of it, so that no regression could be seen; judge that "
        "bundle anew with this gate, or leave --baseline out"
        for gate in judgement.gates
        if gate.metric not in MEASURED and gate.metric not in then
    ]
    wanted = list_wanted_metrics(judgement)
    problems += [
        f"{earlier.name} has {metric}, which this judgement leaves out (validate.metrics): name it there, or a "
        "regression of it would go unseen"
        for metric in then
        if wanted is not None and metric not in wanted and _is_of_the_task(metric)
    ]
    if problems:
        raise UsageError([f"--baseline: {problem}" for problem in problems])


def hold_against(earlier: StoredReport, report: Report, columns: Mapping[str, Columns], judgement: Judgement) -> Report:
    """Return the report with its differences from the earlier one; its verdict is "fail" where one is a regression.

    `columns`: of each quality metric, what the report was computed from.
    """
    now = StoredReport(report.bundle, report, columns)
    (since,) = compare_reports([earlier, now], choose_watched(now, judgement))
    return replace(report, since=since, verdict="fail" if since.find("worse") else report.verdict)


def choose_watched(now: StoredReport, judgement: Judgement) -> set[str]:
    """Return the names of the metrics whose regression counts."""
    gated = {gate.metric for gate in judgement.gates}
    quality = now.report.candidate.metrics
    watched = {name for name in quality if name in gated or _is_of_the_task(name)}
    return (watched or set(quality)) | (gated - quality.keys()) | {"size", *MEDIANS}


def _is_of_the_task(metric: str) -> bool:
    return is_own(metric) or (metric in METRICS and METRICS[metric].against != "baseline")
