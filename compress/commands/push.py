"""`compress push`: send a bundle to a model hub or a registry, whole or not at all."""

from __future__ import annotations

import re
from pathlib import Path

from compress.commands.parcel import Push, pack_bundle
from compress.commands.push_to_hub import check_hub, push_to_hub
from compress.commands.push_to_registry import Repository, push_to_registry
from runtime.errors import UsageError
from runtime.words import size_text

HUB = re.compile(r"hf://(\w[\w.-]*/\w[\w.-]*)")
REGISTRY = re.compile(
    r"oci://([a-z0-9][a-z0-9.-]*(?::\d+)?)/([a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r":(\w[\w.-]{0,127})",
    re.ASCII,
)


def push_bundle(bundle: Path, to: str, public: bool = False, with_evaluation: bool = False, licence: str = "") -> Push:
    """Send a bundle to `to`, hf://OWNER/NAME or oci://HOST/NAME:TAG, and return what is there now.

    `licence`: in the place of that of the model that was compressed. Raises UsageError before anything is sent: an
    address that is none, something like a key in a file, a public model without a licence, a hub that is offline;
    BundleError for a bundle that is not whole; PushError where sending failed, which says what is there then.
    """
    hub, registry = HUB.fullmatch(to), REGISTRY.fullmatch(to)
    if hub is None and registry is None:
        raise UsageError(f"{to}: write hf://OWNER/NAME for a model hub or oci://HOST/NAME:TAG for a registry")
    if public and registry is not None:
        raise UsageError(f"--public: who may read {to} is set in the registry; leave --public out")
    if hub is not None:
        check_hub()
    parcel = pack_bundle(bundle, public, with_evaluation, licence)
    if hub is not None:
        return push_to_hub(parcel, hub[1], public)
    assert registry is not None
    return push_to_registry(parcel, Repository(registry[1], registry[2]), registry[3])


def render_push(pushed: Push) -> str:
    """Return what was sent, what stayed and how to get it, as lines."""
    who = {True: ", public", False: ", private", None: ""}[pushed.public]
    licence = f"; licence: {pushed.licence}" if pushed.licence else ""
    lines = [f"{pushed.to}: {pushed.files} files, {size_text(pushed.bytes)}{who} ({pushed.version}){licence}"]
    if pushed.left_out:
        lines.append(
            f"  evaluation data stayed here ({len(pushed.left_out)} files; their digests went): there the bundle runs "
            "and verifies, and cannot be judged again; --with-evaluation sends it"
        )
    lines += [f"  note: {note}" for note in pushed.notes]
    lines += ["get it:", *(f"  {command}" for command in pushed.get)]
    return "\n".join(lines)
