"""The reader of npz files: what numpy wrote comes back; what is damaged, hostile or too large is refused unread."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosts import Host
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from runtime.bundle import npz
from runtime.bundle.npz import NpzError, read_arrays, read_headers, read_rows

DTYPES = st.one_of(
    npst.integer_dtypes(), npst.unsigned_integer_dtypes(), npst.floating_dtypes(), npst.boolean_dtypes(),
    npst.unicode_string_dtypes(max_len=4),
)  # fmt: skip
ARRAYS = npst.arrays(DTYPES, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4), fill=st.nothing())


@given(
    st.dictionaries(st.sampled_from("abc"), ARRAYS, min_size=1),
    st.sampled_from([np.savez, np.savez_compressed]),
    st.sampled_from([np.ascontiguousarray, np.asfortranarray, np.flip, np.asarray]),
    st.sampled_from([7, 50, 10**6]),
    st.integers(0, 999),
)
def test_what_numpy_writes_comes_back(
    tmp_path: Path, arrays: dict[str, np.ndarray], save: Any, order: Any, chunk: int, seed: int
) -> None:
    """Read in pieces of `chunk` bytes: an array in several, a row in two."""
    arrays = {name: order(array) if array.ndim else array for name, array in arrays.items()}
    save(tmp_path / "a.npz", **arrays)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(npz, "_CHUNK", chunk)
        back = read_arrays(tmp_path / "a.npz")
        assert back.keys() == arrays.keys()
        for name, array in arrays.items():
            assert back[name].dtype == array.dtype and back[name].shape == array.shape
            assert back[name].tobytes() == array.tobytes()
            assert read_headers(tmp_path / "a.npz")[name].n_bytes == array.nbytes
            if array.ndim:
                rows = np.random.default_rng(seed).integers(0, max(1, len(array)), 9 if len(array) else 0)
                assert read_rows(tmp_path / "a.npz", name, rows).tobytes() == array[rows].tobytes()


def packed(tmp_path: Path, content: bytes, name: str = "x.npy", kind: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", kind) as archive:
        archive.writestr(name, content)
    return tmp_path / "a.npz"


def as_npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array)
    return file.getvalue()


def refusal(path: Path) -> str:
    with pytest.raises(NpzError) as caught:
        read_arrays(path)
    return str(caught.value)


NPY = as_npy(np.arange(4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (NPY[:-1], "array 'x' of shape (4,) and dtype int64 has 32 bytes, and its entry has room for 31"),
        (NPY + b"\0", "has 32 bytes, and its entry has room for 33"),
        (NPY.replace(b"(4,)", b"(8,)"), "has 64 bytes, and its entry has room for 32"),
        (NPY.replace(b"(4,), ", b"(-4,),"), "has shape (-4,) and dtype int64"),
        (NPY.replace(b"(4,)", b"(4, "), "array 'x' has a header that is none: b\"{'descr'"),
        (NPY.replace(b"'<i8'", b"'|V0'"), "has shape (4,) and dtype |V0"),
        (NPY[:8] + b"\xff\xff" + NPY[10:], "entry 'x.npy' has a header of 65535 bytes"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "entry 'x.npy' has a header of 4294967295 bytes"),
        (b"\x93NUMPY\x09\x00" + NPY[8:], "entry 'x.npy' is no array of numpy's format 1.0 or 2.0"),
        (b"", "entry 'x.npy' is no array of numpy's format 1.0 or 2.0"),
    ],
)
def test_a_header_that_its_entry_does_not_bear_out(tmp_path: Path, content: bytes, message: str) -> None:
    assert message in refusal(packed(tmp_path, content))


def test_entries_that_are_no_arrays(tmp_path: Path) -> None:
    assert refusal(packed(tmp_path, NPY, "x.txt")) == "entry 'x.txt' is no array (.npy)"
    assert "neither stored nor deflated" in refusal(packed(tmp_path, NPY, kind=zipfile.ZIP_LZMA))
    np.savez(tmp_path / "o.npz", o=np.array([{}]))
    assert refusal(tmp_path / "o.npz") == "array 'o' holds Python objects; save it with a numeric dtype"


def test_a_changed_value_is_seen(tmp_path: Path) -> None:
    path = packed(tmp_path, NPY)
    path.write_bytes(path.read_bytes().replace(b"\x03" + b"\0" * 7, b"\x05" + b"\0" * 7))
    assert "Bad CRC-32" in refusal(path)
    with pytest.raises(NpzError, match="Bad CRC-32"):
        read_rows(path, "x", np.array([0]))


def test_a_file_that_declares_more_than_fits_is_refused_before_it_is_read(tmp_path: Path, host: Host) -> None:
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros((1000, 500)), b=np.zeros(10))
    (tmp_path / "spoilt.npz").write_bytes((tmp_path / "a.npz").read_bytes().replace(bytes(8), b"\xff" * 8, 1))
    assert "Bad CRC-32" in refusal(tmp_path / "spoilt.npz")
    host.memory_bytes = 1_000_000
    assert refusal(tmp_path / "spoilt.npz") == "arrays of 3.8 MiB, and 781.2 KiB of memory may be taken"
    assert read_rows(tmp_path / "a.npz", "a", np.arange(100)).nbytes == 400_000
    with pytest.raises(NpzError, match=r"arrays of 1\.1 MiB"):
        read_rows(tmp_path / "a.npz", "a", np.arange(300))


def test_rows_that_are_not_there(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.zeros((3, 2)))
    with pytest.raises(NpzError, match="array 'a' has 3 rows, not one of number 3"):
        read_rows(tmp_path / "a.npz", "a", np.array([0, 3]))


def test_pipes_and_folders_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    for path in (tmp_path / "pipe.npz", tmp_path):
        assert refusal(path) == "a folder, pipe or device, not a file"
    assert "No such file" in refusal(tmp_path / "no.npz")
