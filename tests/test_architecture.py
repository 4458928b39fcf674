"""What may import what, and that everything there is is listed."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from places import ROOT

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
    served = ("runtime.serving.app", "runtime.serving.server")  # what the extra `serve` is for
    modules = [module for module in modules_of("runtime") if not module.endswith("__main__") and module not in served]
    assert len(modules) > 20
    done = imports_without((*HEAVY, "starlette", "uvicorn", "h11", "model_signing", "cryptography"), *modules)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["compress.passes", "compress.recipe.schema", "compress.recipe.load"])
def test_the_recipe_s_vocabulary_needs_no_build_library(module: str) -> None:
    done = imports_without(BUILD, module)
    assert done.returncode == 0, done.stderr


def test_the_runtime_never_imports_compress_even_inside_functions() -> None:
    for file in (ROOT / "runtime").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.partition(".")[0] == "compress" for name in names), file


@pytest.mark.parametrize("package", ["compress", "runtime"])
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    """Imports inside functions and for types alone count, too."""
    modules = set(modules_of(package))
    imports: dict[str, set[str]] = {}
    for module in modules:
        path = ROOT / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        nodes = list(ast.walk(ast.parse(file.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= inside & modules or {node.module}
        imports[module] = (names & modules) - {module}
    list(TopologicalSorter(imports).static_order())  # CycleError names the circle


@pytest.mark.parametrize("package", ["compress", "runtime"])
def test_few_modules_lie_loose_at_the_root(package: str) -> None:
    assert len(list((ROOT / package).glob("*.py"))) <= 8


def test_every_pass_is_in_the_vocabulary() -> None:
    from compress.passes import PASSES, Pass

    defined = passes_defined()
    assert len(defined) >= 5
    assert {one.__name__ for one in PASSES} == set(defined)
    kinds = [one.model_fields["kind"].default for one in PASSES]
    assert len(set(kinds)) == len(kinds)
    for one, kind in zip(PASSES, kinds, strict=True):
        assert defined[one.__name__] == f"{kind}.py"
        assert one.check is not Pass.check, f"{kind} has no check of its own"


def test_every_pass_has_its_work() -> None:
    from compress.passes import PASSES
    from compress.work import WORK, find_work

    assert sorted(WORK) == sorted(one.model_fields["kind"].default for one in PASSES)
    for kind in WORK:
        assert find_work(kind).__name__.startswith("apply_")


def test_work_gives_the_form_of_model_that_it_got() -> None:
    """And asks for no more than what that form's stage is given."""
    from compress.blocks.streamed import StreamedModel
    from compress.context import PassContext
    from compress.models.load import TorchModel
    from compress.rounding.state import GraphState
    from compress.work import WORK, find_work
    from compress.work.contexts import GraphContext, ModelContext

    given = {TorchModel: ModelContext, StreamedModel: PassContext, GraphState: GraphContext}
    for kind in WORK:
        hints = get_type_hints(find_work(kind))
        (result,) = get_args(hints.pop("return"))
        _, model, context = hints.values()
        assert result == model, kind
        for form in get_args(model) or (model,):
            assert issubclass(given[form], get_args(context) or context), kind


def test_nobody_asks_which_pass_it_is() -> None:
    """A pass answers for itself, so that one from outside is served as ours are."""
    asked = []
    rooms = (ROOT / "compress/passes", ROOT / "compress/work")
    for file in (ROOT / "compress").rglob("*.py"):
        nodes = [] if file.is_relative_to(rooms[0]) or file.is_relative_to(rooms[1]) else _walk(file)
        imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("compress.passes")]
        records = {alias.asname or alias.name for node in imports for alias in node.names}
        for call in nodes:
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("isinstance", "issubclass"):
                named = {getattr(n, "id", "") or getattr(n, "attr", "") for n in ast.walk(call.args[1])}
                asked += [f"{file.relative_to(ROOT)}:{call.lineno}: {name}" for name in sorted(named & records)]
    assert asked == []


def _walk(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text())))


def test_no_record_asks_which_of_its_keys_were_given() -> None:
    """A recipe that is written out gives all of them; it must mean what the shorter one meant."""
    files = [*(ROOT / "compress").rglob("*.py"), *(ROOT / "runtime").rglob("*.py")]
    assert [file for file in files if "fields_set" in file.read_text()] == []


def test_every_metric_file_is_listed() -> None:
    import runtime.metrics as metrics
    from runtime.tasks.metrics import METRICS

    listed = {id(metric) for metric in (*METRICS.own.values(), *metrics.MEASURED.values())}
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


def test_every_task_file_is_listed_on_both_sides() -> None:
    from compress.tasks import TORCH_TASKS, TorchTask
    from runtime.tasks import TASKS, Task

    assert list(TASKS.own) == list(TORCH_TASKS.own)
    shared = {"__init__", "base", "manifest", "metrics", "predict", "sources"}
    for folder, table, kind in (("runtime", TASKS.own, type), ("compress", TORCH_TASKS.own, TorchTask)):
        files = {path.stem for path in (ROOT / folder / "tasks").glob("*.py")} - shared
        defined = {"generic"}
        for stem in files:
            module = __import__(f"{folder}.tasks.{stem}", fromlist=["_"])
            values = [v for value in vars(module).values() for v in (value if isinstance(value, tuple) else [value])]
            own = [one for one in values if isinstance(one, kind) and getattr(one, "name", "") in table]
            names = {one.name for one in own if kind is TorchTask or (issubclass(one, Task) and one is not Task)}
            assert stem.replace("_", "-") in names, f"{folder}/tasks/{stem}.py: its task is not listed"
            defined |= names
        assert defined == set(table), f"{folder}/tasks: a line without its file"


def test_no_file_but_its_own_names_a_task() -> None:
    from runtime.tasks import TASKS

    naming = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for package in ("compress", "runtime")
        for path in (ROOT / package).rglob("*.py")
        if path.parent.name != "tasks" and "zoo" not in path.parts and path.name != "words.py"  # other tools' words
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in set(TASKS)
    ]
    assert not naming


def test_every_backend_file_is_listed() -> None:
    from runtime.backends import BACKENDS, Backend

    files = {path.stem for path in (ROOT / "runtime/backends").glob("*.py")} - {"__init__", "base"}
    modules = {stem: __import__(f"runtime.backends.{stem}", fromlist=["_"]) for stem in files}
    own = {
        stem: {id(one) for one in vars(module).values() if isinstance(one, Backend)} for stem, module in modules.items()
    }
    assert all(own.values()), f"runtime/backends: a file that defines no backend: {own}"
    assert set().union(*own.values()) == {id(backend) for backend in BACKENDS.own.values()}
