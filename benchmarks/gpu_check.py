"""Everything that needs a GPU, in one run and one report: `make gpu-check`.

Runs the tests that are marked `gpu`, `device_speed.py`, and `engine_speed.py` where the bench folder is given, and
writes report.md and report.json into --out: the machine, each test with its outcome, each claim with its value, each
row. Exit codes: 0 all passed and held, 1 something did not, 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from common import BENCH, HERE, ROOT, say

from compress.blocks.device import explain_no_device
from compress.commands.doctor import examine
from runtime.nvidia.gpu import gpu_here

NO_GPU = 2


@dataclass(frozen=True)
class Outcome:
    """One test. `state`: passed, failed or skipped; `why` of the last two."""

    test: str
    state: str
    why: str = ""


@dataclass
class Check:
    """What the report holds."""

    gpu: dict[str, str]
    runtimes: list[dict[str, str]]
    tests: list[Outcome] = field(default_factory=list)
    claims: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Something was tested, nothing failed, and every claim that was measured holds."""
        states = [one.state for one in self.tests]
        return "passed" in states and "failed" not in states and all(claim["holds"] for claim in self.claims)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-check", help="folder of the report")
    parser.add_argument("--bench", help=f"folder with models/ and data/; default: ${BENCH}")
    call = parser.parse_args()
    gpu = gpu_here()
    if gpu is None:
        say("error: there is no GPU that the driver sees (see `nvidia-smi`); nothing was checked")
        return NO_GPU
    call.out.mkdir(parents=True, exist_ok=True)
    check = Check(asdict(gpu), [one for one in examine()["findings"] if one["part"] in ("backend", "compiler")])
    check.tests = run_tests(call.out / "tests.xml")
    why = explain_no_device("cuda")
    if why:
        check.left_out.append(f"device_speed.py: {why}")
    else:
        measure(check, "device_speed.py")
    bench = call.bench or os.environ.get(BENCH)
    if bench:
        measure(check, "engine_speed.py", "--bench", bench)
    else:
        check.left_out.append(f"engine_speed.py: no models to measure on; give --bench DIR or set {BENCH}")
    (call.out / "report.json").write_text(json.dumps(asdict(check), indent=2) + "\n", encoding="utf-8")
    (call.out / "report.md").write_text("\n".join(markdown(check)) + "\n", encoding="utf-8")
    say(f"{'passed' if check.passed else 'FAILED'}: {call.out / 'report.md'}")
    return 0 if check.passed else 1


def run_tests(result: Path) -> list[Outcome]:
    """Those marked `gpu`."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={result}"]
    result.unlink(missing_ok=True)
    done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
    if done.returncode not in (0, 1) or not result.is_file():  # 1: some failed
        return [Outcome("pytest", "failed", f"it ended with exit code {done.returncode}, and its tests are not known")]
    return [_outcome(case) for case in ElementTree.parse(result).getroot().iter("testcase")]


def _outcome(case: ElementTree.Element) -> Outcome:
    name = case.get("name", "")
    for tag, state in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (found := case.find(tag)) is not None:
            return Outcome(name, state, (found.get("message") or "").partition("\n")[0])
    return Outcome(name, "passed")


def measure(check: Check, script: str, *arguments: str) -> None:
    """Add the claims of a benchmark of GPUs; a run that gave none is one that does not hold."""
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.strip():
        check.claims.append({"name": f"{script} ran (exit code {done.returncode})", "value": 0, "holds": False})
        return
    found = json.loads(done.stdout.strip().splitlines()[-1])
    check.claims += found["claims"]
    check.rows += found["rows"]


def markdown(check: Check) -> Iterator[str]:
    yield f"# GPU check: {'passed' if check.passed else 'FAILED'}"
    yield ""
    yield f"{check.gpu['name']}, compute capability {check.gpu['capability']}, driver {check.gpu['driver']}"
    yield ""
    yield "| for | name | state | why |"
    yield "|---|---|---|---|"
    yield from (f"| {one['part']} | {one['name']} | {one['state']} | {one['why']} |" for one in check.runtimes)
    yield from ("", "| test | outcome | why |", "|---|---|---|")
    yield from (f"| {one.test} | {one.state} | {one.why} |" for one in check.tests)
    if check.claims:
        yield from ("", "| claim | value | bar | holds |", "|---|---|---|---|")
        yield from (
            f"| {one['name']} | {one['value']} | {one.get('bar', '')} | {'yes' if one['holds'] else 'NO'} |"
            for one in check.claims
        )
    speeds = [one for one in check.rows if "seconds_per_billion" in one]
    if speeds:
        yield from ("", "| gptq on | seconds | per billion weights | MiB of the GPU |", "|---|---|---|---|")
        columns = ("model", "seconds", "seconds_per_billion", "device_mib")
        yield from ("| " + " | ".join(str(one[column]) for column in columns) + " |" for one in speeds)
    yield from (f"\nNot run: {text}" for text in check.left_out)


if __name__ == "__main__":
    raise SystemExit(main())
