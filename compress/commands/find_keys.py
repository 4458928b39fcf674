"""Find what opens something: tokens, private keys and passwords in files that are about to leave the machine."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

KEYS = {
    "a private key": rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----",
    "a token of Hugging Face": rb"hf_(?<!\w...)[A-Za-z0-9]{30,}",
    "a token of GitHub": rb"gh[oprsu]_(?<!\w....)[A-Za-z0-9]{36,}",
    "a fine-grained token of GitHub": rb"github_pat_[A-Za-z0-9_]{60,}",
    "a token of GitLab": rb"glpat-[A-Za-z0-9_-]{20,}",
    "a token of Slack": rb"xox[abeprs]-(?<!\w.....)[A-Za-z0-9-]{20,}",
    "an access key of AWS": rb"A[KS]IA(?<!\w....)[A-Z0-9]{16}\b",
    "a key of Google": rb"AIza(?<!\w....)[A-Za-z0-9_-]{35}",
    "a key of OpenAI or Anthropic": rb"sk-(?<![\w-]...)[A-Za-z0-9_-]{32,}",
    "a password in an address": rb"://[^\s/:@\"'{}<>$]{1,64}:[^\s/@\"'{}<>$]{4,128}@[\w.-]+",
}
"""Each begins with letters, which are sought at 1 GB/s; with a look-behind before them it is 30 MB/s."""
WRITTEN = (
    rb"(?i)\b\w*(?:password|passwd|secret|api_?key|access_?key|auth_?token|access_?token|hf_token)[\"']?"
    rb"\s*[:=]\s*[\"']?(?!\$|null\b|none\b)[^\s\"'{}\[\],]{6,}"
)
"""A value under a name that says what it is. In what people write alone: weights, vocabularies and configurations have
a `pad_token` and words like these."""
BY_HAND = ("recipe.yaml", "lock.json", "provenance.json")
MOST_BYTES, END_BYTES = 2**30, 64 * 2**20
"""A larger file is weights: what was written into it lies in its head or at its end. 1 GiB takes ten seconds."""


def find_keys(files: Mapping[str, Path]) -> Iterator[str]:
    """Yield for each file that holds something like a key its name, the line, and what it looks like; never the key."""
    for name, path in files.items():
        patterns = KEYS | ({"a password or token": WRITTEN} if name in BY_HAND else {})
        for line, kind in sorted(set(_search_file(path, patterns))):
            yield f"{name}:{line}: {kind}"


def _search_file(path: Path, patterns: Mapping[str, bytes]) -> Iterator[tuple[int, str]]:
    size = path.stat().st_size
    if not size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        spans = [(0, size)] if size <= MOST_BYTES else [(0, END_BYTES), (size - END_BYTES, size)]
        for begin, end in spans:
            for kind, pattern in patterns.items():
                for match in re.compile(pattern).finditer(data, begin, end):
                    yield data[begin : match.start()].count(b"\n") + 1, kind
