"""The smallest recipe there is, its cache and two bundles of it, for tests that break files under a run."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from shortcuts import quick_judge

from compress.execution.run import apply_recipe
from compress.recipe.load import load_recipe
from runtime.bundle.format import is_hashed

PASSES: list[dict[str, Any]] = [{"kind": "smoothquant"}, {"kind": "int8"}]
FOREIGN = ("out/notes.txt", "out/b.compress.log", "out/.b.previous/mine", "out/.b.lock", "cache/mine.txt", "tmp/mine")
"""Files of the user's, called like our own where that could be confused."""


def write_source(folder: Path) -> None:
    """Two matrix products as ONNX, 24 samples, and a recipe with two passes."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    weights = {"a": rng.normal(size=(16, 8)), "b": rng.normal(size=(8, 4))}
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], name="up"),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "b"], ["y"], name="down"),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    np.savez(folder / "d.npz", x=rng.normal(size=(24, 16)).astype(np.float32))
    data = {"source": "npz:d.npz", "samples": 8}
    recipe = {
        "version": 1,
        "name": "tiny",
        "model": {"source": "onnx:m.onnx", "task": "generic"},
        "data": {"calibration": data, "evaluation": {**data, "skip": 8}},
        "passes": PASSES,
        "validate": {
            "gates": [{"metric": "cosine", "min": 0.5}],
            "benchmark": {"warmup": 0, "iterations": 1, "processes": 1, "throughput_batch_size": 2},
            "undecided": "pass",  # eight samples say nothing about a mean
        },
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))


def bundle_files(bundle: Path) -> dict[str, str]:
    """Name -> sha256 of every file whose bytes are the recipe's alone."""
    names = {path.relative_to(bundle).as_posix(): path for path in bundle.rglob("*") if path.is_file()}
    return {
        name: sha256(path.read_bytes()).hexdigest()
        for name, path in names.items()
        if is_hashed(name) or name == "manifest.json"
    }


@dataclass(frozen=True)
class Workshop:
    """`root`: where a case works, always the same place; `kept`: how it begins. `old`, `new`: files of the bundles."""

    root: Path
    kept: Path
    old: dict[str, str]
    new: dict[str, str]

    def begin(self, warm: bool) -> None:
        """Set the place up anew: an old bundle, files of the user's, and a cache that knows all steps or none."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.kept, self.root)
        if not warm:
            shutil.rmtree(self.root / "cache")
        for name in FOREIGN:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text("mine")
        tempfile.tempdir = str(self.root / "tmp")

    def apply(self, *overrides: str) -> Any:
        """Run the recipe."""
        recipe = load_recipe(self.root / "src/recipe.yaml", list(overrides))
        return apply_recipe(recipe, self.bundle, self.root / "cache", quiet=True)

    @property
    def disks(self) -> tuple[Path, ...]:
        """Folders that stand for disks of their own."""
        return tuple(self.root / name for name in ("src", "out", "cache", "tmp"))

    @property
    def bundle(self) -> Path:
        return self.root / "out/b"

    def check_foreign(self) -> None:
        """All files of the user's are as they were."""
        assert {name: (self.root / name).read_text() for name in FOREIGN} == dict.fromkeys(FOREIGN, "mine")


@contextmanager
def open_workshop(folder: Path) -> Iterator[Workshop]:
    """Make the two bundles and the cache, and cut measurements short while the context is open."""
    with quick_judge(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", None)
        shop = Workshop(folder / "work", folder / "kept", {}, {})
        write_source(shop.root / "src")
        (shop.root / "tmp").mkdir()
        tempfile.tempdir = str(shop.root / "tmp")
        shop.apply()
        shop.new.update(bundle_files(shop.bundle))
        shop.apply("passes=[{kind: int8}]")
        shop.old.update(bundle_files(shop.bundle))
        assert shop.old != shop.new
        shutil.copytree(shop.root, shop.kept)
        yield shop
