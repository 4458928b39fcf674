"""A stream that was interrupted goes on where it was, and ends with the same bytes."""

from __future__ import annotations

import errno
import json
import signal
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from child_processes import start_process
from faults import Faults, failing
from hypothesis import example, given, settings
from hypothesis import strategies as st
from streaming import W4, bert, context, llama, nearest, streamed, texts
from torch import Tensor

from compress.blocks import activations
from compress.blocks.block import BlockWork
from compress.blocks.blockfiles import block_file, read_finished_blocks
from compress.blocks.stream import Stream, result_of
from compress.blocks.streamed import StreamedModel
from compress.context import PassResult
from compress.errors import OutputError
from compress.facts import InputGroup, LayerDecision, Note

pytestmark = pytest.mark.usefixtures("one_thread", "small_micro_batches")


def worked(block: BlockWork, lockstep: bool) -> None:
    """Rounds every layer to what depends on its inputs, changes a norm, and says so."""
    grams: dict[str, Tensor] = {}

    def visit(input_group: InputGroup, x: Tensor) -> None:
        grams[input_group.layers[0]] = grams.get(input_group.layers[0], torch.zeros(())) + x.T @ x

    def act(input_group: InputGroup) -> None:
        gram = grams[input_group.layers[0]]
        for layer in input_group.layers:
            importance = (gram.diagonal() / gram.diagonal().mean()).sqrt()
            block.put(layer, nearest(block.matrix(layer) * importance), W4, float(gram.mean()))
            block.say([LayerDecision(layer, "Linear", "W4")], measured={layer: {"trace": float(gram.trace())}})

    if lockstep:
        block.lockstep(visit, act)
    else:
        block.collect(visit)
        for input_group in block.input_groups:
            act(input_group)
        norms = [name for name in block.part.holders if "norm" in name.lower()]
        for name in [block.input_groups[0].layers[0] + ".weight", *norms]:
            module, key = block.part.holders[name][0]
            block.replace(name, 1.01 * getattr(module, key))
    block.say(notes=[Note("info", f"{block.name} done")])


def run(model: StreamedModel, work: Path, lockstep: bool, stop: int | None = None, **how: Any) -> PassResult:
    said: list[str] = []
    stream = Stream(model, context(texts(), work, said.append), **how)
    done = len(list(work.glob("*.json"))) if work.exists() else 0
    for block in stream:
        worked(block, lockstep)
        if block.index == stop:
            raise KeyboardInterrupt
    assert said == ([f"{done} of {len(stream)} blocks are done already; going on after them"] if done else [])
    return stream.result()


