"""What is installed and works here, and the command that mends what does not; needs no more than the runtime."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

from compress.errors import CompressError
from compress.version import DISTRIBUTION
from runtime.bundle.engine import ENGINES, EngineOrder
from runtime.clock.machine import cpu_info
from runtime.plugins import (
    BACKEND_GROUP,
    GROUPS,
    METRIC_GROUP,
    PASS_GROUP,
    TASK_GROUP,
    TORCH_TASK_GROUP,
    Plugin,
    find_plugins,
)
from runtime.processes.endings import print_json
from runtime.processes.isolated import run, trouble
from runtime.report.terminal import align, find_width, fold

EXTRAS = {
    "build": "all of `compress`: recipes become bundles",
    "text": "bundles that read texts",
    "image": "bundles that read image files",
    "audio": "bundles that read recordings",
    "openvino": "the target openvino",
    "executorch": "the target executorch: .pte files for phones",
    "genai": "trying what `compress deploy --to genai` wrote",
    "gguf": "GGUF files, as a model's source and for llama.cpp",
    "lm-eval": "tasks of lm-evaluation-harness on a bundle",
    "minilm": "the text encoder that recipes called minilm-* compress",
    "tensorrt": "the target tensorrt, on a machine with an NVIDIA GPU",
    "tensorrt-rtx": "the target tensorrt-rtx, whose engines are compiled without a GPU, too",
    "serve": "`compress-run serve`: a bundle over HTTP",
    "triton": "asking a Triton server that serves a bundle",
    "search": "`compress sweep` where a recipe has a search",
    "mcp": "`compress mcp`: the commands as an agent's tools",
    "ray": "`compress sweep --ray`: trials on a cluster",
    "trust": "signatures and bills of materials",
    "notebooks": "running the project's notebooks",
}
"""Extra -> what it is for. "dev" is for those who work on the project."""
CODE = (".py", ".so", ".pyd")
LOOK_UP = {
    PASS_GROUP: "from compress.passes import KINDS as table; from compress.work import find_work; find_work({name!r})",
    METRIC_GROUP: "from runtime.tasks.metrics import METRICS as table",
    TASK_GROUP: "from runtime.tasks import TASKS as table",
    TORCH_TASK_GROUP: "from compress.tasks import TORCH_TASKS as table",
    BACKEND_GROUP: "from compress.formats.targets import TARGETS as table",
}
"""Group of plug-ins -> the code that finds the table, and for passes their work."""
IMPORT_IN_TURN = """
import importlib
for name, modules in MODULES.items():
    try:
        for module in modules:
            importlib.import_module(module)
    except BaseException:  # SystemExit, too: what is wrong is found out where the package is imported alone
        continue
    print(f"\\nimported {name}", flush=True)  # before the next one may crash
"""


@dataclass(frozen=True)
class Requirement:
    """One line of the package's own metadata."""

    name: str
    least: str
    extra: str
    """"" for what every machine needs."""


@dataclass(frozen=True)
class Extra:
    """One extra of the package, what it is for, and what of it is not installed."""

    name: str
    gives: str
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """How it stands with one requirement, backend or plug-in. `mend` is a command, "" where nothing is to be done."""

    part: str
    name: str
    state: Literal["ok", "missing", "too old", "broken"]
    version: str = ""
    why: str = ""
    mend: str = ""


def diagnose(as_json: bool) -> None:
    """Print what `examine` finds."""
    report, width = examine(), find_width()
    if as_json:
        print_json(report)
        return
    head = f"Python {report['python']}, {report['cpu']} ({', '.join(report['cpu_flags']) or 'no flags known'})"
    rows = [tuple(finding[key] for key in ("part", "name", "state", "version")) for finding in report["findings"]]
    wrong = [finding for finding in report["findings"] if finding["state"] != "ok"]
    mends = [": ".join(part for part in (found["name"], found["why"], found["mend"]) if part) for found in wrong]
    table = align([("for", "package", "state", "version"), *rows], width)
    extras = [(extra["name"], _count_missing(extra["missing"]), extra["gives"]) for extra in report["extras"]]
    offered = align([("extra", "here", "gives"), *extras], width)
    install = [f"an extra is installed by: pip install '{DISTRIBUTION}[NAME]'"] if extras else []
    print("\n".join(line for text in (head, *table, *mends, *offered, *install) for line in fold(text, width)))


def _count_missing(packages: Sequence[str]) -> str:
    return f"{len(packages)} missing" if packages else "yes"


def examine() -> dict[str, Any]:
    """Import each requirement, plug-in, backend and compiler of engines in other processes, for it may crash.

    Returns {"python", "cpu", "cpu_flags", "findings", "extras"}.
    """
    cpu, flags = cpu_info()
    requirements = _list_requirements()
    with ThreadPoolExecutor(max_workers=4) as pool:
        packages = pool.submit(_examine_packages, _list_once(requirements))
        found = [
            *pool.map(_examine_plugin, [plugin for group in GROUPS for plugin in find_plugins(group)]),
            *pool.map(_examine_backend, _list_backends()),
            *pool.map(_examine_compiler, ENGINES),
        ]
        findings = [asdict(finding) for finding in (*packages.result(), *found)]
    python, extras = sys.version.split()[0], [asdict(extra) for extra in _list_extras(requirements)]
    return {"python": python, "cpu": cpu, "cpu_flags": flags, "findings": findings, "extras": extras}


