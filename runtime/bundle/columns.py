"""Samples as named columns of one length, and how rows are taken from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from runtime.errors import UsageError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Columns: TypeAlias = Mapping[str, Any]
"""Role or input name -> array [N, ...] or list of N."""
Rows: TypeAlias = slice | Array | None
Encoded: TypeAlias = tuple[dict[str, Array], dict[str, Array]]
"""A model's inputs of a batch, and what is known of its samples beside them: name -> array [n, ...]."""


def stack_rows(rows: Sequence[Array]) -> Array:
    """Return one array [N, ...] of the rows; of rows of several shapes or types an array of objects [N]."""
    if len({(row.shape, row.dtype) for row in rows}) == 1:
        return np.stack(rows)
    ragged = np.empty(len(rows), object)
    for i, row in enumerate(rows):
        ragged[i] = row
    return ragged


def count(columns: Columns) -> int:
    """Return the number of samples; UsageError if there is no column, no sample, or the columns differ in length."""
    if not columns:
        raise UsageError("no columns: give at least one of image, text, or a model input")
    lengths = {name: _count_rows(name, column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise UsageError(f"columns differ in length: {', '.join(f'{name} {n}' for name, n in lengths.items())}")
    n = next(iter(lengths.values()))
    if not n:
        raise UsageError(f"no samples: the columns {', '.join(columns)} are empty")
    return n


def take(columns: Columns, name: str, rows: Rows = None) -> Any:
    """Return the rows of one column, as array or list as it is; UsageError if it is missing or nothing is left."""
    if name not in columns:
        raise UsageError(f"column '{name}' is missing; the samples have: {', '.join(columns) or 'no columns'}")
    column = columns[name]
    _count_rows(name, column)
    if isinstance(rows, np.ndarray) and not isinstance(column, np.ndarray):
        column = [column[i] for i in rows]
    elif rows is not None:
        column = column[rows]
    if not len(column):
        raise UsageError(f"column '{name}' holds no samples: an empty batch cannot be run")
    return column


def take_texts(columns: Columns, name: str, rows: Rows = None) -> list[str]:
    """Return the rows of one column, as `take` does, all of them str; UsageError names the first that is not."""
    return [check_text(name, i, item) for i, item in enumerate(take(columns, name, rows))]


def check_text(name: str, i: int, item: Any) -> str:
    """Return `item` itself as a plain str; UsageError where it is no text."""
    if not isinstance(item, str):
        raise UsageError(f"column '{name}', sample {i}: expected a text, found {type(item).__name__}")
    return str(item)  # a numpy string becomes a plain one


def _count_rows(name: str, column: Any) -> int:
    if (isinstance(column, np.ndarray) and column.ndim) or isinstance(column, (list, tuple)):
        return len(column)
    raise UsageError(f"column '{name}' is {type(column).__name__}: give an array [N, ...] or a list of N samples")
