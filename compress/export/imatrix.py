"""llama.cpp's importance matrix: the sums of squares of what each tensor of a GGUF file reads, from and to a file.

llama-imatrix writes it as a GGUF file (`TENSOR.in_sum2` [experts, in], `TENSOR.counts` [experts, 1]: of how many rows),
and wrote .dat before, which is read, too. Layouts are those of common/imatrix-loader.cpp of llama.cpp.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compress.blocks.squares import Squares
from compress.errors import SourceError
from compress.export.gguf_metadata import write_all
from compress.export.gguf_tensors import OUTPUT, TensorEntry, import_gguf
from compress.facts import Note

FILE = "imatrix.gguf"
SUMS, COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True)
class Imatrix:
    """What a file is made of: layer -> squares of its inputs, over the calibration set of so many samples."""

    squares: Mapping[str, Squares]
    n_samples: int


def write_imatrix(folder: Path, architecture: str, entries: Iterable[TensorEntry], imatrix: Imatrix) -> Note:
    """Write the squares of a model's layers, under the names that its tensors have in GGUF; return a note on the file.

    Raises ExportError without the `gguf` package.
    """
    writer = import_gguf().GGUFWriter(folder / FILE, architecture)
    n_rows = max((each.n_rows for each in imatrix.squares.values()), default=0)
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["data.calibration"])
    writer.add_uint32("imatrix.chunk_count", imatrix.n_samples)
    writer.add_uint32("imatrix.chunk_size", n_rows // imatrix.n_samples)
    n_tensors = 0
    for entry in entries:
        layers = _list_layers(entry)
        if entry.changed or not entry.matrix or not imatrix.squares.keys() >= set(layers):
            continue  # llama.cpp multiplies another matrix, or none
        parts = [imatrix.squares[layer] for layer in layers]
        writer.add_tensor(entry.written + SUMS, np.stack([each.sums for each in parts]).astype(np.float32))
        writer.add_tensor(entry.written + COUNTS, np.array([[each.n_rows] for each in parts], np.float32))
        n_tensors += 1
    write_all(writer)
    text = f"{FILE}: inputs of {n_tensors} tensors over {n_rows} tokens, for `llama-quantize --imatrix`"
    return Note("info", text)


def read_imatrix(path: Path) -> dict[str, np.ndarray]:
    """Return tensor -> mean square of each input, float32, flat: [in], of stacked experts [experts * in].

    Zeros where no row is counted. SourceError: the file is no importance matrix, or a damaged one.
    """
    with path.open("rb") as file:
        magic = file.read(4)
    try:
        found = _read_gguf(path) if magic == b"GGUF" else _read_dat(path.read_bytes())
    except (KeyError, IndexError, ValueError, struct.error) as error:
        found = {}
        why = f" ({error})"
    else:
        why = ""
    if not found:
        raise SourceError(f"{path.name} is no importance matrix of llama.cpp{why}; give a file of llama-imatrix")
    if odd := next((name for name, means in found.items() if not (np.isfinite(means) & (means >= 0)).all()), ""):
        raise SourceError(f"{path.name}: {odd} holds what is no mean square (NaN, Inf, or below 0)")
    return found


def _read_gguf(path: Path) -> dict[str, np.ndarray]:
    tensors = {tensor.name: tensor.data for tensor in import_gguf().GGUFReader(path).tensors}
    means = {}
    for name in (name.removesuffix(SUMS) for name in tensors if name.endswith(SUMS)):
        counts = np.asarray(tensors[name + COUNTS], np.float32).reshape(-1, 1)
        sums = np.asarray(tensors[name + SUMS], np.float32).reshape(len(counts), -1)
        means[name] = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0).reshape(-1)
    return means


def _read_dat(data: bytes) -> dict[str, np.ndarray]:
    file, means = io.BytesIO(data), {}

    def read_int() -> int:
        value: int = struct.unpack("<i", file.read(4))[0]
        return value

    for _ in range(read_int()):
        name = file.read(read_int()).decode()
        n_calls, n_values = read_int(), read_int()
        values = np.frombuffer(file.read(4 * n_values), "<f4", n_values)
        means[name] = values / np.float32(n_calls) if n_calls > 0 else values
    return means


def match_imatrix(
    entries: Iterable[TensorEntry], means: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return layer -> mean square of each of its inputs [in], and why these are not the tensors of the file."""
    by_name = {entry.written: entry for entry in entries}
    problems = []
    importance: dict[str, np.ndarray] = {}
    for name, values in means.items():
        entry = by_name.get(name)
        if entry is None:
            problems += [] if name == OUTPUT else [f"{name} is no tensor of this model"]
            continue
        layers = _list_layers(entry)
        if values.size != len(layers) * entry.inputs:
            problems.append(f"{name} has {values.size} inputs, and this model's has {len(layers) * entry.inputs}")
        elif not entry.changed:
            importance |= zip(layers, values.reshape(len(layers), -1), strict=True)
    return importance, problems


def _list_layers(entry: TensorEntry) -> list[str]:
    return [name.removesuffix(".weight") for name in entry.experts or (entry.name,)]
