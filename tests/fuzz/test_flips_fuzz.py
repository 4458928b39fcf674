"""Every class of byte in every kept file flipped: the same bytes come out in the end, or a typed error."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fuzzing import FULL, SEED, assert_done_or_refused
from workshop import Workshop, bundle_files, open_workshop

import runtime
from compress.blocks.blockfiles import BlockChanges, block_file, read_block, write_block
from compress.store.cache import ResultCache
from compress.store.training_state import read_state, write_state
from runtime.bundle.format import is_hashed
from runtime.tasks.manifest import verify

Flip = tuple[str, int, int]
"""File, place of the byte in it, the byte that stands there afterwards."""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with open_workshop(tmp_path_factory.mktemp("flips")) as made:
        yield made


def flips(folder: Path, name: str, share: float, quick: int) -> list[Flip]:
    """A seeded sample of flips of the files under `folder`: as many of each file and of each class of byte."""
    rng = random.Random(f"{name} {SEED}")
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    made: list[Flip] = []
    while len(made) < (round(FULL * share) if FULL else quick):
        file = rng.choice(files)
        data = (folder / file).read_bytes()
        if data:
            at = rng.choice([*ENDS, *rng.choices(range(len(data)), k=3), *digits(data, rng)]) % len(data)
            digit = chr(data[at]).isdigit() and rng.random() < 0.8  # still a number
            other = ord(rng.choice("0123456789")) if digit else data[at] ^ (1 << rng.randrange(8))
            made += [(file, at, other)] if other != data[at] else []
    return made


ENDS = (0, 1, 2, 3, 4, 5, 6, 7, -1)
"""First bytes, in which formats keep lengths, and the last."""


def digits(data: bytes, rng: random.Random) -> list[int]:
    """Places of some digits, if the file is JSON."""
    if data[:1] not in (b"{", b"["):
        return []
    places = [found.start() for found in re.finditer(rb"(?<![0-9a-f])[0-9]", data)]
    return rng.choices(places, k=6) if places else []


def flip(folder: Path, change: Flip) -> None:
    file, at, byte = change
    data = bytearray((folder / file).read_bytes())
    data[at] = byte
    (folder / file).write_bytes(data)


def test_a_flipped_byte_of_the_cache_is_seen_and_the_result_made_again(shop: Workshop) -> None:
    shop.begin(warm=True)
    (shop.root / "cache/mine.txt").unlink()
    for change in flips(shop.root / "cache", "cache", 0.005, 6):
        shop.begin(warm=True)
        flip(shop.root / "cache", change)
        said: list[str] = []
        key = change[0].partition("/")[0]
        assert ResultCache(shop.root / "cache", said.append).get(key) is None, change
        assert said == [f"cache: result {key[:12]} is damaged; it is discarded and done again"]
        shop.begin(warm=True)
        flip(shop.root / "cache", change)
        assert_done_or_refused("flip in the cache", shop.apply, allowed=())
        assert bundle_files(shop.bundle) == shop.new, change


def test_a_flipped_byte_of_a_bundle_is_refused_by_all_that_read_it(shop: Workshop) -> None:
    shop.begin(warm=True)
    shop.apply()
    whole = {path: path.read_bytes() for path in shop.bundle.rglob("*") if path.is_file()}
    inputs = {"x": np.zeros((2, 16), np.float32)}

    def predict() -> dict[str, np.ndarray]:
        with runtime.open_bundle(shop.bundle) as bundle:
            return bundle.predict(inputs)

    expected = predict()
    for change in flips(shop.bundle, "bundle", 0.01, 20):
        flip(shop.bundle, change)
        counted = is_hashed(change[0]) or change[0] == "manifest.json"
        assert (assert_done_or_refused("flip in a bundle", lambda: verify(shop.bundle)) is None) == counted, change
        answer = assert_done_or_refused("flip in a bundle", predict)
        assert (answer is None) == counted, change
        assert answer is None or all(np.array_equal(answer[name], expected[name]) for name in expected)
        path = shop.bundle / change[0]
        path.write_bytes(whole[path])
    assert bundle_files(shop.bundle) == shop.new


def test_a_bundle_with_a_flipped_byte_is_not_replaced(shop: Workshop) -> None:
    """It may be an edit of the user's."""
    shop.begin(warm=True)
    for change in flips(shop.bundle, "old bundle", 0.001, 4):
        shop.begin(warm=True)
        flip(shop.bundle, change)
        before = bundle_files(shop.bundle)
        counted = is_hashed(change[0]) or change[0] == "manifest.json"
        done = assert_done_or_refused("flip in an old bundle", shop.apply, allowed=(2,))
        assert (done is None) == counted and bundle_files(shop.bundle) == (before if counted else shop.new), change


def test_a_flipped_byte_of_unfinished_work_is_seen(tmp_path: Path) -> None:
    """Of finished blocks and their records, and of the state of a training."""
    torch.manual_seed(0)
    changes = BlockChanges(replaced={"a": torch.randn(3, 5), "b": torch.randn(4)}, measured={"a": {"mse": 0.25}})
    write_block(tmp_path, 0, "block", changes, {"seconds": 1.5})
    tensors, record = {"w": torch.randn(4, 4), "n": torch.tensor(7)}, {"step": 3, "losses": [0.5, 0.25]}
    write_state(tmp_path / "training.safetensors", tensors, record)
    whole = {path: path.read_bytes() for path in tmp_path.iterdir()}
    block = read_block(tmp_path, 0, "block")
    assert block is not None
    assert sorted(path.name for path in whole) == sorted(
        [block_file(tmp_path, 0).name, "block-00000.json", "training.safetensors"]
    )
    for change in flips(tmp_path, "work", 0.02, 60):
        flip(tmp_path, change)
        again = assert_done_or_refused("flip in unfinished work", lambda: read_block(tmp_path, 0, "block"))
        state = assert_done_or_refused("flip in unfinished work", lambda: read_state(tmp_path / "training.safetensors"))
        assert (again is None) == change[0].startswith("block"), change
        assert state is None or (state[1] == record and all(torch.equal(state[0][k], v) for k, v in tensors.items()))
        assert state is None or json.dumps(state[1]) == json.dumps(record)
        path = tmp_path / change[0]
        path.write_bytes(whole[path])
