"""A run over blocks may be killed at any of them and is gone on from there; several processes share one run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from child_processes import start_process
from makers import bundle_bytes, write_recipe
from safetensors.numpy import load_file
from shortcuts import QUICK_COMMAND, quick_reader, unjudged
from tiny_lm import LIKELY, language_folder, language_recipe

from compress.blocks.blockfiles import write_block
from compress.execution.run import apply_recipe
from compress.recipe.load import load_recipe

W4: dict[str, Any] = {"scheme": "W4A16", "group_size": 32}
PASSES: list[dict[str, Any]] = [{"kind": "smoothquant"}, {"kind": "gptq", **W4}, {"kind": "kv_cache", "scheme": "int8"}]
EXPORT = [{"kind": "onnx"}, {"kind": "checkpoint"}]
N_BLOCKS = 2
N_STEPS = N_BLOCKS + 1
"""Of each pass: the blocks, and the head after them."""


def work(kill: tuple[int, str] | None, places: tuple[Path, Path, Path], done: Path) -> None:
    """Apply a recipe (recipe, out, cache) in this process, which dies at that block; tell how many blocks it wrote."""
    torch.set_num_threads(1)
    written: list[int] = []
    real_write = write_block

    def write(folder: Path, index: int, *rest: Any) -> Path:
        if not folder.name.startswith("partial-"):  # the stream of the final scoring
            return real_write(folder, index, *rest)
        written.append(index)
        when = kill[1] if kill is not None and kill[0] == len(written) else ""
        if when == "before":
            die()
        path = real_write(folder, index, *rest)
        if when == "torn":
            path.write_bytes(path.read_bytes()[:-9])
        if when:
            die()
        return path

    with quick_reader(), unjudged(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("compress.blocks.stream.write_block", write)
        apply_recipe(load_recipe(places[0]), *places[1:], quiet=True)
    done.write_text(str(len(written)))


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


class Runs:
    """Runs of the recipe in one place."""

    def __init__(self, recipe: Path, folder: Path) -> None:
        self.recipe, self.folder, self.out, self.cache = recipe, folder, folder / "out/b", folder / "cache"

    def killed(self, block: int, when: str) -> None:
        """Kill it at the `block`-th block that it writes, over all passes."""
        assert self._run((block, when)) == -signal.SIGKILL
        assert not self.out.exists()

    def finished(self) -> int:
        """Run to the end; how many blocks were written."""
        assert self._run(None) == 0
        return int((self.folder / "done").read_text())

    def log(self) -> str:
        return (self.out / "compress.log").read_text()

    def _run(self, kill: tuple[int, str] | None) -> int | None:
        with start_process(work, kill, self._places(), self.folder / "done") as process:
            process.join()
            return process.exitcode

    def _places(self) -> tuple[Path, Path, Path]:
        return self.recipe, self.out, self.cache


def copy_beginning(cache: Path, to: Path) -> None:
    """Copy what comes before the passes: the exported float graph, its outputs."""
    to.mkdir()
    for folder in cache.iterdir():
        if not list(folder.glob("block-*")) and not (folder / "candidate.npz").exists():
            shutil.copytree(folder, to / folder.name)


@pytest.fixture(scope="module")
def whole(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The run from beginning to end, with an export that other tests may have made. Not to be written to."""
    folder = tmp_path_factory.mktemp("whole")
    language_folder(folder / "lm", num_hidden_layers=N_BLOCKS, **LIKELY)
    runs = Runs(write_recipe(folder / "recipe.yaml", language_recipe(folder, PASSES, export=EXPORT)), folder)
    copy_beginning(cache, runs.cache)
    assert runs.finished() == len(PASSES) * N_STEPS
    return runs


@pytest.fixture
def begun(whole: Runs, tmp_path: Path) -> Runs:
    """A run of which is done what comes before the passes."""
    runs = Runs(whole.recipe, tmp_path)
    copy_beginning(whole.cache, runs.cache)
    return runs


@pytest.mark.parametrize(("block", "when", "done"), [(2, "torn", 1), (5, "before", 1)])
def test_a_run_killed_at_a_block_goes_on_there(whole: Runs, begun: Runs, block: int, when: str, done: int) -> None:
    begun.killed(block, when)
    assert begun.finished() == len(PASSES) * N_STEPS - block + 1
    assert f"{done} of {N_STEPS} blocks are done already; going on after them" in begun.log()
    assert bundle_bytes(begun.out) == bundle_bytes(whole.out)
    assert [path.name for path in begun.out.parent.iterdir()] == ["b"]
    assert not list(begun.cache.glob("partial-*"))


def test_killed_again_and_again(whole: Runs, begun: Runs) -> None:
    """After every block, the last ones of the passes, too, which end them: none is written twice."""
    for _ in range(len(PASSES) * N_STEPS):
        begun.killed(1, "after")
    assert begun.finished() == 0
    assert bundle_bytes(begun.out) == bundle_bytes(whole.out)


def test_torchrun_makes_one_bundle(whole: Runs, begun: Runs) -> None:
    (begun.folder / "command.py").write_text(QUICK_COMMAND)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "command.py"]
    arguments = ["apply", str(begun.recipe), "--out", "out/b", "--cache", "cache", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *arguments], capture_output=True, text=True, cwd=begun.folder, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in begun.out.parent.iterdir()] == ["b"]
    check_nearly_the_same(whole.out, begun.out)


def check_nearly_the_same(one_bundle: Path, two_bundle: Path) -> None:
    """Statistics are added in another order, to the bits of float32. Where two levels are equally good, another may
    then be taken, after which later blocks see other inputs: not the same model, but one as good."""
    assert bundle_bytes(one_bundle).keys() == bundle_bytes(two_bundle).keys()
    file = next(path.relative_to(one_bundle) for path in one_bundle.rglob("*.safetensors"))
    one, two = load_file(one_bundle / file), load_file(two_bundle / file)
    assert one.keys() == two.keys()
    for key in (key for key in one if key.startswith("model.layers.0.")):
        assert different(two[key], one[key]) < 0.05, key
    errors = [layer_errors(out) for out in (one_bundle, two_bundle)]
    assert len(errors[0]) == 7 * N_BLOCKS
    assert errors[1] == pytest.approx(errors[0], rel=0.1)


def different(found: np.ndarray, expected: np.ndarray) -> float:
    """How many of the numbers (of bytes, of integers) differ by more than rounding, as a part of all."""
    if expected.dtype.kind == "f":
        return float(np.mean(~np.isclose(found, expected, rtol=1e-4, atol=1e-6)))
    return float(np.mean(found.view(np.uint8) != expected.view(np.uint8)))


def layer_errors(bundle: Path) -> dict[str, float]:
    rows = json.loads((bundle / "layers.json").read_text())
    return {row["layer"]: row["output_error"] for row in rows if "output_error" in row}
