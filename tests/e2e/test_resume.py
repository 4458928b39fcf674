"""A run may be killed anywhere: nothing half-written is taken for whole, and the next run goes on from there."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from child_processes import start_process
from makers import bundle_bytes, write_recipe
from shortcuts import unjudged

from compress.execution.run import apply_recipe
from compress.recipe.load import load_recipe
from compress.store.cache import ResultCache
from runtime.tasks.manifest import verify

Net = tuple[Path, dict[str, Any]]


def work(point: str, n: int, recipe: Path, out: Path, cache: Path, done: Path) -> None:
    """Apply a recipe in this process, which dies at that point (the `n`-th result kept); tell how many it kept."""
    kept: list[str] = []
    real_put, real_rename = ResultCache.put, os.rename

    def put(self: ResultCache, key: str, write: Callable[[Path], dict[str, Any]]) -> Any:
        kept.append(key)

        def write_half(folder: Path) -> dict[str, Any]:
            (folder / "graph.onnx").write_bytes(b"half")
            die()

        return real_put(self, key, write_half if point == "write" and len(kept) == n else write)

    def rename(source: Any, target: Any) -> None:
        publishes = Path(source).parent.name.endswith(".partial") and Path(source).name == "new"
        if point == "finish" and len(kept) == n and Path(source).parent.name.startswith(".draft-"):
            die()
        if point == "publish" and publishes:
            die()
        real_rename(source, target)
        if point == "published" and publishes:
            die()

    judging = unjudged(die) if point == "judge" else unjudged()
    with judging, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResultCache, "put", put)
        patch.setattr("os.rename", rename)
        if point == "assemble":
            patch.setattr("compress.export.bundle.write_bundle", die)
        apply_recipe(load_recipe(recipe), out, cache, quiet=True)
    done.write_text(str(len(kept)))


def die(*args: Any, **more: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


class Runs:
    """Runs of one recipe in one place."""

    def __init__(self, net: Net, folder: Path) -> None:
        self.folder, self.out, self.cache = folder, folder / "out/b", folder / "cache"
        self.recipe = write_recipe(net[0] / "resumed.yaml", net[1])

    def killed(self, point: str, n: int = 0) -> None:
        assert self._run(point, n) == -signal.SIGKILL

    def finished(self) -> int:
        """Run to the end; how many results were made."""
        assert self._run("never", 0) == 0
        return int((self.folder / "done").read_text())

    def _run(self, point: str, n: int) -> int | None:
        with start_process(work, point, n, self.recipe, self.out, self.cache, self.folder / "done") as process:
            process.join()
            return process.exitcode


@pytest.fixture
def runs(net: Net, tmp_path: Path) -> Runs:
    return Runs(net, tmp_path)


@pytest.fixture(scope="module")
def unbroken(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(net, tmp_path_factory.mktemp("unbroken"))
    assert made.finished() == 4  # the float graph under both of its keys, its outputs, the pass
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
    [("finish", 3, 2), ("write", 4, 1), ("assemble", 0, 0)],
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


@pytest.mark.parametrize("point", ["judge", "publish", "published"])
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


def test_a_damaged_result_is_made_again(runs: Runs, unbroken: Runs) -> None:
    shutil.copytree(unbroken.cache, runs.cache)
    folder = next(folder for folder in runs.cache.iterdir() if (folder / "arrays.safetensors").exists())
    file = folder / "arrays.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert runs.finished() == 1
    assert f"cache: result {folder.name[:12]} is damaged; it is discarded" in (runs.out / "compress.log").read_text()
    assert bundle_bytes(runs.out) == bundle_bytes(unbroken.out)
