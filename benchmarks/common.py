"""What the claims scripts share: how they are called, what a claim is, how a bundle is made, how a peer is run.

Each script makes one bundle with `compress apply`, measures it beside its peers, and ends with one JSON line on stdout:
{"claims": [{"name", "value", "bar", "holds"}], "rows": [...]}. Exit codes: 0 all claims hold, 1 one does not or a run
failed, 2 the call is wrong or something that it needs is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runtime.errors import RuntimeFailure

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BENCH = "COMPRESS_BENCH"
GATE_FELL_SHORT = 3
"""`compress apply` has written bundle and report nevertheless: the claims decide here, not the recipe's gates."""

Row = dict[str, Any]
"""One model in one backend: "model", "backend" and what was measured, or "failed" with the reason."""


class CallError(Exception):
    """The call is wrong, or something that it needs is not there."""

    exit_code = 2


class RunError(Exception):
    """A run failed."""

    exit_code = 1


@dataclass(frozen=True)
class Call:
    """What a script was asked for."""

    bench: Path
    """Folder with models/ and data/."""
    ours: bool
    """Leave the peers out."""
    out: Path
    """An empty folder to work in."""
    quick: bool = False
    """Small sizes, to see that everything runs: what is measured then decides nothing."""
    only: tuple[str, ...] = ()
    """Rows of the script's table that are asked for; empty: all."""

    def choose(self, names: Iterable[str], quick: int) -> list[str]:
        """Return which of a table's rows are measured: those asked for, the first `quick` of a quick run, or all.

        CallError for a name that the table lacks.
        """
        known = list(names)
        if unknown := [name for name in self.only if name not in known]:
            raise CallError(f"--only {unknown[0]!r}: there is no such row; there are {', '.join(map(repr, known))}")
        return [name for name in known if name in self.only] if self.only else known[: quick if self.quick else None]


@dataclass(frozen=True)
class Claim:
    """A measured value and the bar that it must reach; a value that could not be measured (None) reaches none."""

    name: str
    value: float | None
    bar: float
    rule: Literal["at least", "at most"]

    @property
    def holds(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.bar if self.rule == "at least" else self.value <= self.bar

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "bar": self.bar, "holds": self.holds}


def at_least(name: str, value: float | None, bar: float) -> Claim:
    return Claim(name, value, bar, "at least")


def at_most(name: str, value: float | None, bar: float) -> Claim:
    return Claim(name, value, bar, "at most")


def metric(report: Mapping[str, Any], side: str, name: str) -> float | None:
    """Of report.json, side "baseline" or "candidate"; None where it could not be measured."""
    value: float | None = report[side]["metrics"].get(name)
    return value


def drop(report: Mapping[str, Any], name: str) -> float | None:
    """Baseline minus candidate: positive where the candidate is worse. To 12 decimals: 0.875 - 0.873 is 0.002."""
    before, after = metric(report, "baseline", name), metric(report, "candidate", name)
    return None if before is None or after is None else round(before - after, 12)


def size_ratio(report: Mapping[str, Any]) -> float:
    """Bytes of the baseline over bytes of the candidate."""
    return float(report["baseline"]["size_bytes"] / report["candidate"]["size_bytes"])


Measured = tuple[list[Claim], list[Row]]


def run_script(
    about: str, needs: Sequence[str], measure: Callable[[Call], Measured], arguments: Sequence[str] | None = None
) -> int:
    """Parse the call, measure, say the result; the process's exit code. `needs` are files below the bench folder."""
    parsed = _parser(about).parse_args(arguments)
    try:
        bench = find_bench(parsed.bench, needs)
        with work_folder(parsed.out, parsed.keep) as out, redirect_stdout(sys.stderr):
            claims, rows = measure(Call(bench, parsed.ours, out, parsed.quick, tuple(parsed.only)))
    except (CallError, RunError, RuntimeFailure) as error:
        say(f"error: {error}")
        return error.exit_code
    return conclude(claims, rows)


def _parser(about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", metavar="DIR", help=f"folder with models/ and data/; default: ${BENCH}")
    parser.add_argument("--ours", action="store_true", help="leave the peers out")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="new or empty folder for the bundle and the peers' files, left there"
    )
    parser.add_argument("--keep", action="store_true", help="without --out: do not delete the temporary folder")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes where a script has them, to see that all runs; claims nothing"
    )
    parser.add_argument(
        "--only", metavar="ROW", action="append", default=[], help="of a table of formats this row; may be repeated"
    )
    return parser


