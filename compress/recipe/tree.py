"""A tree of values that know where they stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compress.recipe.places import Path, Position

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Node:
    """A value, where it stands and where its key does. `written` is its text before a variable took that place."""

    value: Scalar | dict[str, Node] | list[Node]
    place: Position
    key_place: Position | None = None
    written: str | None = None

    def child(self, key: str | int) -> Node | None:
        if isinstance(self.value, dict) and isinstance(key, str):
            return self.value.get(key)
        if isinstance(self.value, list) and isinstance(key, int) and 0 <= key < len(self.value):
            return self.value[key]
        return None

    def find(self, path: Path) -> Node:
        """Return the node at `path`, or the deepest one on the way to it."""
        node = self
        for key in path:
            child = node.child(key)
            if child is None:
                return node
            node = child
        return node

    def children(self) -> list[tuple[str | int, Node]]:
        if isinstance(self.value, dict):
            return list(self.value.items())
        return list(enumerate(self.value)) if isinstance(self.value, list) else []


def plain(node: Node) -> Any:
    """Turn the tree into ordinary dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def merge(under: Node, over: Node) -> Node:
    """Put `over` on top of `under`: mappings are merged key by key, everything else is replaced."""
    if not (isinstance(under.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(under.value)
    for key, child in over.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return Node(merged, over.place, over.key_place)
