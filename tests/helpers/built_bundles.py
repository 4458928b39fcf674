"""What a recipe's build leaves in a bundle beside its models, for tiny bundles that no recipe built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.tasks.manifest import read_manifest, write_bundle

RECIPE = """\
version: 1
name: tiny
model: {source: 'dir:${base}', task: image-classification}
vars: {base: /nowhere}
passes: [{kind: int8, mode: static}]
target: onnxruntime-cpu
"""
LOCK: dict[str, Any] = {
    "compress": {"version": "0.1.0", "code": "c0de"},
    "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"},
    "seed": 7,
    "model": {"source": "dir:${base}", "digest": "aa11", "architecture": "Net"},
    "data": {
        "calibration": {"source": "npz:c.npz", "digest": "d1", "file_digest": "f1", "samples": 4},
        "evaluation": {
            "source": {"en": "npz:e.npz", "fr": "npz:f.npz"},
            "digest": "d2",
            "file_digest": "f2",
            "samples": 4,
        },
    },
}


def reseal(root: Path) -> None:
    """Make the manifest fit the files, as anybody can who may write into the folder."""
    write_bundle(root, replace(read_manifest(root), files={}, digest=""))


def write_key(path: Path, key: Any = None, password: bytes | None = None) -> Path:
    """Write a private key as PEM, and its public key beside it as .pub; return the private key's file."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = key or ec.generate_private_key(ec.SECP256R1())
    lock = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock))
    public = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(*public))
    return path
