"""npz files with changed bytes: read alike by everyone who reads them, or refused by an error of the reader's kind."""

from __future__ import annotations

import io
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import assert_done_or_refused, corpus, fuzz
from hypothesis import given
from hypothesis import strategies as st

from compress.data.table import open_npz
from runtime.bundle.samples import read_npz, write_npz

RNG = np.random.default_rng(0)


def small_files() -> list[bytes]:
    """An npz of each kind: ours, with columns of one and of several arrays; numpy's, plain and compressed."""
    files = []
    arrays: dict[str, Any] = {"x": RNG.standard_normal((4, 3)).astype(np.float32), "label": np.arange(4)}
    for save in (
        lambda path: write_npz(path, {**arrays, "image": [np.zeros((2, n, 3), np.uint8) for n in (1, 2)]}),
        lambda path: np.savez(path, **arrays, text=np.array(["a", "bc"]), f=np.asfortranarray(np.eye(3))),
        lambda path: np.savez_compressed(path, **arrays, zeros=np.zeros((40, 50))),
    ):
        file = io.BytesIO()
        save(file)  # type: ignore[arg-type]
        files.append(file.getvalue())
    return files


FILES = small_files()
HEADERS = st.from_regex(r"\{'?descr'?: .{0,20}, 'fortran_order': \w+, 'shape': \(\d*(, \d+)*,?\), ?\}", fullmatch=True)
WORDS = (
    *("(4, 3)", "(-1,)", "(10**9,)", "(99999999999999999999,)", "(4L, 3)", "'|O'", "'<f4'", "'|V0'", "'<U1'", "None"),
    *("[('a', '<f4')]", "True", "False", "'descr'", "((((", "\n", "\0", "'", "é", "1e3", "{}", "lambda: 0", "-" * 999),
)
NAMES = ("x.npy", "x", "label[0000000].npy", "image[0000009].npy", "/etc/x.npy", "../x.npy", "é.npy", ".npy", "a/")


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    """Bytes of a file changed, or its arrays with changed headers in an archive that is whole."""
    content = bytearray(draw(st.sampled_from(FILES)))
    if draw(st.booleans()):
        for _ in range(draw(st.integers(1, 2))):
            at = draw(st.integers(0, len(content) - 1))
            content[at : at + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
        return bytes(content)
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            npy = old.read(name)
            text, values = npy[10:].split(b"\n", 1)
            if draw(st.integers(0, 3)) == 0:
                at = draw(st.integers(0, len(text)))
                word = draw(st.sampled_from(WORDS) | st.text(max_size=5)).encode()
                text = draw(HEADERS).encode() if draw(st.booleans()) else text[:at] + word + text[at + len(word) :]
            length = draw(st.integers(0, 300)) if draw(st.integers(0, 9)) == 0 else len(text) + 1
            npy = b"".join((npy[:8], length.to_bytes(2, "little"), text, b"\n", values))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of two entries of one name
                new.writestr(draw(st.sampled_from([name] * 9 + [*NAMES])), npy)
    return file.getvalue()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("npz") / "a.npz"


def assert_reads_alike_everywhere(kind: str, content: bytes, file: Path) -> None:
    """By the runtime and by the build side, whole and by rows."""
    file.write_bytes(content)
    columns = assert_done_or_refused(kind, lambda: read_npz(file), allowed=(1,))
    rows = assert_done_or_refused(f"{kind} by rows", lambda: read_table(file), allowed=(2,))
    if columns is not None and rows is not None:
        for name, array in rows.items():
            if name in columns:
                np.testing.assert_array_equal(array, columns[name][::-1])


def read_table(file: Path) -> dict[str, Any]:
    table = open_npz(file)
    return {name: table.read(name, np.arange(n)[::-1]) for name, n in table.lengths.items() if n}


@pytest.mark.parametrize("path", corpus("npz"), ids=lambda path: path.name)
def test_what_broke_once_is_read_or_refused(path: Path, file: Path) -> None:
    assert_reads_alike_everywhere("npz (corpus)", path.read_bytes(), file)


@fuzz(share=0.1, quick=60)
@given(content=archives())
def test_any_npz_is_read_or_refused(file: Path, content: bytes) -> None:
    assert_reads_alike_everywhere("npz", content, file)
