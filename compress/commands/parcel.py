"""A bundle as it goes out: what of it goes and what stays, looked through before anything is sent.

What goes is what a signature covers: the models, how they were made, and the signature itself. Reports, the log and
host.json are of this machine and stay; evaluation data stays unless it is asked for. The manifest goes as it is, and
with it the digests of what stayed, so that the bundle is the same one there, and its signature holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.commands.bom import find_licence
from compress.commands.find_keys import find_keys
from compress.commands.inspect import read_host
from compress.commands.sign import read_lock, read_recipe
from runtime.bundle.files import regular_files
from runtime.bundle.format import EVALUATION, SIGNATURE, Manifest, find_left_out, is_signed
from runtime.errors import UsageError
from runtime.report.report import Report
from runtime.report.stored import read_stored_report
from runtime.tasks.manifest import verify


@dataclass(frozen=True)
class Parcel:
    """A bundle as it goes out, looked through."""

    manifest: Manifest
    files: Mapping[str, Path]
    """Those that go, by their names in the bundle."""
    left_out: tuple[str, ...]
    """Evaluation data that stays."""
    lock: Mapping[str, Any]
    report: Report | None
    """The bundle's last judgement; None where there is none."""
    licence: str
    """What was given, or the licence of the model that was compressed; "" where neither is known."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Push:
    """What was sent, and where it is now."""

    to: str
    version: str
    """The hub's commit, or the digest of the registry's manifest."""
    public: bool | None
    """None of a registry, which decides by itself who reads."""
    files: int
    bytes: int
    left_out: tuple[str, ...]
    """Evaluation data that stayed here."""
    licence: str
    """As the card or the registry has it; "" where it is not known."""
    notes: tuple[str, ...]
    get: tuple[str, ...]
    """The commands by which the other side gets it, and knows that it is whole."""


def pack_bundle(bundle: Path, public: bool, with_evaluation: bool, licence: str) -> Parcel:
    """Choose what goes of a whole bundle, and look through it; errors as `push_bundle` says."""
    manifest = verify(bundle)
    if with_evaluation and find_left_out(bundle, manifest):
        raise UsageError(f"--with-evaluation: {bundle} came without its evaluation data; leave --with-evaluation out")
    lock, notes = read_lock(bundle), []
    stays = {name for name in manifest.files if name.startswith(EVALUATION) and not with_evaluation}
    there = regular_files(bundle)[0].items()
    files = {name: path for name, path in sorted(there) if (is_signed(name) or name == SIGNATURE) and name not in stays}
    if keys := list(find_keys(files)):
        way = "take it out where the recipe or the model's folder has it, make the key worthless, and build again"
        raise UsageError([f"{bundle}/{key}, as it seems: nothing was sent; {way}" for key in keys])
    source = str(lock["model"]["source"])
    found = find_licence(source, read_recipe(bundle).get("model", {}).get("revision"), read_host(bundle))
    licence = licence or found
    if found and licence != found:
        notes.append(f"the licence of {source} is {found}, and the card says {licence}, as you do")
    if public and not licence:
        raise UsageError(
            f"{bundle}: a public model needs a licence, and that of {source} is not known (no README.md beside its "
            "files names one): give it, as in --license apache-2.0, or leave --public out"
        )
    if public and re.search(r"(?:^|-)nd(?:-|$)", licence.lower()):
        raise UsageError(
            f"{bundle}: {licence} forbids to pass on changed models, and a compressed one is changed: leave --public "
            "out, or ask whose model it is, and give the licence that you got, as in --license other"
        )
    if not licence:
        notes.append(f"the licence of {source} is not known; say it with --license before you make this public")
    report = read_stored_report(bundle).report if (bundle / "report.json").is_file() else None
    if report is None:
        notes.append(f"it was never judged, so the card has no metrics; run `compress validate {bundle}` first")
    elif report.verdict != "pass":
        notes.append(f"its verdict is '{report.verdict}', and the card says so")
    return Parcel(manifest, files, tuple(sorted(stays)), lock, report, licence, tuple(notes))


def describe_push(parcel: Parcel, to: str, version: str, public: bool | None, more: list[str], *get: str) -> Push:
    """Return the record of a parcel that has arrived; `more`: further notes, `get`: how the other side gets it."""
    size = sum(path.stat().st_size for path in parcel.files.values())
    notes = (*parcel.notes, *more)
    return Push(to, version, public, len(parcel.files), size, parcel.left_out, parcel.licence, notes, get)
