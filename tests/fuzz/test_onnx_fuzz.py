"""ONNX files with changed bytes and changed contents: planned from, or refused as a source that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzzing import assert_done_or_refused, corpus, fuzz, in_fork
from hypothesis import given
from onnx_strategies import MODELS, SHAPES, changed_models
from shortcuts import quick_check

from compress.models.load import load_model
from compress.models.onnx_facts import onnx_facts
from compress.models.onnx_graph import open_onnx
from compress.models.source import locate
from compress.specs import ModelSpec


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onnx") / "model.onnx"


@pytest.fixture(scope="module", autouse=True)
def _in_this_process() -> Iterator[None]:
    """Each case has a process of its own as it is: the checks do not start another, which takes longer than they do."""
    with quick_check():
        yield


def assert_read_or_refused(kind: str, content: bytes, file: Path) -> None:
    """As a plan reads it, and then as a run does: what a plan took, a run can read."""
    file.write_bytes(content)

    def run() -> None:
        onnx_facts(file, "generic", SHAPES)
        load_model(locate(ModelSpec(source=f"onnx:{file}", task="generic"), Path()), SHAPES)
        open_onnx(file)

    assert_done_or_refused(kind, in_fork(run), allowed=(2,))


@pytest.mark.parametrize("path", corpus("onnx"), ids=lambda path: path.name)
def test_what_broke_once_is_read_or_refused(path: Path, file: Path) -> None:
    assert_read_or_refused("onnx (corpus)", path.read_bytes(), file)


@pytest.mark.parametrize("model", MODELS, ids=["convolution", "branches"])
def test_the_models_themselves_are_read(model: object, file: Path) -> None:
    file.write_bytes(model.SerializeToString())  # type: ignore[attr-defined]
    assert onnx_facts(file, "generic", SHAPES).layers


@fuzz(share=0.1, quick=40)
@given(content=changed_models())
def test_any_onnx_file_is_read_or_refused(file: Path, content: bytes) -> None:
    assert_read_or_refused("onnx", content, file)
