"""`compress report`, and the page that ends `apply`, `validate` and `compile`."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from compress.commands.endings import DEBUG
from runtime.judge.findings import Findings
from runtime.processes.endings import is_debugging
from runtime.report.stored import check_bundle, read_report
from runtime.tasks.manifest import read_manifest

if TYPE_CHECKING:
    from compress.pages.frontier import Frontier


def make_page(bundle: Path, folder: Path | None = None) -> tuple[Path, Findings]:
    """Write the page of the report.json in `folder` (default: the bundle) beside it; return its path, and the report.

    Raises UsageError where there is no such report, or it is of another bundle; BundleError, OutputError.
    """
    from compress.pages.report import write_report_page

    manifest, folder = read_manifest(bundle), folder or bundle
    report = read_report(folder / "report.json")
    check_bundle(report, manifest, folder / "report.json", bundle)
    return write_report_page(bundle, report, folder), report


def add_page(
    bundle: Path, report: Findings, folder: Path | None = None, frontier: Frontier | None = None
) -> Path | None:
    """Write the page of a judgement that has just been made, beside its other reports, and return its path.

    `frontier`: of the search that the bundle comes from. Whatever goes wrong is told on stderr, and None returned:
    report.json and report.md stand, and so does the verdict.
    """
    try:
        from compress.pages.report import write_report_page

        return write_report_page(bundle, report, folder or bundle, frontier)
    except Exception as error:  # noqa: BLE001  (the verdict of hours is not lost to a picture)
        if is_debugging():
            traceback.print_exc()
        way_out = (
            f"report.json and report.md hold all of it; `compress report {bundle}` tries again, {DEBUG}=1 says where"
        )
        typer.echo(f"report.html could not be written: {type(error).__name__}: {error}; {way_out}", err=True)
        return None
