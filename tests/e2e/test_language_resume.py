"""A run over blocks may be killed at any of them and is gone on from there; several processes share one run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from child_processes import run_in_two_processes, start_process
from makers import bundle_bytes, write_recipe
from safetensors.numpy import load_file
from tiny_lm import language_folder, language_recipe

from compress.blocks.blockfiles import write_block
from compress.execution.run import apply_recipe
from compress.models.fresh_reader import answer
from compress.recipe.load import load_recipe
from runtime.report.report import Report, Side

W4: dict[str, Any] = {"scheme": "W4A16", "group_size": 32}
CHECKPOINT: dict[str, Any] = {"export": [{"kind": "checkpoint"}], "target": "transformers"}
RECIPES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "gptq, cache": (
        [{"kind": "gptq", **W4}, {"kind": "kv_cache", "scheme": "int8"}],
        {"export": [{"kind": "onnx"}, {"kind": "checkpoint"}]},
    ),
    "smoothquant, gptq": ([{"kind": "smoothquant"}, {"kind": "gptq", "scheme": "W8A8"}], CHECKPOINT),
    "autoround": ([{"kind": "autoround", "steps": 2, **W4}], CHECKPOINT),
    "awq": ([{"kind": "awq", **W4}], CHECKPOINT),
}
N_BLOCKS = 3
N_STEPS = N_BLOCKS + 1
"""Of each pass: the blocks, and the head after them."""


def work(kill: tuple[int, str] | None, places: tuple[Path, Path, Path], done: Path, processes: int = 1) -> None:
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

    with pytest.MonkeyPatch.context() as patch:
        report = Report("pass", "tiny", "onnxruntime-cpu", Side(), Side())
        patch.setattr("compress.blocks.stream.write_block", write)
        patch.setattr("compress.execution.run.validate", lambda path, **more: report)
        if processes == 1:  # transformers would ask the other process, too
            patch.setattr("compress.export.loading_back.ask", lambda work, seconds: answer(work))
        apply_recipe(load_recipe(places[0]), *places[1:], quiet=True)
    done.write_text(str(len(written)))


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of three blocks. Recipes stand in it."""
    folder = tmp_path_factory.mktemp("resumed")
    language_folder(folder / "lm", num_hidden_layers=N_BLOCKS, initializer_range=0.1)
    return folder


class Runs:
    """Runs of one recipe in one place."""

    def __init__(self, home: Path, folder: Path, name: str) -> None:
        passes, parts = RECIPES[name]
        self.folder, self.out, self.cache = folder, folder / "out/b", folder / "cache"
        self.recipe = write_recipe(home / f"{name}.yaml", language_recipe(home, passes, **parts))

    def killed(self, block: int, when: str) -> None:
        """Kill it at the `block`-th block that it writes, over all passes."""
        assert self._run((block, when)) == -signal.SIGKILL
        assert not self.out.exists()

    def finished(self) -> int:
        """Run to the end; how many blocks were written."""
        assert self._run(None) == 0
        return int((self.folder / "done").read_text())

    def finished_by_two(self) -> None:
        """Run to the end in two processes, as torchrun starts them."""
        run_in_two_processes(work, None, self._places(), self.folder / "done", 2)

    def log(self) -> str:
        return (self.out / "compress.log").read_text()

    def _run(self, kill: tuple[int, str] | None) -> int | None:
        with start_process(work, kill, self._places(), self.folder / "done") as process:
            process.join()
            return process.exitcode

    def _places(self) -> tuple[Path, Path, Path]:
        return self.recipe, self.out, self.cache


@pytest.fixture(scope="module")
def unbroken(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runs]:
    """Name of a recipe -> its run from beginning to end. Not to be written to."""
    made: dict[str, Runs] = {}

    def get(name: str) -> Runs:
        if name not in made:
            made[name] = Runs(home, tmp_path_factory.mktemp("unbroken"), name)
            made[name].finished()
        return made[name]

    return get


def results_before(cache: Path, to: Path) -> None:
    """Copy what a run has done before its passes (the exported float graph, its outputs)."""
    to.mkdir()
    for folder in cache.iterdir():
        if not list(folder.glob("block-*")) and not (folder / "candidate.npz").exists():
            shutil.copytree(folder, to / folder.name)


@pytest.mark.parametrize(
    ("name", "block", "when", "done"),
    [
        ("smoothquant, gptq", 3, "torn", 2),
        ("smoothquant, gptq", 5, "before", 0),
        ("smoothquant, gptq", 7, "before", 2),
        ("gptq, cache", 7, "after", 3),
        ("autoround", 3, "before", 2),
        ("awq", 3, "after", 3),
    ],
)
def test_a_run_killed_at_a_block_goes_on_there(
    home: Path,
    unbroken: Callable[[str], Runs],
    tmp_path: Path,
    name: str,
    block: int,
    when: str,
    done: int,
) -> None:
    whole, runs = unbroken(name), Runs(home, tmp_path, name)
    results_before(whole.cache, runs.cache)
    total = int((whole.folder / "done").read_text())
    runs.killed(block, when)
    written = runs.finished()
    assert total == len(RECIPES[name][0]) * N_STEPS
    assert written == total - block + (when != "after")
    assert (f"{done} of {N_STEPS} blocks are done already; going on after them" in runs.log()) == bool(done)
    assert bundle_bytes(runs.out) == bundle_bytes(whole.out)
    assert [path.name for path in runs.out.parent.iterdir()] == ["b"]
    assert not list(runs.cache.glob("partial-*"))


def test_killed_again_and_again(home: Path, unbroken: Callable[[str], Runs], tmp_path: Path) -> None:
    """After every block, the last ones of the passes, too, which end them: none is written twice."""
    name = "smoothquant, gptq"
    runs = Runs(home, tmp_path, name)
    for _ in range(2 * N_STEPS):
        runs.killed(1, "after")
    assert runs.finished() == 0
    assert bundle_bytes(runs.out) == bundle_bytes(unbroken(name).out)


# --- several processes ------------------------------------------------------------------------------------------------


def launched(recipe: Path, folder: Path, n: int) -> None:
    """`torchrun --nproc_per_node N -m compress apply ...`; it must end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(n)]
    arguments = ["-m", "compress", "apply", str(recipe), "--out", "out/b", "--cache", "cache", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, cwd=folder, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr


def test_torchrun_makes_one_bundle(unbroken: Callable[[str], Runs], tmp_path: Path) -> None:
    whole = unbroken("gptq, cache")
    results_before(whole.cache, tmp_path / "cache")
    launched(whole.recipe, tmp_path, 2)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b"]
    check_nearly_the_same(whole.out, tmp_path / "out/b")


def test_two_processes_make_one_bundle(home: Path, unbroken: Callable[[str], Runs], tmp_path: Path) -> None:
    name = "smoothquant, gptq"
    whole, runs = unbroken(name), Runs(home, tmp_path, name)
    results_before(whole.cache, runs.cache)
    runs.finished_by_two()
    check_nearly_the_same(whole.out, runs.out)


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
