"""An exported graph with other values of the same parameters, in place of a second export of the same model.

Tracing a model takes minutes where it is large; what passes over blocks change (scales folded into weights, rotations,
rounded weights) are values alone. An exporter keeps a parameter under its own name, or transposed under another one, or
folds it into a constant (1 + a norm's weight). A place is found by name and by the value that was exported; where a
changed parameter has none, or two parameters might have the same, the graph is not refilled. What is refilled is
compared with torch on real inputs as every export is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compress.blocks.materialise import plain
from compress.graph.run import clone

Read = Callable[[str], np.ndarray]


@dataclass(frozen=True)
class _RefillPlace:
    """A constant of the graph that holds a parameter; `turned`: its transpose."""

    name: str
    turned: bool


def refill(model: ir.Model, names: Sequence[str], before: Read, after: Read) -> ir.Model | None:
    """Return a copy of the graph with the parameters' values `after`; None where a changed one's place is not sure.

    `names`: all of them, plain. `before`: reads the values that were exported, float32. The graph stays as it is.
    """
    places = _Places(model, names)
    values: dict[str, np.ndarray] = {}
    for name in names:
        old, new = before(name), after(name)
        changed = not np.array_equal(old, new)
        found = places.find(name, old) if old.dtype == np.float32 == new.dtype and old.shape == new.shape else []
        if changed and not found:
            return None
        for place in found:
            value = np.ascontiguousarray(new.T if place.turned else new)
            if not np.array_equal(values.setdefault(place.name, value), value):
                return None
    filled = clone(model)
    for name, value in values.items():
        filled.graph.initializers[name].const_value = ir.Tensor(value, name=name)
    return filled


class _Places:
    """Where parameters may lie among the graph's constants, by name and by content."""

    def __init__(self, model: ir.Model, names: Sequence[str]) -> None:
        self.names = set(names)
        self.named: dict[str, str] = {}
        self.alike: dict[str, list[str]] = {}
        for name, value in model.graph.initializers.items():
            if value.const_value is not None and value.dtype == ir.DataType.FLOAT:
                self.named[plain(name)] = name
                self.alike.setdefault(_digest(value.const_value.numpy()), []).append(name)

    def find(self, parameter: str, value: np.ndarray) -> list[_RefillPlace]:
        """Return the constants with its name or its value, as it is or transposed, but not those with another's name.

        Many parameters are all ones or zeros: by its value alone such a one is not found.
        """
        straight = self.alike.get(_digest(value), [])
        named = self.named.get(parameter)
        if named is not None and named not in straight:
            return []
        found = [] if named is None else [_RefillPlace(named, False)]
        if value.size and value.min() != value.max():
            turned = self.alike.get(_digest(value.T), []) if value.ndim == 2 else []
            found += [_RefillPlace(name, False) for name in straight if self._is_nameless(name)]
            found += [_RefillPlace(name, True) for name in turned if self._is_nameless(name)]
        return found

    def _is_nameless(self, constant: str) -> bool:
        return plain(constant) not in self.names


def _digest(array: np.ndarray) -> str:
    return f"{array.shape} {hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()}"
