"""A model hub on this machine: what huggingface_hub's own client asks for to make, fill and read a repository.

Commits are kept whole: a repository is a list of them, each all of its files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml
from local_servers import Answer, Call

TOKEN = "hf_" + "double" * 6
NOT_FOUND = Answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})


@dataclass
class Repository:
    private: bool
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{".gitattributes": b""}])
    parents: list[str | None] = field(default_factory=list)
    """What each commit was made upon, as the client said."""

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1]

    @property
    def sha(self) -> str:
        return hashlib.sha1(str(len(self.commits)).encode()).hexdigest()


@dataclass
class Hub:
    """The double; `address` is that of its server."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    refuse: str = ""
    """A pattern of paths that are answered with 403."""

    def answer(self, call: Call) -> Answer:
        self.calls.append(call)
        if self.refuse and re.search(self.refuse, call.path):
            return Answer(403, {"error": "the double refuses this"})
        if upload := re.fullmatch(r"/lfs/([0-9a-f]{64})", call.path):  # as a store of files, it asks nobody's name
            assert hashlib.sha256(call.body).hexdigest() == upload[1]
            self.blobs[upload[1]] = call.body
            return Answer()
        if call.headers.get("authorization") != f"Bearer {TOKEN}":
            return Answer(401, {"error": "Invalid credentials"}, {"X-Error-Code": "RepoNotFound"})
        if call.path == "/api/repos/create":
            return self._create(call.json)
        if call.path == "/api/validate-yaml":
            return self._validate(call.json["content"])
        if lfs := re.fullmatch(r"/(.+/.+)\.git/info/lfs/objects/batch", call.path):
            return self._list_uploads(lfs[1], call.json)
        if file := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", call.path):
            return self._read(file[1], unquote(file[3]))
        if asked := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/(\w+)/([^/]+))?", call.path):
            repository = self.repositories.get(asked[1])
            if repository is None:
                return NOT_FOUND
            reply = {"preupload": self._choose_modes, "commit": self._commit, "tree": self._list_tree}
            return reply.get(asked[2], self._describe)(asked[1], repository, call)
        return Answer(404, {"error": f"the double has no {call.method} {call.path}"})

    def _create(self, asked: dict[str, Any]) -> Answer:
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.repositories:
            return Answer(409, {"error": "exists"})
        self.repositories[name] = Repository(asked.get("visibility") == "private")
        return Answer(200, {"url": f"{self.address}/{name}"})

    def _validate(self, card: str) -> Answer:
        header = yaml.safe_load(card.split("---\n")[1])
        wrong = [] if isinstance(header, dict) else [{"message": "no mapping"}]
        return Answer(400 if wrong else 200, {"errors": wrong, "warnings": []})

    def _describe(self, name: str, repository: Repository, call: Call) -> Answer:
        files = [{"rfilename": file} for file in repository.files]
        about = {"private": repository.private, "sha": repository.sha, "siblings": files, "tags": []}
        return Answer(200, {"_id": "1", "id": name, "modelId": name, **about})

    def _choose_modes(self, name: str, repository: Repository, call: Call) -> Answer:
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith((".onnx", ".npz")) else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in call.json["files"]
        ]
        return Answer(200, {"files": modes})

    def _list_uploads(self, name: str, asked: dict[str, Any]) -> Answer:
        objects = []
        for file in asked["objects"]:
            to = {"upload": {"href": f"{self.address}/lfs/{file['oid']}"}}
            objects.append(file if file["oid"] in self.blobs else {**file, "actions": to})
        return Answer(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name: str, repository: Repository, call: Call) -> Answer:
        lines = [json.loads(line) for line in call.body.splitlines()]
        parent = lines[0]["value"].get("parentCommit")
        if parent not in (None, repository.sha):
            return Answer(412, {"error": "the branch has moved"})
        files = dict(repository.files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        repository.commits.append(files)
        repository.parents.append(parent)
        oid = repository.sha
        return Answer(200, {"success": True, "commitOid": oid, "commitUrl": f"{self.address}/{name}/commit/{oid}"})

    def _list_tree(self, name: str, repository: Repository, call: Call) -> Answer:
        return Answer(
            200,
            [
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in repository.files.items()
            ],
        )

    def _read(self, name: str, file: str) -> Answer:
        repository = self.repositories.get(name)
        if repository is None:
            return NOT_FOUND
        if file not in repository.files:
            return Answer(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"})
        data = repository.files[file]
        etag = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": repository.sha}
        return Answer(200, data, {**etag, "Accept-Ranges": "none"})


def cache_as_hub(folder: Path) -> None:
    """Keep the files of a folder in another, under their digests, with links of their names in their place."""
    blobs = folder.parent / f"{folder.name}.blobs"
    blobs.mkdir()
    for file in [path for path in folder.iterdir() if path.is_file()]:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blobs / digest)
        file.symlink_to(Path("..") / blobs.name / digest)
