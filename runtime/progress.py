"""How long loops say where they are: what wraps their items in a bar, or counts them for a log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

Item = TypeVar("Item")


class Progress(Protocol):
    """Wraps the items of a loop; `text` names it in a word or two, `most_s`: by when it ends, whatever is left."""

    def __call__(self, items: Sequence[Item], text: str, /, most_s: float | None = None) -> Iterable[Item]:
        """Return the items, which say where the loop is as they are taken."""
        ...


def no_progress(items: Sequence[Item], text: str, /, most_s: float | None = None) -> Iterable[Item]:
    """Say nothing."""
    return items
