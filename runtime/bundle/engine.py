"""What a bundle says of an engine: what it was compiled with and for, and why it would not run here."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.bundle.profiles import Profile

ENGINES = ("tensorrt", "tensorrt-rtx")
"""The runtimes that run engines, not graphs."""


@dataclass(frozen=True)
class EngineOrder:
    """An engine that the recipe asks for: compiled when the bundle was built, or left for `compress compile`.

    `name`: of its artifact. `runtime`: tensorrt or tensorrt-rtx. `graph`: the artifact that it is compiled from.
    `options`: the recipe's, resolved.
    """

    name: str
    runtime: str
    graph: str
    profiles: tuple[Profile, ...]
    options: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineRecord:
    """What an engine is. `platform`: operating system and processor, "linux-x86_64".

    `compute_capabilities`: of the GPUs that run it. `gpu`: the one that it was compiled on; "" where it was compiled
    without one. `weights_from`: the bundle's file whose weights it gets when it is opened; "": it holds them. `layers`:
    the bundle's file with every kernel: types, tactic, nodes of the graph that it runs. `held`: part of the graph's
    products that run in the precision asked for; `short`: node -> what it got instead. `inspected`: by the engine
    inspector, or from the builder's log.
    """

    runtime: str
    version: str
    platform: str
    compute_capabilities: tuple[str, ...]
    profiles: tuple[Profile, ...]
    version_compatible: bool = False
    hardware_compatibility_level: str = "none"
    weights_from: str = ""
    gpu: str = ""
    build_seconds: float = 0.0
    n_layers: int = 0
    layers: str = ""
    asked: dict[str, int] = field(default_factory=dict)
    """Precision -> number of products that were to run in it."""
    held: float = 1.0
    short: dict[str, str] = field(default_factory=dict)
    inspected: str = "log"


@dataclass(frozen=True)
class Here:
    """The machine that an engine would run on. `capability`: its GPU's, "8.9"."""

    version: str
    platform: str
    capability: str


def why_not_here(record: EngineRecord, here: Here) -> list[str]:
    """Return why the engine would not run on this machine, as sentences with the way out; empty where it would."""
    problems = []
    again = "compile it here: compress compile BUNDLE"
    if record.platform != here.platform:
        problems.append(f"it was compiled for {record.platform}, and this is {here.platform}; {again}")
    if not _same_version(record, here.version):
        problems.append(f"it was compiled by {record.runtime} {record.version}, and {here.version} is here; {again}")
    if not _runs_on(record, here.capability):
        known = ", ".join(record.compute_capabilities)
        problems.append(f"it is for compute capability {known}, and this GPU has {here.capability}; {again}")
    return problems


def _same_version(record: EngineRecord, version: str) -> bool:
    """Return whether an engine runs in this version of its library.

    It runs in the version that built it; a version-compatible one in later ones of the same major, too.
    """
    built, here = (tuple(map(_parse_number, text.split("."))) for text in (record.version, version))
    return built == here or (record.version_compatible and built[0] == here[0] and built <= here)


def _runs_on(record: EngineRecord, capability: str) -> bool:
    if record.hardware_compatibility_level == "ampere+":
        return _parse_capability(capability) >= (8, 0)
    return capability in record.compute_capabilities


def _parse_capability(text: str) -> tuple[int, ...]:
    return tuple(map(_parse_number, text.split(".")))


def _parse_number(text: str) -> int:
    digits = "".join(letter for letter in text if letter.isdigit())
    return int(digits or 0)
