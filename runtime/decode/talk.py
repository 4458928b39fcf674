"""Write answers as they come: to one prompt, or to what a person types, the model staying in memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

from runtime.decode.generate import GeneratedText, Pieces, Request
from runtime.errors import UsageError
from runtime.processes.endings import read_stdin_line

INPUT = "> "
"""What a terminal shows where a person is to type."""
LONGEST_LINE = 2**20
"""Characters; what goes beyond is a line of its own."""


class Answering(Protocol):
    """What answers prompts, piece by piece: `Generator`, `AnswerGenerator`."""

    def stream(self, prompts: Any, request: Request, /) -> Pieces:
        """Yield (row, text) as it comes; return the results."""


def write_answer(answering: Answering, prompt: Any, request: Request) -> GeneratedText:
    """Print an answer as it comes, and on a terminal how fast it came. Errors are those of `stream`."""
    begun, first = time.perf_counter(), None
    pieces = answering.stream([prompt], request)
    while True:
        try:
            _, text = next(pieces)
        except StopIteration as end:
            (result,) = end.value
            break
        first = first or time.perf_counter()
        print(text, end="", flush=True)
    print(flush=True)
    if sys.stderr.isatty() and first is not None:
        print(describe_pace(len(result.token_ids), first - begun, time.perf_counter() - first), file=sys.stderr)
    return result


def describe_pace(n_tokens: int, first_s: float, rest_s: float) -> str:
    """Return how fast an answer came: the seconds until its first text, and those of the tokens after it."""
    first = f"{n_tokens} {'token' if n_tokens == 1 else 'tokens'}, the first after {1000 * first_s:.0f} ms"
    return f"[{first}, then {(n_tokens - 1) / rest_s:.1f} a second]" if n_tokens > 1 and rest_s > 0 else f"[{first}]"


def converse(answering: Answering, request: Request) -> None:
    """Answer each line of stdin until it ends. In a chat an answer knows what was said before it.

    A line that cannot be answered is told on stderr; of a chat that has grown too long, what was said is forgotten.
    """
    said: list[dict[str, str]] = []
    for line in _read_lines():
        said = [*said, {"role": "user", "content": line}] if request.chat else []
        try:
            result = write_answer(answering, said or line, request)
        except UsageError as error:
            print(f"error: {error}{'; what was said is forgotten' if len(said) > 1 else ''}", file=sys.stderr)
            said = []
            continue
        said = [*said, {"role": "assistant", "content": result.text}] if request.chat else []


def _read_lines() -> Iterator[str]:
    """Yield what is typed, line by line, without empty ones."""
    while True:
        if sys.stdin is not None and sys.stdin.isatty():
            print(INPUT, end="", file=sys.stderr, flush=True)
        line = read_stdin_line(LONGEST_LINE)
        if not line:
            return
        if line.strip():
            yield line.rstrip("\r\n")
