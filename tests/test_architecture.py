"""What may import what, and that everything there is is listed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "transformers", "onnx", "pydantic", "yaml", "ruamel", "PIL", "tokenizers", "openvino", "compress")
BUILD = ("torch", "transformers", "onnx", "onnxruntime", "onnx_ir", "onnxscript", "openvino")
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {blocked}:
            raise ImportError(f'{{name}} is blocked')
sys.meta_path.insert(0, Blocker())
"""


def imports_without(blocked: tuple[str, ...], *modules: str) -> subprocess.CompletedProcess[str]:
    """Import modules in a fresh process in which `blocked` packages cannot be imported."""
    code = BLOCKER.format(blocked=set(blocked)) + "".join(f"import {module}\n" for module in modules)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def modules_of(package: str) -> list[str]:
    """Every module below a package, dotted."""
    files = sorted((ROOT / package).rglob("*.py"))
    return [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]


def passes_defined() -> dict[str, str]:
    """Class -> file, for each class in compress/passes that gives `kind` a value, as a pass of the vocabulary does."""
    found = {}
    for file in (ROOT / "compress/passes").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and any(_gives_kind(line) for line in node.body):
                found[node.name] = file.name
    return found


def _gives_kind(line: ast.stmt) -> bool:
    return isinstance(line, ast.AnnAssign) and getattr(line.target, "id", "") == "kind" and line.value is not None


def test_the_blocker_blocks() -> None:
    done = imports_without(("numpy",), "runtime.metrics")
    assert done.returncode != 0
    assert "numpy is blocked" in done.stderr


def test_the_runtime_imports_with_the_build_side_missing() -> None:
    modules = [module for module in modules_of("runtime") if not module.endswith("__main__")]
    assert len(modules) > 20
    done = imports_without(HEAVY, *modules)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["compress.passes", "compress.schema", "compress.recipe"])
def test_the_recipe_s_vocabulary_needs_no_build_library(module: str) -> None:
    done = imports_without(BUILD, module)
    assert done.returncode == 0, done.stderr


def test_the_runtime_never_imports_compress_even_inside_functions() -> None:
    for file in (ROOT / "runtime").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.partition(".")[0] == "compress" for name in names), file


def test_every_pass_is_in_the_vocabulary() -> None:
    from compress.passes import PASSES, Pass

    defined = passes_defined()
    assert len(defined) >= 5
    assert {one.__name__ for one in PASSES} == set(defined)
    kinds = [one.model_fields["kind"].default for one in PASSES]
    assert len(set(kinds)) == len(kinds)
    for one, kind in zip(PASSES, kinds, strict=True):
        assert defined[one.__name__] == f"{kind}.py"
        for method in ("check", "apply"):
            assert getattr(one, method) is not getattr(Pass, method), f"{kind} has no {method} of its own"


def test_every_metric_file_is_listed() -> None:
    import runtime.metrics as metrics

    listed = {id(metric) for metric in metrics.METRICS.values()} | {id(metric) for metric in metrics.MEASURED.values()}
    files = {path.stem for path in (ROOT / "runtime/metrics").glob("*.py")} - {"__init__", "base"}
    assert len(files) >= 4
    for stem in files:
        module = __import__(f"runtime.metrics.{stem}", fromlist=["_"])
        own = [
            one
            for value in vars(module).values()
            for one in (value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value])
            if isinstance(one, (metrics.Metric, metrics.MeasuredMetric))
        ]
        assert own, f"runtime/metrics/{stem}.py defines no metric"
        assert {id(one) for one in own} <= listed, f"runtime/metrics/{stem}.py has a metric that is not listed"


def test_every_backend_file_is_listed() -> None:
    from runtime.backends import BACKENDS, Backend

    files = {path.stem for path in (ROOT / "runtime/backends").glob("*.py")} - {"__init__", "base"}
    modules = {stem: __import__(f"runtime.backends.{stem}", fromlist=["_"]) for stem in files}
    own = {
        stem: {id(one) for one in vars(module).values() if isinstance(one, Backend)} for stem, module in modules.items()
    }
    assert all(own.values()), f"runtime/backends: a file that defines no backend: {own}"
    assert set().union(*own.values()) == {id(backend) for backend in BACKENDS.values()}
