"""What a pass finds out before its work where the recipe leaves it open: bits under an average, a learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from compress.blocks.sharing import from_main, main_process
from compress.context import PassContext, PassResult
from compress.facts import Note
from compress.store.durable import blame, seal, unseal
from runtime.bundle.files import write_whole

Form = TypeVar("Form")


@dataclass(frozen=True)
class Settled:
    """What was found, to be said beside the pass's result; nothing where the recipe gave it.

    `fields`: of the pass, with what it took; `measured`: layer, or what was tried -> named numbers.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def then(self, later: Settled) -> Settled:
        """Return both, the later one's fields in the place of this one's."""
        return Settled(
            {**self.fields, **later.fields}, (*self.notes, *later.notes), {**self.measured, **later.measured}
        )

    def add_to(self, result: PassResult[Form]) -> PassResult[Form]:
        """Return the result of the pass with what was found in its report."""
        measured = {name: dict(numbers) for name, numbers in result.measured.items()}
        for name, numbers in self.measured.items():
            measured.setdefault(name, {}).update(numbers)
        settled = result.settled | dict(self.fields)
        return replace(result, notes=(*self.notes, *result.notes), measured=measured, settled=settled)


def recall(context: PassContext, name: str) -> dict[str, Any] | None:
    """Return the record that a killed run kept, as the first process sees it; None where nothing whole is there."""
    record = None
    if context.work is not None and main_process() and (context.work / name).is_file():
        record = unseal((context.work / name).read_bytes())
    found: dict[str, Any] | None = from_main(record)
    return found


def keep(context: PassContext, name: str, record: Mapping[str, Any]) -> None:
    """Write a record of JSON values into the pass's folder of unfinished work, by the first process alone."""
    if context.work is None or not main_process():
        return
    with blame(context.work):
        context.work.mkdir(parents=True, exist_ok=True)
        write_whole(context.work / name, seal(record))