def find_bench(given: str | None, needs: Sequence[str]) -> Path:
    """The bench folder as an absolute path; CallError, naming all that is missing. A script without needs has none."""
    named = given or os.environ.get(BENCH)
    if not named and not needs:
        return Path()
    if not named:
        raise CallError(
            f"no models and data to measure on: give --bench DIR or set {BENCH}; needed: {', '.join(needs)}"
        )
    bench = Path(named).resolve()
    missing = [name for name in needs if not (bench / name).exists()]
    if missing:
        raise CallError(f"{bench}: missing: {', '.join(missing)}")
    return bench


@contextmanager
def work_folder(out: Path | None, keep: bool) -> Iterator[Path]:
    """`out`, which must be new or empty and stays; or a temporary folder, deleted in the end unless `keep`."""
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CallError(f"--out {out}: give a new or empty folder")
        out.mkdir(parents=True, exist_ok=True)
        yield out.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="compress-claims-"))
    try:
        yield folder
    finally:
        if keep:
            say(f"kept: {folder}")
        else:
            shutil.rmtree(folder)


def conclude(claims: Sequence[Claim], rows: Sequence[Row]) -> int:
    """Rows and claims for people on stderr, the JSON line on stdout; 0 if all claims hold, else 1."""
    for line in table(rows):
        say(line)
    for claim in claims:
        sign = ">=" if claim.rule == "at least" else "<="
        say(f"{'holds' if claim.holds else 'FAILS'}  {claim.name}: {_shown(claim.value)} {sign} {claim.bar:g}")
    print(json.dumps({"claims": [claim.to_dict() for claim in claims], "rows": list(rows)}, allow_nan=False))
    return 0 if claims and all(claim.holds for claim in claims) else 1


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Aligned lines, a column for each key in the order in which it first appears."""
    if not rows:
        return
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [keys, *([_shown(row.get(key)) for key in keys] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value).partition("\n")[0]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def make_bundle(recipe: Path, call: Call) -> tuple[Path, dict[str, Any]]:
    """(bundle, its report.json) of `compress apply`, from nothing: its cache is a new one."""
    return run_recipe(recipe, call, "bundle")


def run_recipe(recipe: Path, call: Call, name: str, sets: Sequence[str] = ()) -> tuple[Path, dict[str, Any]]:
    """`make_bundle` for one of several, in a folder of its own."""
    bundle = call.out / name
    apply_recipe(recipe, (f"vars.bench={call.bench}", *sets), bundle, call.out / f"{name}-cache")
    return bundle, json.loads((bundle / "report.json").read_text(encoding="utf-8"))


def apply_recipe(
    recipe: Path, sets: Sequence[str], bundle: Path, cache: Path, environment: Mapping[str, str] | None = None
) -> int:
    """`compress apply` with `--set` for each of `sets`; the peak resident bytes of that process.

    CallError or RunError, by its exit code; that a gate fell short is none.
    """
    say(" ".join(["compress apply", recipe.name, *sets]))
    code, peak_bytes = run_child(apply_command(recipe, sets, bundle, cache), environment)
    if code not in (0, GATE_FELL_SHORT):
        raise (CallError if code == 2 else RunError)(f"compress apply {recipe.name} ended with exit code {code}")
    return peak_bytes


def run_child(command: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[int, int]:
    """(exit code, peak resident bytes) of a command in the project's folder."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "peak.json"
        whole = [sys.executable, str(HERE / "peak.py"), str(result), *command]
        subprocess.run(whole, cwd=ROOT, stdout=sys.stderr, env=environment, check=True)
        found = json.loads(result.read_text(encoding="utf-8"))
    return int(found["code"]), int(found["peak_bytes"])


def plan_recipe(path: Path, sets: Sequence[str], cache: Path) -> dict[str, Any]:
    """Return the plan as JSON values. CallError with the last line where it cannot be made."""
    words = [part for one in sets for part in ("--set", one)]
    command = [sys.executable, "-m", "compress", "plan", str(path), "--cache", str(cache), "--json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise CallError(next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no plan"))
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def apply_command(recipe: Path, sets: Sequence[str], bundle: Path, cache: Path) -> list[str]:
    command = [sys.executable, "-m", "compress", "apply", str(recipe), "--out", str(bundle), "--cache", str(cache)]
    return command + [part for one in sets for part in ("--set", one)]


