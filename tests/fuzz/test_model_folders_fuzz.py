"""A model's folder, damaged: headers and bytes of safetensors, the index of shards, config.json, shapes.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fuzzing import assert_done_or_refused, corpus, fuzz
from hypothesis import example, given
from hypothesis import strategies as st

from compress.models.load import TorchModel, load_model
from compress.models.meta import module_on_meta
from compress.models.source import SHAPES, locate
from compress.specs import ModelSpec

FEEDS: dict[str, Any] = dict.fromkeys(("input_ids", "attention_mask"), ((4,), "int64"))
SHARDED, SINGLE = "sharded", "single"
INDEX = "model.safetensors.index.json"
RECORD = {"tensors": {}, "attributes": {}, "config": {}, "blocks": {}, "skipped": []}
NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 7, 10**4, 2**31, 2**63, 10**18, 10**400]) | st.integers()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=8) | st.sampled_from(["../x", "/etc/passwd"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny Llama as a single file, and as two shards."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, **heads, bos_token_id=1, eos_token_id=2, pad_token_id=0)  # type: ignore[arg-type]
    )
    model.save_pretrained(folder / SINGLE)
    model.save_pretrained(folder / SHARDED, max_shard_size="1KB")
    assert (folder / SHARDED / INDEX).is_file()
    return folder


@pytest.fixture
def place(models: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(models, tmp_path / "models"))


def open_folder(folder: Path) -> TorchModel:
    """As a plan looks at it, and as a run then reads it."""
    source = locate(ModelSpec(source=f"dir:{folder}", task="text-generation"), folder)
    module_on_meta(source)
    return load_model(source, FEEDS)


def assert_opened_or_refused(kind: str, folder: Path, file: str, content: bytes) -> None:
    """Open the folder with one file's content exchanged, and put the content back."""
    path = folder / file
    before = path.read_bytes() if path.is_file() else None
    path.write_bytes(content)
    try:
        assert_done_or_refused(kind, lambda: open_folder(folder), allowed=(2,))
    finally:
        path.unlink() if before is None else path.write_bytes(before)


def test_the_folders_are_whole(place: Path) -> None:
    assert open_folder(place / SINGLE).architecture == open_folder(place / SHARDED).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("path", corpus("model-folders"), ids=lambda path: path.name)
def test_what_broke_once_is_read_or_refused(path: Path, place: Path) -> None:
    """<number>.<file name>: what that file held."""
    assert_opened_or_refused("model folders: corpus", place / SINGLE, path.name.partition(".")[2], path.read_bytes())


CHANGES = st.lists(
    st.tuples(st.sampled_from(["flip", "insert", "delete", "cut"]), st.integers(0, 1200), st.integers(0, 255)),
    min_size=1,
    max_size=4,
)


def damage(content: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    found = bytearray(content)
    for how, place, value in changes:
        at = place % max(1, len(found))
        if how == "flip" and found:
            found[at] ^= value or 1
        elif how == "insert":
            found[at:at] = bytes([value]) * (1 + value % 3)
        elif how == "delete":
            del found[at : at + 1 + value % 8]
        elif how == "cut":
            del found[at:]
    return bytes(found)


@fuzz(share=0.03, quick=8)
@given(changes=CHANGES)
def test_damaged_bytes_are_read_or_refused(place: Path, changes: list[tuple[str, int, int]]) -> None:
    """Of the header for the most part: it is longer than the weights."""
    file = "model.safetensors"
    assert_opened_or_refused(
        "safetensors bytes", place / SINGLE, file, damage((place / SINGLE / file).read_bytes(), changes)
    )


ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I64", "F8_E4M3", "BOOL", "U8", "Q4", ""]) | VALUES,
        "shape": st.lists(NUMBERS, max_size=4) | VALUES,
        "data_offsets": st.lists(NUMBERS, max_size=3) | VALUES,
    },
)


@fuzz(share=0.02, quick=6)
@given(
    which=st.integers(0, 11),
    entry=ENTRIES,
    gone=st.booleans(),
    length=st.none() | st.integers(0, 2**64 - 1),
    more=VALUES,
)
@example(which=0, entry={"shape": [2**62, 4]}, gone=False, length=None, more=None)
def test_headers_that_lie_are_read_or_refused(
    place: Path, which: int, entry: dict[str, Any], gone: bool, length: int | None, more: Any
) -> None:
    file = place / SINGLE / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = sorted(header)[which % len(header)]
    if gone:
        del header[name]
        header["another"] = entry
    else:
        header[name] = {**header[name], **entry} if isinstance(header[name], dict) else entry
    if more is not None:
        header["__metadata__"] = more
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    told = len(text) if length is None else length
    assert_opened_or_refused(
        "safetensors headers", place / SINGLE, file.name, told.to_bytes(8, "little") + text + content[8 + size :]
    )


@fuzz(share=0.02, quick=6)
@given(
    changes=CHANGES,
    which=st.integers(0, 30),
    value=VALUES,
    how=st.sampled_from(["bytes", "entry", "all"]),
)
def test_a_damaged_index_is_read_or_refused(
    place: Path, changes: list[tuple[str, int, int]], which: int, value: Any, how: str
) -> None:
    content = (place / SHARDED / INDEX).read_bytes()
    record = json.loads(content)
    if how == "entry":
        names = sorted(record["weight_map"])
        record["weight_map"][names[which % len(names)]] = value
    text = json.dumps(value if how == "all" else record)
    assert_opened_or_refused(
        "index of shards", place / SHARDED, INDEX, damage(content, changes) if how == "bytes" else text.encode()
    )


@fuzz(share=0.02, quick=8)
@given(changes=CHANGES, which=st.integers(0, 60), value=VALUES, how=st.sampled_from(["bytes", "entry", "entry", "all"]))
@example(changes=[], which=0, value=10**18, how="layers")
def test_a_broken_configuration_is_read_or_refused(
    place: Path, changes: list[tuple[str, int, int]], which: int, value: Any, how: str
) -> None:
    content = (place / SINGLE / "config.json").read_bytes()
    record = json.loads(content)
    key = "num_hidden_layers" if how == "layers" else sorted(record)[which % len(record)]
    text = json.dumps(value if how == "all" else {**record, key: value})
    assert_opened_or_refused(
        "config.json", place / SINGLE, "config.json", damage(content, changes) if how == "bytes" else text.encode()
    )


@fuzz(share=0.01, quick=4)
@given(part=st.sampled_from([*RECORD, "all"]), value=VALUES | st.dictionaries(st.sampled_from(["model", "x"]), VALUES))
def test_a_broken_record_of_shapes_is_read_or_refused(place: Path, part: str, value: Any) -> None:
    record = value if part == "all" else {**RECORD, part: value}
    assert_opened_or_refused("shapes.json", place / SINGLE, SHAPES, json.dumps(record).encode())
