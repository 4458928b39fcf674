"""`compress sign`: say how a bundle was built, and sign that with the bundle.

The provenance is written by the command that signs, because an unsigned one proves nothing; the BOM is not, because
scanners read it whether it is signed or not (`compress bom`). One that is there is signed with the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from compress.commands.inspect import read_json
from compress.recipe.places import RecipeFindings, plain
from compress.recipe.yaml_source import read_with_includes
from compress.store.durable import blame
from runtime.bundle.files import put_in_place, sha256_of, write_whole
from runtime.bundle.format import MANIFEST, PROVENANCE, SIGNATURE, UNSIGNED, Manifest, canonical_json
from runtime.bundle.signature import CURVES, explain, hash_signed_files, require_library
from runtime.errors import BundleError, UsageError
from runtime.tasks.manifest import verify

BUILD_TYPE, UNNAMED_BUILDER = "urn:compress:recipe:1", "urn:compress:builder:unnamed"


def sign_bundle(
    bundle: Path, key: Path, password: str | None = None, certificate: Path | None = None, builder: str = ""
) -> Manifest:
    """Write provenance.json and model.sig into a whole bundle, in the place of earlier ones; return its manifest.

    `key`: PEM, elliptic curve, decrypted with `password`. `certificate`: PEM, the signer's first, then those that lead
    to a root. `builder`: a URI. Raises UsageError for a key that cannot sign, BundleError for a bundle that is not
    whole, MissingDependency without the library.
    """
    require_library()
    from model_signing import signing

    config = signing.Config().set_hashing_config(hash_signed_files(bundle, UNSIGNED))
    try:
        if certificate is None:
            secret: Any = None if password is None else password.encode()  # annotated str, and only bytes work
            config.use_elliptic_key_signer(private_key=key, password=secret)
        else:
            config.use_certificate_signer(
                private_key=key, signing_certificate=certificate, certificate_chain=[certificate]
            )
    except Exception as error:
        options = f"--key {key}" + (f", --certificate {certificate}" if certificate else "")
        rule = f"give a PEM file with an elliptic-curve private key ({CURVES}); --password-env where it is encrypted"
        raise UsageError(f"{options}: {explain(error)}; {rule}") from error
    manifest = verify(bundle)
    draft = bundle / f".{SIGNATURE}.{os.getpid()}"
    with blame(bundle):
        write_whole(bundle / PROVENANCE, canonical_json(describe_build(bundle, manifest, builder)))
        try:
            config.sign(bundle.resolve(), draft)
            put_in_place(draft, bundle / SIGNATURE)
        finally:
            draft.unlink(missing_ok=True)
    return manifest


def read_password(variable: str | None, certificate: Path | None) -> str | None:
    """Return the password that the environment variable holds; UsageError where it is not set, or cannot be used."""
    if variable is None:
        return None
    if certificate is not None:
        raise UsageError("--password-env: with --certificate the library reads no encrypted key; decrypt it first")
    if variable not in os.environ:
        raise UsageError(f"--password-env {variable}: no such environment variable; set it to the key's password")
    return os.environ[variable]


def describe_build(bundle: Path, manifest: Manifest, builder: str = "") -> dict[str, Any]:
    """Return an in-toto statement v1 with SLSA's provenance v1: these files came of this recipe, model, data, versions.

    Digests of models and sets are the lock's, over what decides a result and not over one file: they have names of
    their own. Source: https://slsa.dev/spec/v1.0/provenance.
    """
    recipe, lock = read_recipe(bundle), read_lock(bundle)
    files = {MANIFEST: sha256_of(bundle / MANIFEST)} | {n: file.sha256 for n, file in manifest.files.items()}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(files.items())],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"recipe": recipe},
                "internalParameters": {name: lock[name] for name in ("seed", "training", "choices") if lock.get(name)},
                "resolvedDependencies": list(_list_dependencies(lock)),
            },
            "runDetails": {
                "builder": {"id": builder or UNNAMED_BUILDER, "version": {"compress": lock["compress"]["version"]}}
            },
        },
    }


def _list_dependencies(lock: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the model, the sets of data, the libraries and the code of compress as in-toto's resource descriptors."""
    yield {"name": "model", "uri": lock["model"]["source"], "digest": {"compressModel": lock["model"]["digest"]}}
    for name, record in sorted(lock["data"].items()):
        digest = {"compressFiles": record["file_digest"], "compressSamples": record["digest"]}
        sources = record["source"] if isinstance(record["source"], dict) else {"": record["source"]}
        for part, source in sorted(sources.items()):
            yield {"name": f"data.{name}.{part}".rstrip("."), "uri": source, "digest": digest}
    yield {"name": "compress", "digest": {"compressCode": lock["compress"]["code"]}}
    for name, version in sorted(lock["versions"].items()):
        yield {"name": name, "uri": package_url(name, version)}


def package_url(name: str, version: str) -> str:
    """Return a library of the lock, or Python itself, as a package URL."""
    return f"pkg:github/python/cpython@v{version}" if name == "python" else f"pkg:pypi/{name}@{quote(version)}"


def read_lock(bundle: Path) -> dict[str, Any]:
    """Read what went into a bundle; BundleError where it was not built by `compress apply`."""
    lock = read_json(bundle / "lock.json")
    if not isinstance(lock, dict) or not {"compress", "model", "data", "versions"} <= lock.keys():
        raise BundleError(
            f"{bundle / 'lock.json'}: does not say what the bundle was made of; `compress apply` builds one"
        )
    return lock


def read_recipe(bundle: Path) -> dict[str, Any]:
    """Read a bundle's own recipe as JSON values, its variables as they stand. Raises RecipeError."""
    recipe: dict[str, Any] = plain(read_with_includes(bundle / "recipe.yaml", RecipeFindings()))
    return recipe