def pass_seconds(bundle: Path, kinds: Sequence[str]) -> float | None:
    """Seconds that the passes `kinds` took together, as compress.log has them ("12.3s  gptq: 4.5 s"); None if it
    lacks one."""
    log = (bundle / "compress.log").read_text(encoding="utf-8")
    found = [re.findall(rf"^\s*[\d.]+s\s+{re.escape(kind)}: ([\d.]+) s$", log, re.MULTILINE) for kind in set(kinds)]
    return sum(float(seconds) for times in found for seconds in times) if all(found) else None


@dataclass(frozen=True)
class Peer:
    """A tool that is measured beside ours: a script in peers/, and the environment that it runs in."""

    name: str
    script: str
    options: tuple[str, ...] = ()
    venv: str | None = None
    """Made of the pins in peers/<venv>.txt; None: this interpreter has what it needs."""
    calibrated: bool = True
    """It takes calibration batches."""

    @property
    def slug(self) -> str:
        """Its name as part of a file name."""
        return self.name.replace(" ", "-")


def run_peer(peer: Peer, *arguments: object, folder: Path, log: str | None = None) -> None:
    """Run the peer's script in `folder`, where its log goes too. RunError, with the end of that log."""
    python = sys.executable if peer.venv is None else str(peer_python(peer.venv))
    say(f"peer: {peer.name}")
    command = [python, str(HERE / "peers" / peer.script), *map(str, arguments), *peer.options]
    _run(command, folder / (log or f"{peer.slug}.log"), folder)


def run_job(peer: Peer, job: Mapping[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """What a peer of peers/jobs.py answers to `job`; files are named after `name`. RunError as `run_peer`."""
    file, result = folder / f"{name}.job.json", folder / f"{name}.result.json"
    file.write_text(json.dumps({**job, "result": str(result)}, default=str), encoding="utf-8")
    run_peer(peer, file, folder=folder, log=f"{name}.log")
    answer: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return answer


def link_packages(venv: str, folder: Path, *names: str) -> Path:
    """Return a folder with links to a few packages of a peer's environment alone, as an entry for PYTHONPATH."""
    packages = next(peer_python(venv).parent.parent.glob("lib/python*/site-packages"))
    folder.mkdir(parents=True, exist_ok=True)
    for path in (found for name in names for found in packages.glob(f"{name}*")):
        (folder / path.name).unlink(missing_ok=True)
        (folder / path.name).symlink_to(path)
    return folder


def peer_python(venv: str) -> Path:
    """The interpreter of benchmarks/.venvs/<venv>, made of peers/<venv>.txt unless it is there with these pins.

    A line "# uninstall: NAME ..." there names packages that are asked for, but must not be there.
    """
    folder, pins = HERE / ".venvs" / venv, HERE / "peers" / f"{venv}.txt"
    python, stamp = folder / "bin" / "python", folder / "pins.txt"
    if python.exists() and stamp.is_file() and stamp.read_bytes() == pins.read_bytes():
        return python
    say(f"installing {pins.name} into {folder}")
    folder.parent.mkdir(exist_ok=True)
    log = folder.parent / f"{venv}-install.log"
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], log, ROOT)
    _run([str(python), "-m", "pip", "install", "--quiet", "--requirement", str(pins)], log, ROOT)
    for names in re.findall(r"^# uninstall: (.+)$", pins.read_text(encoding="utf-8"), re.MULTILINE):
        _run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *names.split()], log, ROOT)
    shutil.copyfile(pins, stamp)
    return python


def peer_environment() -> dict[str, str]:
    """Of a process in an environment of its own: only that interpreter's packages are seen."""
    hidden = ("PYTHONPATH", "PYTHONHOME")
    return {key: value for key, value in os.environ.items() if key not in hidden} | {"PYTHONNOUSERSITE": "1"}


def _run(command: list[str], log: Path, cwd: Path) -> None:
    """Output goes to `log`."""
    with log.open("wb") as file:
        code = subprocess.run(
            command, cwd=cwd, stdout=file, stderr=subprocess.STDOUT, env=peer_environment(), check=False
        ).returncode
    if code:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
        raise RunError(f"{' '.join(Path(part).name for part in command[:3])} ended with exit code {code}:\n{tail}")
