"""A registry on this machine that speaks OCI distribution: who comes in, blobs, manifests; and what reads it back."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local_servers import Answer, Call

NAME, PASSWORD = "ada", "open"
CREDENTIALS = base64.b64encode(f"{NAME}:{PASSWORD}".encode()).decode()
NAME_OF = re.compile(r"/v2/(.+)/(?:blobs|manifests)/.+")


@dataclass
class Registry:
    """The double; `address` is that of its server."""

    address: str = ""
    uses: int = 4
    """How many requests a token is good for."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    """By tag and by digest."""
    tokens: dict[str, int] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    store: str = ""
    """HOST:PORT of another server that takes the files, as some registries have; "": this one does."""
    refuse: str = ""
    """A pattern of "METHOD PATH" that is answered with 403."""

    def answer(self, call: Call) -> Answer:
        self.calls.append(call)
        if call.path == "/token":
            return self._sell_token(call)
        if self.refuse and re.search(self.refuse, f"{call.method} {call.path}"):
            return Answer(403, {"errors": [{"code": "DENIED", "message": "the double refuses this"}]})
        token = call.headers.get("authorization", "").removeprefix("Bearer ")
        self.tokens[token] = self.tokens.get(token, 0) - 1
        if self.tokens[token] < 0:
            ask = f'Bearer realm="http://{self.address}/token",service="double",scope="repository:x:pull,push"'
            return Answer(401, {"errors": [{"code": "UNAUTHORIZED"}]}, {"WWW-Authenticate": ask})
        found = NAME_OF.fullmatch(call.path)
        assert found is not None, call.path
        if "/blobs/" in call.path:
            return self._answer_blob(call, found[1])
        return self._answer_manifest(call, call.path.rpartition("/")[2])

    def _sell_token(self, call: Call) -> Answer:
        if call.headers.get("authorization") != f"Basic {CREDENTIALS}":
            return Answer(401, {"errors": [{"code": "UNAUTHORIZED", "message": "wrong name or password"}]})
        assert "scope=repository%3A" in call.query
        token = f"token-{len(self.tokens)}"
        self.tokens[token] = self.uses
        return Answer(200, {"token": token})

    def _answer_blob(self, call: Call, name: str) -> Answer:
        if call.method == "POST":
            place = f"http://{self.store}/files" if self.store else f"/v2/{name}/blobs/uploads/1"
            return Answer(202, b"", {"Location": f"{place}?state=a"})
        if call.method == "PUT":
            return self.take_file(call)
        data = self.blobs.get(call.path.rpartition("/")[2])
        return Answer(404) if data is None else Answer(200, data)

    def take_file(self, call: Call) -> Answer:
        digest = call.query.replace("%3A", ":").partition("state=a&digest=")[2]
        if digest != digest_of(call.body):
            return Answer(400, {"errors": [{"code": "DIGEST_INVALID"}]})
        self.blobs[digest] = call.body
        return Answer(201)

    def _answer_manifest(self, call: Call, reference: str) -> Answer:
        if call.method == "PUT":
            named = json.loads(call.body)
            missing = [
                part["digest"] for part in (named["config"], *named["layers"]) if part["digest"] not in self.blobs
            ]
            if missing:
                return Answer(400, {"errors": [{"code": "MANIFEST_BLOB_UNKNOWN", "message": missing[0]}]})
            self.manifests |= {reference: call.body, digest_of(call.body): call.body}
            return Answer(201, b"", {"Docker-Content-Digest": digest_of(call.body)})
        data = self.manifests.get(reference)
        if data is None:
            return Answer(404)
        kind = json.loads(data)["mediaType"]
        return Answer(200, data, {"Docker-Content-Digest": digest_of(data), "Content-Type": kind})

    def pull(self, reference: str, folder: Path) -> dict[str, Any]:
        """Write the files of a manifest by their titles, as `oras pull` does; return the manifest."""
        manifest: dict[str, Any] = json.loads(self.manifests[reference])
        for layer in manifest["layers"]:
            data = self.blobs[layer["digest"]]
            assert (layer["digest"], layer["size"]) == (digest_of(data), len(data))
            path = folder / layer["annotations"]["org.opencontainers.image.title"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return manifest


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
