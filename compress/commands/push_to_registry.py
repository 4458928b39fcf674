"""Send a bundle to a registry, by the three calls of the OCI distribution specification: blobs, config, manifest last.

A tag points to the whole bundle or to what it pointed to before, because the manifest, which names all files, is sent
when all are there. Source: https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlencode, urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from compress.commands.parcel import Parcel, Push, describe_push
from compress.errors import PushError
from runtime.bundle.files import sha256_of
from runtime.bundle.format import canonical_json

KIND = "application/vnd.compress.bundle.v1"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
EMPTY = b"{}"
"""The config of what is no image."""
SECONDS = 600
"""Until a registry that says nothing is given up: it hashes a file of gigabytes before it answers."""
LOCAL = ("localhost", "127.0.0.1")
"""Hosts that are spoken to without encryption: registries on this machine."""


class _NoRedirects(HTTPRedirectHandler):
    """Follows no redirect: what lets us into a registry would go along."""

    def redirect_request(self, *_: Any) -> None:
        return None


OPENER = build_opener(_NoRedirects)
CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


@dataclass
class Repository:
    """A registry's repository; `header` is what let us in, which goes to the registry alone, wherever uploads lead."""

    host: str
    name: str
    header: dict[str, str] = field(default_factory=dict)

    @property
    def registry(self) -> str:
        scheme = "http" if self.host.partition(":")[0] in LOCAL else "https"
        return f"{scheme}://{self.host}/"

    @property
    def address(self) -> str:
        return f"{self.registry}v2/{self.name}"

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | Path | None = None,
        logged_in: bool = False,
    ) -> tuple[int, Message]:
        """Send a request and return status and headers of the answer; HEAD may find nothing. PushError for a refusal.

        A registry that asks who calls, as it does again where a token has run out, is told, and asked once more.
        """
        try:
            return self._send_once(method, url, headers or {}, body)
        except HTTPError as error:
            if method == "HEAD" and (error.code == 404 or error.code // 100 == 3):  # 3xx: it lies in a store of files
                return error.code, error.headers
            if error.code == 401 and not logged_in:
                self.header = self._log_in(error.headers.get("WWW-Authenticate", ""))
                return self.send(method, url, headers, body, logged_in=True)
            raise self._fail(f"{method} {url}: {error.code} {error.reason}{_read_reason(error)}") from error
        except (HTTPException, OSError) as error:
            raise self._fail(f"{method} {url}: {getattr(error, 'reason', None) or error}") from error

    def _send_once(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | Path | None
    ) -> tuple[int, Message]:
        own = self.header if url.startswith(self.registry) else {}
        with ExitStack() as stack:
            data: Any = body
            if isinstance(body, Path):
                data = stack.enter_context(body.open("rb"))
                headers = {**headers, "Content-Length": str(body.stat().st_size)}
            request = Request(url, data, {**headers, **own}, method=method)
            answer = stack.enter_context(OPENER.open(request, timeout=SECONDS))
            answer.read()
            return answer.status, answer.headers

    def _log_in(self, challenge: str) -> dict[str, str]:
        """Return the header that answers a registry's challenge: name and password, or a token that they buy."""
        kind, _, rest = challenge.partition(" ")
        named, basic = dict(CHALLENGE.findall(rest)), read_credentials(self.host)
        own = {"Authorization": f"Basic {basic}"} if basic else {}
        if kind.lower() == "basic" and basic:
            return own
        realm = named.get("realm", "")
        if kind.lower() != "bearer" or not (realm.startswith("https://") or urlsplit(realm).hostname in LOCAL):
            raise self._fail(f"asks who you are; log in with `docker login {self.host}` or `oras login {self.host}`")
        wanted = {"service": named.get("service", ""), "scope": f"repository:{self.name}:pull,push"}
        try:
            with OPENER.open(Request(f"{realm}?{urlencode(wanted)}", headers=own), timeout=SECONDS) as answer:
                said = json.loads(answer.read())
            return {"Authorization": f"Bearer {said.get('token') or said['access_token']}"}
        except (OSError, HTTPException, ValueError, KeyError, AttributeError) as error:
            way = f"log in with `docker login {self.host}` or `oras login {self.host}`"
            raise self._fail(f"gives no token for it ({error}); {way}") from error

    def _fail(self, text: str) -> PushError:
        return PushError(
            f"oci://{self.host}/{self.name}: {text}. The tag names a whole bundle, or what it named before; files that "
            "were sent are taken up by the next push, or removed by the registry"
        )


def read_credentials(host: str) -> str:
    """Return base64 of NAME:PASSWORD that `docker login` or `oras login` kept for a registry; "" for none."""
    file = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker", "config.json")
    try:
        config = json.loads(file.read_text("utf-8"))
        helper = config.get("credHelpers", {}).get(host) or config.get("credsStore")
        if kept := config.get("auths", {}).get(host, {}).get("auth"):
            return str(kept)
        if not helper:
            return ""
        command = [f"docker-credential-{helper}", "get"]
        done = subprocess.run(command, input=host, capture_output=True, text=True, timeout=SECONDS, check=True)
        said = json.loads(done.stdout)
        return base64.b64encode(f"{said['Username']}:{said['Secret']}".encode()).decode()
    except (OSError, ValueError, KeyError, AttributeError, subprocess.SubprocessError):
        return ""


def push_to_registry(parcel: Parcel, repository: Repository, tag: str) -> Push:
    """Send all files of a parcel as blobs, each once, then the manifest that names them, under `tag`. PushError."""
    known = {name: record.sha256 for name, record in parcel.manifest.files.items()}
    digests = {name: f"sha256:{known.get(name) or sha256_of(path)}" for name, path in parcel.files.items()}
    for name, path in parcel.files.items():
        _send_blob(repository, digests[name], path)
    _send_blob(repository, _digest(EMPTY), EMPTY)
    layers = [
        _describe("application/octet-stream", digests[name], path.stat().st_size)
        | {"annotations": {"org.opencontainers.image.title": name}}
        for name, path in parcel.files.items()
    ]
    manifest = canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": KIND,
            "config": _describe("application/vnd.oci.empty.v1+json", _digest(EMPTY), len(EMPTY)),
            "layers": layers,
            "annotations": _annotate(parcel),
        }
    )
    digest, address = _digest(manifest), f"{repository.address}/manifests/{quote(tag)}"
    _, before = repository.send("HEAD", address, {"Accept": MANIFEST_TYPE})
    repository.send("PUT", address, {"Content-Type": MANIFEST_TYPE}, manifest)
    place, earlier = f"{repository.host}/{repository.name}", before.get("Docker-Content-Digest")
    more = ["who may read it is set in the registry"]
    more += [f"the tag was at {earlier} before"] if earlier not in (None, digest) else []
    name = parcel.manifest.name
    get = f"oras pull {place}@{digest} --output {name}", f"compress-run verify {name}"
    return describe_push(parcel, f"oci://{place}:{tag}", digest, None, more, *get)


