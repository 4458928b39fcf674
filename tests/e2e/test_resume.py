"""A run may be killed anywhere: nothing half-written is taken for whole, and the next run goes on from there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from makers import bundle_bytes, write_recipe

from compress.store.cache import ResultCache
from runtime.bundle.format import verify

Net = tuple[Path, dict[str, Any]]

SERVER = '''
"""Runs recipes in children of its own, so that what is slow to import is imported once, and kills them where told."""
import json, os, signal, sys
from pathlib import Path
import torch, onnxruntime, onnxscript
import compress.store.cache, compress.export.bundle, compress.execution.run
from compress.recipe.load import load_recipe
from runtime.report.report import Report, Side

example = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(72, 3)).eval()
torch.onnx.export(example, (torch.zeros(2, 1, 8, 8),), dynamo=True, verbose=False)  # imports a good deal more

real_put, real_rename = compress.store.cache.ResultCache.put, os.rename

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def arm(point, n):
    puts = []
    def put(self, key, write):
        puts.append(key)
        def half(folder):
            (folder / "graph.onnx").write_bytes(b"half")
            die()
        return real_put(self, key, half if point == "write" and len(puts) == n else write)
    def rename(source, target):
        source = Path(source)
        if point == "finish" and len(puts) == n and source.parent.name.startswith(".draft-"):
            die()
        if point == "publish" and source.parent.name.endswith(".partial") and source.name == "new":
            die()
        real_rename(source, target)
        if point == "published" and source.parent.name.endswith(".partial") and source.name == "new":
            die()
    compress.store.cache.ResultCache.put, os.rename = put, rename
    compress.execution.run.validate = lambda path, **more: Report("pass", "tiny", "onnxruntime-cpu", Side(), Side())
    if point == "assemble":
        compress.export.bundle.write_bundle = die
    if point == "judge":
        compress.execution.run.validate = die
    return puts

def run(task):
    puts = arm(task["point"], task["n"])
    compress.execution.run.apply_recipe(load_recipe(task["recipe"]), Path(task["out"]), Path(task["cache"]), quiet=True)
    Path(task["done"]).write_text(str(len(puts)))

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(json.loads(line))
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
'''


@pytest.fixture(scope="module")
def server() -> Iterator[Callable[[dict[str, Any]], int]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # no threads before a fork
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask(task: dict[str, Any]) -> int:
            stdin.write(json.dumps(task) + "\n")
            stdin.flush()
            return int(stdout.readline())

        yield ask
        stdin.close()


class Runs:
    """Runs of one recipe in one place."""

    def __init__(self, server: Callable[[dict[str, Any]], int], net: Net, folder: Path) -> None:
        self.server, self.folder, self.out, self.cache = server, folder, folder / "out/b", folder / "cache"
        self.recipe = write_recipe(net[0] / "resumed.yaml", net[1])

    def killed(self, point: str, n: int = 0) -> None:
        assert self._run(point, n) == 9

    def finished(self) -> int:
        """Run to the end; how many results were made."""
        assert self._run("never", 0) == 0
        return int((self.folder / "done").read_text())

    def _run(self, point: str, n: int) -> int:
        places = {"recipe": str(self.recipe), "out": str(self.out), "cache": str(self.cache)}
        return self.server({**places, "done": str(self.folder / "done"), "point": point, "n": n})


@pytest.fixture
def runs(server: Callable[[dict[str, Any]], int], net: Net, tmp_path: Path) -> Runs:
    return Runs(server, net, tmp_path)


@pytest.fixture(scope="module")
def unbroken(server: Callable[[dict[str, Any]], int], net: Net, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(server, net, tmp_path_factory.mktemp("unbroken"))
    assert made.finished() == 3
    return made


def complaints(cache: Path) -> list[str]:
    """What the cache says about its results when each of them is asked for."""
    said: list[str] = []
    store = ResultCache(cache, said.append)
    for folder in cache.iterdir():
        if not folder.name.startswith("."):
            assert store.get(folder.name) is not None or said
    return said


@pytest.mark.parametrize(
    ("point", "n", "left"),
    [
        ("write", 1, 3),
        ("finish", 2, 2),
        ("write", 3, 1),
        ("assemble", 0, 0),
        ("judge", 0, 0),
    ],
)
def test_a_killed_run_goes_on_from_its_last_finished_result(
    runs: Runs, unbroken: Runs, point: str, n: int, left: int
) -> None:
    runs.killed(point, n)
    assert not runs.out.exists() and not complaints(runs.cache)
    assert runs.out.with_name(".b.partial").joinpath("new/compress.log").is_file()
    assert runs.finished() == left
    assert bundle_bytes(runs.out) == bundle_bytes(unbroken.out)
    assert [path.name for path in runs.out.parent.iterdir()] == ["b"]


@pytest.mark.parametrize("point", ["assemble", "judge", "publish", "published"])
def test_an_earlier_bundle_outlives_a_killed_run(runs: Runs, unbroken: Runs, point: str) -> None:
    shutil.copytree(unbroken.out, runs.out)
    shutil.copytree(unbroken.cache, runs.cache)
    runs.killed(point)
    left = runs.out if runs.out.exists() else runs.out.with_name(".b.partial") / "old"
    assert left.name == ("b" if point != "publish" else "old")
    verify(left)
    assert runs.finished() == 0
    assert bundle_bytes(runs.out) == bundle_bytes(unbroken.out)
    assert [path.name for path in runs.out.parent.iterdir()] == ["b"]


@pytest.mark.parametrize("damage", ["flipped", "cut", "no record", "no file"])
def test_a_damaged_result_is_made_again(runs: Runs, unbroken: Runs, damage: str) -> None:
    shutil.copytree(unbroken.cache, runs.cache)
    folder = next(folder for folder in runs.cache.iterdir() if (folder / "arrays.safetensors").exists())
    file = folder / "arrays.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "flipped":
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-10])
    elif damage == "no record":
        (folder / "record.json").unlink()
    else:
        file.unlink()
    assert runs.finished() == 1
    assert f"cache: result {folder.name[:12]} is damaged; it is discarded" in (runs.out / "compress.log").read_text()
    assert bundle_bytes(runs.out) == bundle_bytes(unbroken.out)
