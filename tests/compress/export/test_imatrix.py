"""Importance matrices: what was written is read, older files too, and another model's are known as such."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compress.blocks.squares import Squares
from compress.errors import SourceError
from compress.export.gguf_tensors import TensorEntry
from compress.export.imatrix import FILE, Imatrix, match_imatrix, read_imatrix, write_imatrix

pytest.importorskip("gguf")
EXPERTS = tuple(f"h.0.experts.{i}.up_proj.weight" for i in range(3))
ENTRIES = (
    TensorEntry("h.0.q.weight", "blk.0.attn_q.weight", (4, 8), True),
    TensorEntry(EXPERTS[0], "blk.0.ffn_up_exps.weight", (3, 4, 8), True, experts=EXPERTS),
    TensorEntry("h.0.norm.weight", "blk.0.attn_norm.weight", (8,)),
)
LAYERS = ["h.0.q", *(name.removesuffix(".weight") for name in EXPERTS)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_what_was_written_is_read_for_each_layer(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [int(n) for n in rng.integers(1, 1000, len(LAYERS))]
    rows[2] = 0  # an expert that no token reached
    squares = {layer: Squares(rng.random(8) * n, n) for layer, n in zip(LAYERS, rows, strict=True)}
    note = write_imatrix(tmp_path, "llama", ENTRIES, Imatrix(squares, 5))
    assert "inputs of 2 tensors" in note.text
    found, problems = match_imatrix(ENTRIES, read_imatrix(tmp_path / FILE))
    assert not problems and list(found) == LAYERS
    for layer, each in squares.items():
        assert np.allclose(found[layer], each.sums / max(each.n_rows, 1), rtol=1e-6)


def write_dat(path: Path, name: str, values: np.ndarray, n_calls: int) -> Path:
    head = struct.pack("<ii", 1, len(name)) + name.encode() + struct.pack("<ii", n_calls, values.size)
    path.write_bytes(head + values.astype("<f4").tobytes() + struct.pack("<i", n_calls))
    return path


def test_an_older_file_is_read(tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.float32)
    path = write_dat(tmp_path / "imatrix.dat", "blk.0.attn_q.weight", 3 * values, 3)
    assert np.allclose(match_imatrix(ENTRIES, read_imatrix(path))[0]["h.0.q"], values)


@pytest.mark.parametrize(
    ("name", "n", "words"),
    [
        ("blk.7.attn_q.weight", 8, "blk.7.attn_q.weight is no tensor of this model"),
        ("blk.0.attn_q.weight", 16, "blk.0.attn_q.weight has 16 inputs, and this model's has 8"),
        ("blk.0.ffn_up_exps.weight", 16, "has 16 inputs, and this model's has 24"),
    ],
)
def test_another_model_s_is_known(name: str, n: int, words: str) -> None:
    assert words in match_imatrix(ENTRIES, {name: np.ones(n, np.float32)})[1][0]


@pytest.mark.parametrize("data", [b"", b"GGUF", b"no such file", struct.pack("<ii", 1, 2**30), struct.pack("<i", 0)])
def test_what_is_none_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(SourceError, match=r"x is no importance matrix of llama\.cpp"):
        read_imatrix(tmp_path / "x")


def test_numbers_that_are_no_squares_are_refused(tmp_path: Path) -> None:
    path = write_dat(tmp_path / "x", "blk.0.attn_q.weight", np.full(8, -1.0), 1)
    with pytest.raises(SourceError, match=r"attn_q\.weight holds what is no mean square"):
        read_imatrix(path)
