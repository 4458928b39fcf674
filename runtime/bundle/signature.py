"""A bundle's signature, `model.sig`, as the OpenSSF's library `model-signing` writes and verifies it, offline.

Signed is what the manifest hashes, the manifest, and what `compress bom` and `compress sign` tell of the bundle; not
what judging it writes anew (`UNSIGNED`). Evaluation data that was left out counts by the digests of the manifest, which
is signed itself: a signature holds with it and without. The library is imported when a signature is asked for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from runtime.bundle.files import regular_files
from runtime.bundle.format import MANIFEST, SIGNATURE, find_left_out, is_signed, load_manifest
from runtime.errors import BundleError, MissingDependency, UsageError

MAX_SIGNATURE_BYTES = 64 * 2**20
DIGESTS = re.compile(r": Expected \\?'Digest\(.*?\)\\?', Actual \\?'Digest\(.*?\)\\?'")
"""What the library adds to a file's name: two digests as Python's bytes."""
CURVES = "P-256, P-384 or P-521"


def check_signature(root: Path, key: Path) -> None:
    """Raise BundleError unless the bundle in `root` is signed by `key`: each of its files, and no file more or less.

    Evaluation data may be left out, whole.
    `key`: a PEM file with the signer's public key, or with root certificates that the signer's must lead to. UsageError
    where it is neither; MissingDependency where the library is not installed.
    """
    require_library()
    from model_signing import verifying

    file = root / SIGNATURE
    if file.is_symlink() or not file.is_file():
        raise BundleError(f"{file}: missing: the bundle is not signed; `compress sign {root} --key KEY` signs it")
    if file.stat().st_size > MAX_SIGNATURE_BYTES:
        raise BundleError(f"{file}: larger than {MAX_SIGNATURE_BYTES} bytes, not a signature")
    config = verifying.Config().set_hashing_config(hash_signed_files(root))
    try:
        if b"BEGIN CERTIFICATE" in key.read_bytes():
            config.use_certificate_verifier(certificate_chain=[key])
        else:
            config.use_elliptic_key_verifier(public_key=key)
    except Exception as error:
        rule = f"give a PEM file with an elliptic-curve public key ({CURVES}), or with root certificates"
        raise UsageError(f"--require-signature {key}: {explain(error)}; {rule}") from error
    try:
        with redirect_stdout(sys.stderr):  # the library prints its warnings
            config.verify(root.resolve(), file)
    except Exception as error:
        raise BundleError(
            f"{root}: not what was signed with {key}: {explain(error)}; fetch the bundle again, or ask who made it"
        ) from error


def hash_signed_files(root: Path, ignored: Iterable[str] = ()) -> Any:
    """Return how the library hashes the bundle in `root`; `ignored`: names that the signature says it leaves out."""
    from model_signing import hashing
    from model_signing.manifest import FileManifestItem, Manifest, SerializationType

    files = regular_files(root)[0]
    manifest = load_manifest(root, lambda _: None)
    left_out = {name: manifest.files[name].sha256 for name in find_left_out(root, manifest)}

    class SignedFiles(hashing.Config):  # type: ignore[misc, unused-ignore]
        def add_ignored_paths(self, *, model_path: Any, paths: Any) -> None:
            """Ignore nothing more: verifying adds what a signature says it leaves out, which may be the model."""

        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:
            """Return the digests of the files that are there, and the manifest's of those that were left out."""
            hashed = super().hash(model_path, files_to_hash=files_to_hash)
            found = {there.identifier: there.digest for there in hashed.resource_descriptors()}
            like = found[MANIFEST]  # also a sha256
            found |= {name: replace(like, digest_value=bytes.fromhex(digest)) for name, digest in left_out.items()}
            items = [FileManifestItem(path=PurePosixPath(name), digest=digest) for name, digest in found.items()]
            return Manifest(hashed.model_name, items, SerializationType.from_args(hashed.serialization_type))

    unsigned = [name for name in files if not is_signed(name)]
    return SignedFiles().set_ignored_paths(paths=[*ignored, *unsigned], ignore_git_paths=False)


def require_library() -> None:
    """Raise MissingDependency where the library that signs and verifies is not installed."""
    try:
        import model_signing  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingDependency("model-signing pyopenssl", "a signature (the extra 'trust')") from error


def explain(error: Exception) -> str:
    """Return in one line why the library, or what it stands on, refused; the error's name where it says no more."""
    if isinstance(error, AttributeError):  # it asks an RSA key for its curve, a certificate's signature for its key
        return "another kind of key"
    text = error.strerror or "" if isinstance(error, OSError) else " ".join(str(error).split())
    return DIGESTS.sub("", text).rstrip(".") or type(error).__name__
