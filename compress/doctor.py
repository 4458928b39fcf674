"""What is installed and works here, and the command that mends what does not."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compress.errors import CompressError
from runtime.engine import ENGINES, EngineOrder
from runtime.environment import cpu_info
from runtime.isolated import trouble

OWN_NAME = "compress"
SKIPPED_EXTRAS = {"dev"}
_MODULES = {"pillow": "PIL", "huggingface-hub": "huggingface_hub", "ruamel.yaml": "ruamel.yaml", "onnx-ir": "onnx_ir"}


@dataclass(frozen=True)
class Requirement:
    """One line of the package's own metadata."""

    name: str
    least: str
    extra: str
    """"" for what every machine needs."""


@dataclass(frozen=True)
class Finding:
    """How it stands with one requirement or backend. `mend` is a command, "" where nothing is to be done."""

    part: str
    name: str
    state: Literal["ok", "missing", "too old", "broken"]
    version: str = ""
    why: str = ""
    mend: str = ""


def diagnose(console: Console) -> None:
    """Print what `examine` finds."""
    found = examine()
    console.print(f"Python {found['python']}, {found['cpu']} ({', '.join(found['cpu_flags']) or 'no flags known'})")
    table = Table("for", "package", "state", "version")
    for finding in found["findings"]:
        style = {"ok": None, "missing": "yellow"}.get(finding["state"], "red")
        cells = (finding["part"], finding["name"], finding["state"], finding["version"])
        table.add_row(*map(escape, cells), style=style)
    console.print(table)
    for finding in found["findings"]:
        if finding["state"] != "ok":
            said = ": ".join(part for part in (finding["name"], finding["why"], finding["mend"]) if part)
            console.print(escape(said), soft_wrap=True)


def examine() -> dict[str, Any]:
    """{"python", "cpu", "cpu_flags", "findings"}: each requirement, backend and compiler of engines, imported in a
    process of its own, for a broken installation may crash."""
    cpu, flags = cpu_info()
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = [
            *pool.map(_examine_package, _requirements()),
            *pool.map(_examine_backend, _backends()),
            *pool.map(_examine_compiler, ENGINES),
        ]
    findings = [asdict(finding) for finding in found]
    return {"python": sys.version.split()[0], "cpu": cpu, "cpu_flags": flags, "findings": findings}


def _requirements() -> list[Requirement]:
    """What compress itself says it needs, each package once, the base before the extras."""
    try:
        lines = metadata.requires(OWN_NAME) or []
    except metadata.PackageNotFoundError as error:
        raise CompressError(f"{OWN_NAME} is not installed, only its files are here: pip install -e .") from error
    wanted = [r for line in lines if (r := _parsed(line)) and r.extra not in SKIPPED_EXTRAS and r.name != OWN_NAME]
    first: dict[str, Requirement] = {}
    for requirement in wanted:
        first.setdefault(requirement.name, requirement)
    return list(first.values())


def _parsed(line: str) -> Requirement | None:
    """'onnx>=1.19; extra == "build"' -> Requirement("onnx", "1.19", "build")."""
    match = re.match(r"""([\w.-]+)[^;>]*(?:>=([\w.]+))?[^;]*(?:;.*extra == ['"](.+?)['"])?""", line)
    return Requirement(match[1].lower(), match[2] or "", match[3] or "") if match else None


def _examine_package(wanted: Requirement) -> Finding:
    part, mend = _part(wanted)
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return Finding(part, wanted.name, "missing", mend=mend)
    if _numbers(version) < _numbers(wanted.least):
        return Finding(part, wanted.name, "too old", version, f"needs {wanted.least}", f"pip install -U {wanted.name}")
    found = trouble(f"import {_MODULES.get(wanted.name, wanted.name.replace('-', '_'))}")
    if found:
        return Finding(part, wanted.name, "broken", version, found, f"pip install --force-reinstall {wanted.name}")
    return Finding(part, wanted.name, "ok", version)


def _part(wanted: Requirement) -> tuple[str, str]:
    """What the package is for, and the command that installs it."""
    if not wanted.extra:
        return "running bundles", f"pip install {OWN_NAME}"
    return wanted.extra, f"pip install '{OWN_NAME}[{wanted.extra}]'"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])


def _backends() -> list[str]:
    from runtime.backends import BACKENDS

    return list(BACKENDS)


def _examine_backend(name: str) -> Finding:
    code = f"import sys; from runtime.backends import BACKENDS; sys.exit(BACKENDS[{name!r}].available())"
    found = trouble(code)
    return Finding("backend", name, "missing" if found else "ok", why=found)


def _examine_compiler(runtime: str) -> Finding:
    """Whether engines for it are compiled here, which is another question than whether they run."""
    from compress.engine.compile import why_not_here

    found = why_not_here(EngineOrder("", runtime, "", ()))
    return Finding("compiler", runtime, "missing" if found else "ok", why=found)