def _list_requirements() -> list[Requirement]:
    """Return the requirements that our own metadata states, but for those of who works on the project."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError as error:
        raise CompressError(f"{DISTRIBUTION} is not installed, only its files are here: pip install -e .") from error
    parsed = (_parse_requirement(line) for line in lines)
    return [wanted for wanted in parsed if wanted and wanted.extra in ("", *EXTRAS) and wanted.name != DISTRIBUTION]


def _list_once(requirements: Sequence[Requirement]) -> list[Requirement]:
    """Return each package once, that of the base before those of extras."""
    first: dict[str, Requirement] = {}
    for requirement in requirements:
        first.setdefault(requirement.name, requirement)
    return list(first.values())


def _list_extras(requirements: Sequence[Requirement]) -> list[Extra]:
    """Return the extras that are stated, in the order in which they are told."""
    missing = {
        extra: tuple(r.name for r in requirements if r.extra == extra and not _is_installed(r.name))
        for extra in {requirement.extra for requirement in requirements}
    }
    return [Extra(name, gives, missing[name]) for name, gives in EXTRAS.items() if name in missing]


def _parse_requirement(line: str) -> Requirement | None:
    """Parse a line of metadata: 'onnx>=1.19; extra == "build"' -> Requirement("onnx", "1.19", "build")."""
    match = re.match(r"""([\w.-]+)[^;>]*(?:>=([\w.]+))?[^;]*(?:;.*extra == ['"](.+?)['"])?""", line)
    return Requirement(match[1].lower(), match[2] or "", match[3] or "") if match else None


def _examine_packages(requirements: Sequence[Requirement]) -> list[Finding]:
    """Import all packages in one process, where libraries that several of them use load once, and alone what fails."""
    modules = {wanted.name: find_modules(wanted.name) for wanted in requirements if _is_installed(wanted.name)}
    printed = run(f"MODULES = {modules!r}\n{IMPORT_IN_TURN}")[1].splitlines()
    with ThreadPoolExecutor(max_workers=4) as pool:
        return list(
            pool.map(lambda wanted: _examine_package(wanted, f"imported {wanted.name}" in printed), requirements)
        )


def _is_installed(name: str) -> bool:
    return any(True for _ in metadata.distributions(name=name))


def _examine_package(wanted: Requirement, imported: bool = False) -> Finding:
    """Find out how it stands with a package. `imported`: it is known that it can be."""
    least = f"'{wanted.name}>={wanted.least}'" if wanted.least else wanted.name
    part, mend = wanted.extra or "running bundles", f"pip install {least}"
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return Finding(part, wanted.name, "missing", mend=mend)
    if _parse_version(version) < _parse_version(wanted.least):
        return Finding(part, wanted.name, "too old", version, f"needs {wanted.least}", f"pip install -U {wanted.name}")
    why = "" if imported else trouble("; ".join(f"import {module}" for module in find_modules(wanted.name)))
    if why:
        return Finding(part, wanted.name, "broken", version, why, f"pip install --force-reinstall {wanted.name}")
    return Finding(part, wanted.name, "ok", version)


def find_modules(name: str) -> list[str]:
    """Return the names that an installed package is imported by, from its own list of files; none without Python.

    The module of its name if there is one (cuda-bindings: cuda.bindings), else the outermost ones (pillow: PIL).
    """
    files = [file for file in metadata.files(name) or [] if ".." not in file.parts]
    packages = {file.parts[:-1] for file in files if file.name == "__init__.py"}
    outermost = {parts for parts in packages if not any(parts[:n] in packages for n in range(1, len(parts)))}
    outermost |= {(file.name.partition(".")[0],) for file in files if len(file.parts) == 1 and file.suffix in CODE}
    namespaces = {parts[:n] for parts in outermost for n in range(1, len(parts))}  # optimum has no __init__.py
    own = [parts for parts in outermost | namespaces if _normalize("-".join(parts)) == _normalize(name)]
    return sorted(".".join(parts) for parts in own or outermost if not parts[0].startswith("_"))


def _normalize(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])


def _list_backends() -> list[str]:
    from runtime.backends import BACKENDS

    # not `list(BACKENDS)`, which ends where two plug-ins have one name: that is for `_examine_plugin` to say
    return list(dict.fromkeys([*BACKENDS.own, *(plugin.name for plugin in find_plugins(BACKEND_GROUP))]))


def _examine_plugin(plugin: Plugin) -> Finding:
    code = f"{LOOK_UP[plugin.group].format(name=plugin.name)}; list(table); table[{plugin.name!r}]"
    why = trouble(code)
    name, version = f"{plugin.group}: {plugin.name}", f"{plugin.distribution} {plugin.version}"
    return Finding("plug-in", name, "broken" if why else "ok", version, why)


def _examine_backend(name: str) -> Finding:
    code = f"import sys; from runtime.backends import BACKENDS; sys.exit(BACKENDS[{name!r}].available())"
    why = trouble(code)
    return Finding("backend", name, "missing" if why else "ok", why=why)


def _examine_compiler(runtime: str) -> Finding:
    """Find out whether engines for a runtime are compiled here, which is another question than whether they run."""
    try:
        from compress.engine.compile import why_not_here
    except ImportError as error:  # without the build side
        return Finding("compiler", runtime, "missing", why=str(error))
    why = why_not_here(EngineOrder("", runtime, "", ()))
    return Finding("compiler", runtime, "missing" if why else "ok", why=why)