def files(work: Path) -> dict[str, Any]:
    """Every byte of the tensors, and of the records all but the time they took."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in work.glob("*.safetensors")}
    for path in work.glob("*.json"):
        record = json.loads(path.read_text())
        assert set(record.pop("timing")) == {"seconds", "peak_rss_mib"}
        del record["digest"]
        found[path.name] = record
    return found


@settings(max_examples=4)
@given(
    st.sampled_from([llama, bert]),
    st.sampled_from([{}, {"float_too": True, "offload": True}, {"compute": "bfloat16"}]),
    st.booleans(),
    st.lists(st.integers(0, 4), min_size=1, max_size=4).map(sorted),
)
@example(make=llama, how={}, lockstep=True, stops=[0, 1, 2, 3])
@example(make=bert, how={"float_too": True, "offload": True}, lockstep=False, stops=[1])
@pytest.mark.slow
def test_interrupted_at_any_blocks(
    tmp_path_factory: pytest.TempPathFactory, make: Any, how: dict[str, Any], lockstep: bool, stops: list[int]
) -> None:
    model, folder = streamed(make()), tmp_path_factory.mktemp("stream")
    whole, broken = run(model, folder / "whole", lockstep, **how), folder / "broken"
    n = len(list((folder / "whole").glob("*.json")))
    for stop in stops:
        if stop < n:
            with pytest.raises(KeyboardInterrupt):
                run(model, broken, lockstep, stop, **how)
            assert len(list(broken.glob("*.json"))) == stop
    result = run(model, broken, lockstep, **how)
    assert files(broken) == files(folder / "whole") and len(files(broken)) == 2 * n
    same_results(result, whole)
    same_results(run(model, broken, lockstep, **how), whole)  # nothing is left to do
    same_results(result_of(model, read_finished_blocks(broken)), whole)


def same_results(one: PassResult, other: PassResult) -> None:
    assert one.decisions == other.decisions and one.notes == other.notes
    assert one.model.schemes == other.model.schemes
    assert one.model.activation_scales == other.model.activation_scales
    assert {k: v for k, v in one.measured.items() if "trace" in v} == {
        k: v for k, v in other.measured.items() if "trace" in v
    }
    for name in other.model.store.names():
        assert torch.equal(one.model.store.read(name), other.model.store.read(name))


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def damage_record(path: Path) -> None:
    record = path.with_suffix(".json")
    record.write_text(record.read_text()[:-20])


def damage_no_record(path: Path) -> None:
    path.with_suffix(".json").unlink()


def damage_other_block(path: Path) -> None:
    record = path.with_suffix(".json")
    record.write_text(record.read_text().replace('"name": "model.layers.1"', '"name": "model.layers.7"'))


def damage_number(path: Path) -> None:
    """Still JSON, still of that form."""
    record = path.with_suffix(".json")
    text = record.read_text()
    record.write_text(text.replace('"peak_rss_mib": ', '"peak_rss_mib": 1'))
    assert json.loads(record.read_text()) != json.loads(text)


DAMAGES = [damage_cut, damage_flip, damage_record, damage_no_record, damage_other_block, damage_number]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_whole_is_done_again(damage: Any, tmp_path: Path) -> None:
    """And everything after it, because it rests on it."""
    model, work = streamed(llama(layers=3)), tmp_path / "work"
    run(model, work, True)
    wanted = files(work)
    damage(block_file(work, 1))
    (work / "block-00002.draft").write_bytes(b"half")
    done = []
    stream = Stream(model, context(texts(), work))
    for block in stream:
        done.append(block.name)
        worked(block, True)
    assert done == ["model.layers.1", "model.layers.2", "after"] and files(work) == wanted


def test_finished_results_need_every_block(tmp_path: Path) -> None:
    model = streamed(llama(layers=3))
    run(model, tmp_path, True)
    block_file(tmp_path, 2).with_suffix(".json").unlink()
    with pytest.raises(OutputError, match="does not hold every block of a finished pass; run it again"):
        read_finished_blocks(tmp_path)


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    full = failing(Faults((tmp_path,), at=None, number=errno.ENOSPC, lasting=True))
    said = "the disk is full; finished work is kept, free some space and run again"
    with full, pytest.raises(OutputError, match=said):
        run(streamed(llama(layers=3)), tmp_path, True)


def test_a_temporary_folder_lives_as_long_as_its_store() -> None:
    stream = Stream(streamed(llama(layers=2)), context(texts()))
    for block in stream:
        worked(block, True)
    folder = stream._folder
    result = stream.result()
    del stream, block
    result = PassResult(result.model.store.over([]))
    assert folder.exists() and result.model.read("model.layers.0.mlp.up_proj.weight").shape == (48, 32)
    del result
    assert not folder.exists()


def work_and_tell(work: Path, told: Connection) -> None:
    """Work through all blocks; send the number of each that is done with."""
    activations.ROWS = 24
    for block in Stream(streamed(llama(layers=3)), context(texts(), work)):
        worked(block, True)
        told.send(block.index)


@pytest.mark.slow
def test_killed_while_it_works(tmp_path: Path) -> None:
    """By SIGKILL, in the body of the second block's turn."""
    run(streamed(llama(layers=3)), tmp_path / "whole", True)
    ours, theirs = Pipe(duplex=False)
    with ours, theirs, start_process(work_and_tell, tmp_path / "work", theirs) as process:
        assert ours.poll(60) and ours.recv() == 0
        assert ours.poll(60) and ours.recv() == 1
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert 1 <= len(list((tmp_path / "work").glob("*.json"))) < 4
    run(streamed(llama(layers=3)), tmp_path / "work", True)
    assert files(tmp_path / "work") == files(tmp_path / "whole")