def _send_blob(repository: Repository, digest: str, content: Path | bytes) -> None:
    """Send a blob that the repository does not have."""
    if repository.send("HEAD", f"{repository.address}/blobs/{digest}")[0] != 404:
        return
    _, answer = repository.send("POST", f"{repository.address}/blobs/uploads/", {"Content-Length": "0"}, b"")
    place = urljoin(f"{repository.address}/", answer.get("Location") or "")
    url = f"{place}{'&' if '?' in place else '?'}digest={quote(digest)}"
    repository.send("PUT", url, {"Content-Type": "application/octet-stream"}, content)


def _annotate(parcel: Parcel) -> dict[str, str]:
    """Return what registries show of a bundle, without a time: the same bundle has the same digest."""
    manifest, prefix = parcel.manifest, "org.opencontainers.image"
    said = {
        f"{prefix}.title": manifest.name,
        f"{prefix}.description": f"{manifest.task}, compressed for {manifest.target} by {manifest.created_by}",
        f"{prefix}.licenses": parcel.licence,
        "compress.digest": manifest.digest,
        "compress.model": str(parcel.lock["model"]["source"]),
    }
    return {name: value for name, value in said.items() if value}


def _describe(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": kind, "digest": digest, "size": size}


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _read_reason(error: HTTPError) -> str:
    """Return what a registry says of its refusal, in brackets; "" where it says nothing."""
    try:
        listed = json.loads(error.read(2**16))["errors"]
        return f" ({'; '.join(str(entry.get('message') or entry['code']) for entry in listed)})"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
