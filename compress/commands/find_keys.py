"""Find what opens something: tokens, private keys and passwords in files that are about to leave the machine."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

KEYS = {
    "a private key": rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----",
    "a token of Hugging Face": rb"\bhf_[A-Za-z0-9]{30,}",
    "a token of GitHub": rb"\bgh[oprsu]_[A-Za-z0-9]{36,}|\bgithub_pat_[A-Za-z0-9_]{60,}",
    "a token of GitLab": rb"\bglpat-[A-Za-z0-9_-]{20,}",
    "a token of Slack": rb"\bxox[abeprs]-[A-Za-z0-9-]{20,}",
    "an access key of AWS": rb"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a key of Google": rb"\bAIza[A-Za-z0-9_-]{35}",
    "a key of OpenAI or Anthropic": rb"(?<![\w-])sk-[A-Za-z0-9_-]{32,}",
    "a password in an address": rb"\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@\"'{}<>$]{1,64}:[^\s/@\"'{}<>$]{4,128}@[\w.-]+",
}
WRITTEN = (
    rb"(?i)\b\w*(?:password|passwd|secret|api_?key|access_?key|auth_?token|access_?token|hf_token)[\"']?"
    rb"\s*[:=]\s*[\"']?(?!\$|null\b|none\b)[^\s\"'{}\[\],]{6,}"
)
"""A value under a name that says what it is. In what people write alone: weights, vocabularies and configurations have
a `pad_token` and words like these."""
BY_HAND = ("recipe.yaml", "lock.json", "provenance.json")
MOST_BYTES, END_BYTES = 64 * 2**20, 4 * 2**20
"""A larger file is weights: what was written into it lies in its head or at its end."""


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
