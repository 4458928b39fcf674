"""Judge a bundle and write report.json, .md and .xml into it; also against an earlier judgement (`--baseline`).

A regression beyond noise fails it. What counts: the metrics of the gates, all that are measured against labels or
texts, size, and the medians of speed. Without any quality among these all quality counts. Nearness to the float model
alone, which moves with every build, does not count beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from runtime.bundle.files import name_file
from runtime.bundle.manifest import Judgement
from runtime.errors import RuntimeFailure, UsageError
from runtime.judge.bundle import judge_model, judge_scored, judge_size, prepare
from runtime.judge.evidence import list_wanted_metrics
from runtime.judge.findings import Case, Side
from runtime.judge.passes import PassModel, write_pass_table
from runtime.judge.samples import EvaluatedOn, keep_samples
from runtime.metrics import MEASURED, Outputs
from runtime.metrics.base import Columns
from runtime.progress import Progress, no_progress
from runtime.report.pairing import compare_reports, find_incomparable
from runtime.report.report import Report, prepare_folder, write_report
from runtime.report.stored import StoredReport
from runtime.tasks.metrics import METRICS, is_own

MEDIANS = ("latency_p50", "throughput", "ttft", "tpot")


def validate(
    path: str | Path,
    backends: Sequence[str] | None = None,
    threads: int | None = None,
    passes: Sequence[PassModel] = (),
    report_folder: Path | None = None,
    notes: Sequence[str] = (),
    earlier: StoredReport | None = None,
    forecast: float | None = None,
    progress: Progress = no_progress,
    outputs: Outputs | None = None,
    undecided: Literal["fail", "pass"] | None = None,
) -> Report:
    """Verify the bundle, run it on its frozen samples, time it, decide its gates, and write the report into it.

    `backends`: the first is the one that is judged, the others are compared; by default the bundle's target, compared
    with all that work here. `threads` replaces the benchmark's. `passes`: what each pass of a build left,
    to be measured with the candidate and recorded in the bundle; without them the report shows what was recorded.
    `report_folder`: where the report goes instead, for a bundle that cannot be written. `notes`: what a build found on
    this machine, for the report. `earlier`: a report that this one is held against (`check_earlier`).
    `forecast`: how many times as fast as the baseline the plan expected it to be; where it is less, or no faster at
    all, both models are profiled and the report says why. `progress` is told how far timing is. `outputs`: what the
    candidate gave on these samples a moment ago, so that it is timed and not run again. `undecided`: what gates that do
    not say it themselves count as where they are undecided, in the place of the bundle's own word.
    A candidate that gives NaN or infinity gets the verdict "fail". Raises BundleError (not intact), UsageError (a gate
    that cannot be judged, labels out of range), RuntimeFailure.
    """
    with name_file(Path(path)):
        case = prepare(Path(path), backends, threads)
        case = replace(case, notes=[*case.notes, *notes], outputs=outputs)
        if undecided is not None:
            judgement = replace(case.manifest.judgement, undecided=undecided)
            case = replace(case, manifest=replace(case.manifest, judgement=judgement))
        if earlier is not None:
            manifest = case.manifest
            samples = None if manifest.evaluation is None else manifest.evaluation.digest
            check_earlier(earlier, str(path), manifest.task, manifest.judgement, samples)
    folder = case.root if report_folder is None else report_folder
    case = replace(case, notes=[*case.notes, *prepare_folder(folder)])
    with name_file(case.root), name_batches(case):
        if case.manifest.evaluation is None:
            findings, evidence = judge_size(case)
        else:
            findings, evidence = (
                judge_scored(case, passes) if case.is_scored else judge_model(case, passes, forecast, progress)
            )
        report = Report(**vars(findings))
        columns = {name: known.columns for name, known in evidence.items() if known.columns}
    if earlier is not None:
        report = hold_against(earlier, report, columns, case.manifest.judgement)
    if report.steps is not None and not report.steps.recorded:
        write_pass_table(report.steps, case.root)
    report = replace(report, per_sample=keep_samples(columns, folder) if columns else None)
    write_report(report, folder)
    return report


@contextmanager
def name_batches(case: Case) -> Iterator[None]:
    """Turn a lack of memory into a RuntimeFailure that says what was asked for."""
    try:
        yield
    except MemoryError as error:
        judgement = case.manifest.judgement
        benchmark = judgement.benchmark
        raise RuntimeFailure(
            f"{case.root}: out of memory: {error}; the judgement takes {judgement.batch_size} samples at once, its "
            f"benchmark {benchmark.batch_size} and {benchmark.throughput_batch_size}: build with fewer, or judge where "
            "there is more memory"
        ) from error


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
