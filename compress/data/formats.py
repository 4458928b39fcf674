"""npz, csv/tsv, jsonl and plain text as tables."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from compress.data.table import Table
from compress.errors import SourceError
from compress.specs import DataSpec
from runtime.bundle.columns import Array
from runtime.bundle.files import sha256_of
from runtime.bundle.npz import NpzError, read_headers, read_rows


def open_npz(path: Path) -> Table:
    """Open an npz as a table with one column for each array; pickled objects are refused."""
    try:
        headers = read_headers(path)
    except NpzError as error:
        raise SourceError(f"{path}: cannot be read as an npz of arrays: {error}") from error

    def read(column: str, rows: Array) -> Array:
        try:
            return read_rows(path, column, rows)
        except NpzError as error:
            raise SourceError(f"{path}: array '{column}' cannot be read: {error}") from error

    lengths = {name: header.shape[0] if header.shape else 0 for name, header in headers.items()}
    return Table(str(path), lengths, read, (path,), sha256_of(path))


def open_csv(path: Path, spec: DataSpec, separator: str) -> Table:
    """Open a csv file; a header line gives the names, unless the spec has `names` or an index among its `columns`.

    Without a header, names are the spec's or "0", "1", ..., and further fields at a row's end are passed over. With a
    header, a row with more fields than names is refused: a separator inside a text would shift the columns unseen.
    """
    separator = spec.separator or separator
    rows, lines = _read_csv_rows(path, separator, csv.QUOTE_MINIMAL if spec.quoting else csv.QUOTE_NONE)
    header = spec.names is None and not any(isinstance(column, int) for column in spec.columns.values())
    names = spec.names or tuple(rows[0] if header else map(str, range(len(rows[0]))))
    rows, lines = (rows[1:], lines[1:]) if header else (rows, lines)
    if len(set(names)) != len(names):
        raise SourceError(f"{path}: column names are not distinct: {', '.join(names)}; give `names:` or column numbers")

    def place(row: int) -> str:
        return f"line {lines[row]}"

    def field(row: int, index: int) -> str:
        n = len(rows[row])
        if n <= index or (header and n > len(names)):
            raise SourceError(
                f"{path}: {place(row)} has {n} fields, but column '{names[index]}' needs {index + 1} of {len(names)}; "
                "mend the line, or set `separator:` or `quoting:`"
            )
        return rows[row][index]

    def read(column: str, chosen: Array) -> list[str]:
        index = names.index(column)
        return [field(int(row), index) for row in chosen]

    hint = "; if the file has no header line, give `names:`, or column numbers in `columns:`" if header else ""
    return Table(str(path), dict.fromkeys(names, len(rows)), read, (path,), sha256_of(path), place=place, hint=hint)


def open_jsonl(path: Path) -> Table:
    """Open a file of one JSON object a line as a table; the first object's keys are the columns."""
    lines = [(number, line) for number, line in enumerate(_read_lines(path), 1) if line.strip()]
    objects = [_parse_json_object(path, number, line) for number, line in lines]

    def place(row: int) -> str:
        return f"line {lines[row][0]}"

    def value(row: int, column: str) -> Any:
        if column not in objects[row]:
            raise SourceError(f"{path}: {place(row)} has no '{column}'; it has: {', '.join(objects[row])}")
        return objects[row][column]

    def read(column: str, rows: Array) -> list[Any]:
        return [value(int(row), column) for row in rows]

    lengths = dict.fromkeys(objects[0], len(objects)) if objects else {}
    return Table(str(path), lengths, read, (path,), sha256_of(path), place=place)


def open_text(path: Path) -> Table:
    """Open a text file of one sample a line, in the column "text"; blank lines are passed over."""
    lines = [(number, line) for number, line in enumerate(_read_lines(path), 1) if line.strip()]

    def read(column: str, rows: Array) -> list[str]:
        return [lines[row][1] for row in rows]

    def place(row: int) -> str:
        return f"line {lines[row][0]}"

    return Table(str(path), {"text": len(lines)}, read, (path,), sha256_of(path), place=place)


def _read_csv_rows(path: Path, separator: str, quoting: Any) -> tuple[list[list[str]], list[int]]:
    """Return the rows that are not blank, and the line on which each ends."""
    rows, lines = [], []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=separator, quoting=quoting, strict=True)
            for row in reader:
                if row:
                    rows.append(row)
                    lines.append(reader.line_num)
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: is not UTF-8 text: {error}") from error
    except csv.Error as error:
        raise SourceError(f"{path}: line {reader.line_num}: {error}; check `separator:` and `quoting:`") from error
    if not rows:
        raise SourceError(f"{path}: holds only blank lines")
    return rows, lines


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: is not UTF-8 text: {error}") from error


def _parse_json_object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise SourceError(f"{path}: line {number}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SourceError(
            f"{path}: line {number}: is {type(value).__name__}; each line must be an object {{column: value}}"
        )
    return value
