"""Tokens of an answer to text as they come: never half a character, never what belongs to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer makes of bytes that are no whole character (yet)."""
CONTEXT = 6
"""Tokens of the prompt that are decoded along: whether a token begins with a space can depend on those before it."""


class TextStream:
    """One answer. `push` gives the text that is certain after a token, `close` what was still held back.

    Tokens are decoded together with those before them, and their text is what that adds. It is held back while it ends
    in an unfinished character, or while it could be the beginning of a stop string. At a stop string the text ends
    before it, and `stopped` is true.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids = [int(token) for token in prompt[-CONTEXT:]]
        self._shown, self._decoded = 0, len(self._ids)
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token, and return the text that is certain now; nothing after `stopped`."""
        self._ids.append(token)
        return self._release_text(self._decode_new_text(False), False)

    def close(self) -> str:
        """Return the rest of the text, an unfinished character as the tokenizer shows it."""
        return self._release_text(self._decode_new_text(True), True)

    def _decode_new_text(self, at_end: bool) -> str:
        before = self._decode_ids(self._ids[self._shown : self._decoded])
        now = self._decode_ids(self._ids[self._shown :])
        if len(now) <= len(before) or (now.endswith(UNFINISHED) and not at_end):
            return ""
        self._shown, self._decoded = self._decoded, len(self._ids)
        return now[len(before) :]

    def _decode_ids(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _release_text(self, new: str, at_end: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        places = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        self.stopped = bool(places)
        keep = 0 if at_end else _count_stop_prefix(text, self._stop)
        piece = text[: min(places)] if places else text[: len(text) - keep]
        self._held = "" if places else text[len(text) - keep :]
        self.text += piece
        return piece


def _count_stop_prefix(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of `text` could begin one of the stop strings."""
    longest = max(map(len, stops), default=1)
    return next(
        (n for n in range(min(len(text), longest - 1), 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0
    )
