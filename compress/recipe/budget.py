"""How much a recipe may be: files, characters, values and depth, counted while it is read, references put in.

The largest recipes have a few hundred values; class names come to some ten thousand. What is more is an accident
(another file in the recipe's place) or an attack (ten lines that stand for 10 GB).
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_FILE_BYTES = 2**20
MOST_FILES = 100
MOST_CHARACTERS = 2**22
"""A recipe is written by hand: what is larger than these is a mistake, or was made to exhaust the reader."""
MOST_VALUES = 50_000
"""Read and written in some seconds; the largest recipes name some ten thousand classes."""
MOST_DEPTH = 64
"""Mappings and lists inside each other, also through variables."""


class OverBudget(Exception):
    """The recipe is more than a recipe can be; the message is the rule."""


@dataclass(frozen=True)
class ValueSize:
    """What a value takes wherever it is put."""

    values: int = 1
    characters: int = 0
    depth: int = 0


@dataclass
class Budget:
    """What is spent so far of what one recipe may take."""

    files: int = 0
    characters: int = 0
    values: int = 0

    def spend(self, size: ValueSize) -> None:
        """Count a value in. Raises OverBudget."""
        self.values += size.values
        self.characters += size.characters
        if self.values > MOST_VALUES:
            raise OverBudget(f"more than {MOST_VALUES} values, with those that aliases and variables stand for")
        if self.characters > MOST_CHARACTERS:
            raise OverBudget(f"more than {MOST_CHARACTERS} characters, with those that variables stand for")

    @property
    def may_outgrow_a_file(self) -> bool:
        """Return whether the recipe, written with all that its variables stand for, may be more than a file can be.

        A value takes less than 200 bytes beside its own: a line, its indentation. A character takes 10 as an escape.
        """
        return 200 * self.values + 10 * self.characters > MOST_FILE_BYTES

    def spend_file(self, n_characters: int) -> None:
        """Count a file in. Raises OverBudget."""
        self.files += 1
        if self.files > MOST_FILES:
            raise OverBudget(f"more than {MOST_FILES} files to read, with those that included ones include")
        self.spend(ValueSize(0, n_characters))


def check_depth(depth: int) -> None:
    """Raise OverBudget where values are nested deeper than a recipe may be."""
    if depth > MOST_DEPTH:
        raise OverBudget(f"nested more than {MOST_DEPTH} deep")
