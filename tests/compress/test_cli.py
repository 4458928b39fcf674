"""The command line: what it imports, how it ends, what it prints where. The heavy rooms are replaced."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from places import RECIPES, ROOT
from typer.testing import CliRunner, Result

import compress
from compress.cli import app
from compress.commands import doctor
from compress.commands.endings import SPIN_KEY, SPINS, run_program
from compress.engine import compile as engines
from compress.errors import PassError, PlanError
from compress.passes import PASSES
from compress.recipe.load import load_recipe
from compress.recipe.network import OFFLINE, restrict_network
from compress.recipe.vocabulary import editor_schema
from compress.version import DISTRIBUTION
from runtime.backends import BACKENDS
from runtime.bundle.format import Artifact, Gate, Judgement, Manifest
from runtime.bundle.tensors import TensorSpec
from runtime.errors import MissingDependency
from runtime.processes.telemetry import NO_TELEMETRY
from runtime.report.report import Report, Side, write_report
from runtime.report.stored import StoredReport
from runtime.tasks.manifest import write_bundle

HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "datasets", "optimum", "onnxscript", "pandas", "mcp")
RECIPE = """\
version: 1
name: tiny
model: {source: "python:model.py:build", task: image-classification}
preprocess: {kind: tensor}
passes: [{kind: rtn}]
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*OFFLINE, *NO_TELEMETRY, "COMPRESS_DEBUG"):
        monkeypatch.setenv(name, "0")  # so that what a command sets is undone afterwards
        monkeypatch.delenv(name)
    Path("recipe.yaml").write_text(RECIPE)


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def fresh(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own."""
    command = [sys.executable, *(("-c", code) if code else ()), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put functions in the place of a module."""

    def replace(name: str, **functions: Any) -> None:
        module = types.ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    return replace


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def test_a_recipe_from_elsewhere_says_whose_code_runs(
    room: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room("compress.planning.make_plan", make_plan=raising(PlanError("planned")))
    assert run("plan", "recipe.yaml").stderr == "planned\n"
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir("inside")
    assert run("plan", "../recipe.yaml").stderr.startswith("note: Python of this recipe's model runs now")
    trusted = ("--set", "model.source=dir:x", "--set", "model.trust_remote_code=true")
    assert "now, also to plan it: dir:x (" in run("plan", "../recipe.yaml", *trusted).stderr
    assert run("plan", "../recipe.yaml", "--set", "model.source=dir:x").stderr == "planned\n"


# --- imports ----------------------------------------------------------------------------------------------------------


def test_quick_commands_import_nothing_heavy() -> None:
    code = f"""
import sys
from compress.cli import app
for words in ("--help", "check recipe.yaml", "schema", "new --out new.yaml", "new --example list"):
    try:
        app(words.split())
    except SystemExit as end:
        assert not end.code, (words, end.code)
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = fresh(code)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


def test_importing_compress_imports_almost_nothing() -> None:
    done = fresh(
        "import sys, compress; print([m for m in ('pydantic', 'numpy', 'typer') if m in sys.modules], dir(compress))"
    )
    assert done.stdout.startswith("[] ") and "'load_recipe'" in done.stdout


def test_the_face_of_the_package() -> None:
    assert compress.load_recipe is load_recipe
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert compress.__version__ == version
    assert run("--version").stdout == f"compress {version} ({DISTRIBUTION})\n"
    with pytest.raises(AttributeError, match="no attribute 'aply'"):
        compress.aply  # noqa: B018


# --- check, schema, new -----------------------------------------------------------------------------------------------


def test_check_prints_a_recipe_that_checks() -> None:
    first = run("check", "recipe.yaml", "--set", "passes.0.bits=8", "--set", "seed=3")
    assert first.exit_code == 0 and "bits: 8" in first.stdout and "seed: 3" in first.stdout
    Path("again.yaml").write_text(first.stdout)
    assert run("check", "again.yaml").stdout == first.stdout
    document = json.loads(run("check", "again.yaml", "--json").stdout)
    assert document == recipe_text("again.yaml") and not rejected(editor_schema(), document)


def test_check_says_every_problem_on_stderr_and_ends_with_2() -> None:
    Path("recipe.yaml").write_text(RECIPE.replace("kind: rtn", "kind: rtn, bitz: 4") + "sed: 1\n")
    done = run("check", "recipe.yaml")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "recipe.yaml:5:22: passes.0.bitz: unknown key; did you mean 'bits'?",
        "recipe.yaml:6:1: sed: unknown key; did you mean 'seed'?",
    ]


@pytest.mark.parametrize("args", [[], ["check"], ["chekc"], ["apply"], ["check", "recipe.yaml", "--nope"]])
def test_a_wrong_call_ends_with_2(args: list[str]) -> None:
    assert run(*args).exit_code == 2


@pytest.mark.parametrize("task", ["image-classification", "text-classification", "feature-extraction", "generic"])
@pytest.mark.parametrize("source", [None, "hf:org/model", 'python:a "b".py:f'])
def test_new_writes_a_recipe_that_checks(task: str, source: str | None) -> None:
    assert run("new", "--task", task, "--out", "new.yaml", *(["--source", source] if source else [])).exit_code == 0
    assert Path("new.yaml").read_text().startswith("# yaml-language-server: $schema=./schema.json\n")
    assert json.loads(Path("schema.json").read_text()) == editor_schema()
    recipe = load_recipe("new.yaml")
    assert recipe.model.task == task and source in (None, recipe.model.source)
    assert not rejected(editor_schema(), recipe_text("new.yaml"))
    assert run("check", "new.yaml").exit_code == 0


def test_new_copies_a_recipe_that_comes_with_the_project_with_what_it_names() -> None:
    listed = run("new", "--example", "list").stdout
    assert "quickstart" in listed and "A small residual CNN for handwritten digits" in listed
    for name in (line.split()[0] for line in listed.splitlines()):
        done = run("new", "--example", name, "--out", f"{name}.yaml")
        assert done.exit_code == 0, done.stderr
        text = Path(f"{name}.yaml").read_text()
        assert (schema := re.match(r"# yaml-language-server: \$schema=(\S+)\n# \w", text)) and Path(schema[1]).is_file()
        assert all(Path(page).is_file() for page in re.findall("explained in (.+)", done.stdout))
    assert load_recipe("quickstart.yaml") == load_recipe(RECIPES / "quickstart.yaml")
    assert "did you mean 'quickstart'?" in run("new", "--example", "quickstrat").stderr
    assert run("new", "--example", "quickstart", "--task", "generic").exit_code == 2


def test_the_demo_applies_the_quickstart_to_the_usual_place(room: Callable[..., None]) -> None:
    asked = []
    room("compress.execution.run", apply_recipe=lambda recipe, out, *rest: asked.append((recipe.name, out)))
    done = run("demo")
    assert (done.exit_code, done.stderr) == (0, "")
    assert asked == [("quickstart-digits", Path("bundles/quickstart-digits"))]


def test_check_refuses_a_model_that_does_not_say_how_its_inputs_are_made() -> None:
    Path("recipe.yaml").write_text(RECIPE.replace("preprocess: {kind: tensor}\n", ""))
    done = run("check", "recipe.yaml")
    assert done.exit_code == 2
    assert done.stderr.startswith("recipe.yaml: preprocess: python:model.py:build does not say how its inputs")
    assert "add `preprocess: {kind: image, ...}`" in done.stderr


def test_new_refuses() -> None:
    again = run("new", "--out", "recipe.yaml")
    assert (again.exit_code, again.stderr) == (2, "recipe.yaml: exists already; remove it or give another --out\n")
    assert run("new", "--out", "no/such.yaml").stderr.startswith("no/such.yaml: cannot be written: ")
    wrong = run("new", "--task", "image-clasification", "--out", "n.yaml")
    assert (wrong.exit_code, wrong.stderr) == (
        2,
        "--task image-clasification: unknown task; did you mean 'image-classification'?\n",
    )
    assert run("new", "--source", "model.py", "--out", "n.yaml").stderr.startswith(
        "--source model.py: expected hf:<hub id>, "
    )


def test_schema_goes_to_stdout_or_a_file() -> None:
    assert json.loads(run("schema").stdout) == editor_schema()
    assert run("schema", "--out", "s.json").exit_code == 0
    assert json.loads(Path("s.json").read_text()) == editor_schema()


# --- the JSON Schema, judged by a slow and obvious validator ----------------------------------------------------------

TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def rejected(schema: dict[str, Any], value: Any, root: dict[str, Any] | None = None) -> str:
    """Why JSON Schema refuses the value; "" if it does not. Knows the keywords that the schema uses."""
    root = root or schema

    def inner(part: dict[str, Any], v: Any) -> str:
        return rejected(part, v, root)

    if "$ref" in schema:
        return inner(root["$defs"][schema["$ref"].rsplit("/", 1)[1]], value)
    if "anyOf" in schema and all(reasons := [inner(part, value) for part in schema["anyOf"]]):
        return f"none of {reasons}"
    if "oneOf" in schema and [inner(part, value) for part in schema["oneOf"]].count("") != 1:
        return f"not one of {schema['oneOf']}: {value}"
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kind = schema.get("type")
    if kind in ("number", "integer") and not (number and (kind == "number" or value == int(value))):
        return f"{value!r} is no {kind}"
    if kind in TYPES and not isinstance(value, TYPES[kind]):
        return f"{value!r} is no {kind}"
    if ("const" in schema and value != schema["const"]) or ("enum" in schema and value not in schema["enum"]):
        return f"{value!r} is not listed"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return f"{value!r} does not match"
    if number and (value < schema.get("minimum", value) or value > schema.get("maximum", value)):
        return f"{value} out of range"
    if isinstance(value, list) and "items" in schema:
        return next(filter(None, (inner(schema["items"], v) for v in value)), "")
    if isinstance(value, dict):
        if missing := [key for key in schema.get("required", ()) if key not in value]:
            return f"missing {missing}"
        known, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        if more is False and value.keys() - known.keys():
            return f"unknown {value.keys() - known.keys()}"
        parts = [(known.get(key, more if isinstance(more, dict) else {}), v) for key, v in value.items()]
        return next(filter(None, (inner(part, v) for part, v in parts)), "")
    return ""


def recipe_text(file: str) -> Any:
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True).load(Path(file))


@pytest.mark.parametrize(
    "text",
    [
        RECIPE,
        RECIPE.replace("kind: rtn", "kind: rtn, bits: '${b}', symmetric: '${s}', targets: '${t}', ignore: ['${i}']")
        + "vars: {b: 4}\n",
        "include: base.yaml\nmodel: {weights: x}\ndata: {train: {samples: 3}}\n",
        RECIPE.replace("preprocess: {kind: tensor}\n", "")
        + "preprocess: {kind: image, resize: [32, '${w}'], scale: 1}\nvalidate: {gates: [{metric: top1, min: 0.5}]}\n",
        RECIPE + "target: '${target}'\n",
    ],
)
def test_schema_accepts(text: str) -> None:
    Path("r.yaml").write_text(text)
    assert not rejected(editor_schema(), recipe_text("r.yaml"))


@pytest.mark.parametrize(
    "text",
    [
        RECIPE + "sed: 3\n",
        RECIPE.replace("kind: rtn", "kind: rtn, bitz: 4"),
        RECIPE.replace("kind: rtn", "kind: rtn, bits: five"),
        RECIPE.replace("kind: rtn", "bits: 4"),
        RECIPE.replace("kind: rtn", "kind: rnt"),
        RECIPE.replace("name: tiny\n", ""),
        RECIPE.replace("python:", ""),
        RECIPE + "validate: {gates: [{metric: topp1, min: 0.5}]}\n",
        RECIPE + "seed: '3'\n",
    ],
)
def test_schema_rejects(text: str) -> None:
    Path("r.yaml").write_text(text)
    assert rejected(editor_schema(), recipe_text("r.yaml"))


def test_every_record_of_the_schema_is_closed_and_every_key_explained() -> None:
    schema = editor_schema()
    for name, record in schema["$defs"].items():
        assert record["additionalProperties"] is False, name
        assert "description" in record, name
    assert all("description" in value for key, value in schema["properties"].items() if "$ref" not in value), (
        "top level"
    )
    assert {record.__name__ for record in PASSES} <= schema["$defs"].keys()


# --- plan, apply, validate: exit codes, JSON, network -----------------------------------------------------------------


@dataclass(frozen=True)
class FakePlan:
    def to_dict(self) -> dict[str, Any]:
        return {"steps": []}

    def render(self, console: Any) -> None:
        console.print("the plan")


def report(verdict: Any) -> Report:
    return Report(verdict, "tiny", "onnxruntime-cpu", Side(), Side())


def test_plan(room: Callable[..., None]) -> None:
    room("compress.planning.make_plan", make_plan=lambda recipe, cache, verify: FakePlan())
    assert run("plan", "recipe.yaml").stdout == "the plan\n"
    assert json.loads(run("plan", "recipe.yaml", "--json").stdout) == {"steps": []}


@pytest.mark.parametrize(("verdict", "code"), [("pass", 0), ("fail", 3), ("undecided", 3)])
def test_apply_ends_as_the_verdict_says(verdict: str, code: int, room: Callable[..., None]) -> None:
    calls: list[tuple[Any, ...]] = []

    def apply_recipe(
        recipe: Any, out: Path, cache: Path | None, quiet: bool, verify: bool, earlier: StoredReport | None
    ) -> Report:
        calls.append((recipe.name, out, cache, quiet))
        print("progress")
        return report(verdict)

    room("compress.execution.run", apply_recipe=apply_recipe)
    shown = run("apply", "recipe.yaml", "--out", "b", "--cache", "c")
    assert shown.exit_code == code and "progress" in shown.stdout
    asked = run("apply", "recipe.yaml", "--out", "b", "--json")
    assert asked.exit_code == code and json.loads(asked.stdout)["verdict"] == verdict
    told = run("apply", "recipe.yaml", "--out", "b", "--json", "--progress")
    assert told.exit_code == code and json.loads(told.stdout) == json.loads(asked.stdout)
    run("apply", "recipe.yaml", "--short")
    assert calls == [
        ("tiny", Path("b"), Path("c"), False),
        ("tiny", Path("b"), None, True),
        ("tiny", Path("b"), None, False),
        ("tiny", Path("bundles/tiny"), None, True),
    ]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PlanError(["one", "two"]), 2, "one\ntwo\n"),
        (PassError("rtn: layer x"), 1, "rtn: layer x\n"),
        (MissingDependency("torch", "this"), 1, "this needs the package 'torch'"),
        (KeyboardInterrupt(), 130, "stopped; finished work is kept, the same command goes on from there\n"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            1,
            "No module named 'torch'; pip install 'compress-models[build]' installs the build side",
        ),
        (KeyError("x"), 1, "KeyError: 'x' (a defect, or a library that failed; COMPRESS_DEBUG=1 or"),
    ],
)
def test_how_failures_end(error: BaseException, code: int, said: str, room: Callable[..., None]) -> None:
    room("compress.planning.make_plan", make_plan=raising(error))
    done = run("plan", "recipe.yaml")
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr.startswith(said) and "Traceback" not in done.stderr
    asked = json.loads(run("plan", "recipe.yaml", "--json").stdout)
    assert (asked["verdict"], asked["exit_code"]) == ("error", code)
    debugged = run("--debug", "plan", "recipe.yaml")
    assert ("Traceback" in debugged.stderr) is (code != 130)


@pytest.mark.parametrize("words", [["plan"], ["judge", "x"], ["plan", "recipe.yaml", "--sett", "x"]])
def test_a_wrong_call_with_json_is_one_document(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run_program(app, [*words, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (end.value.code, document["exit_code"], document["verdict"]) == (2, 2, "error")


@pytest.mark.parametrize(
    ("given", "waited"),
    [({}, SPINS), ({SPIN_KEY: "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
    ids=["nothing", "how long", "how"],
)
def test_threads_wait_briefly_unless_the_caller_says(
    given: dict[str, str], waited: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (SPIN_KEY, "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        run_program(app, ["--version"])
    assert os.environ.get(SPIN_KEY) == waited


def test_json_keeps_stdout_clean_even_of_child_processes() -> None:
    code = """
import os, subprocess, sys, types
from runtime.report.stored import StoredReport
from runtime.report.report import Report, Side
room = types.ModuleType("compress.execution.run")
def apply_recipe(recipe, out, cache, quiet, verify, earlier):
    print("python prints")
    os.write(1, b"C prints\\n")
    subprocess.run([sys.executable, "-c", "print('a child prints')"])
    return Report("pass", "tiny", "onnxruntime-cpu", Side(), Side())
room.apply_recipe = apply_recipe
sys.modules["compress.execution.run"] = room
from compress.cli import app
app(["apply", "recipe.yaml", "--out", "b", "--json"])
"""
    done = fresh(code)
    assert json.loads(done.stdout)["verdict"] == "pass"
    assert all(line in done.stderr for line in ("python prints", "C prints", "a child prints"))


def test_the_network_is_off_unless_the_recipe_names_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    restrict_network(load_recipe("recipe.yaml", ["model.source=hf:org/model"]))
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1" and "HF_HUB_OFFLINE" not in os.environ
    restrict_network(load_recipe("recipe.yaml", ["data.train.source=hf:org/set"]))
    assert "HF_HUB_OFFLINE" not in os.environ
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
    restrict_network(load_recipe("recipe.yaml"))
    assert os.environ["HF_HUB_OFFLINE"] == "1" and os.environ["HF_DATASETS_OFFLINE"] == "0"


# --- doctor -----------------------------------------------------------------------------------------------------------


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package with these modules, name -> its code, in a place that comes before all others."""
    (place := tmp_path / "site-packages").mkdir()
    monkeypatch.syspath_prepend(str(place))

    def install(name: str, files: Mapping[str, str] = {}, requires: Sequence[str] = ()) -> None:
        (info := place / f"{name.replace('-', '_')}-9.dist-info").mkdir()
        lines = [
            "Metadata-Version: 2.4",
            f"Name: {name}",
            "Version: 9",
            *(f"Requires-Dist: {line}" for line in requires),
        ]
        (info / "METADATA").write_text("\n".join(lines))
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        for file, code in files.items():
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            (place / file).write_text(code)

    return install


def test_doctor_reads_its_requirements_from_the_metadata(install: Install) -> None:
    lines = [
        "numpy>=2.0",
        "pillow>=11; extra == 'image'",
        'compress-models[image]; extra == "build"',
        "numpy; extra == 'build'",
    ]
    install(DISTRIBUTION, requires=[*lines, "x-y[z]<9,>=1.2; extra == 'build'", "ruff; extra == 'dev'"])
    found = [(r.name, r.least, r.extra) for r in doctor._list_once(doctor._list_requirements())]
    assert found == [("numpy", "2.0", ""), ("pillow", "11", "image"), ("x-y", "1.2", "build")]
    extras = {extra.name: extra.missing for extra in doctor._list_extras(doctor._list_requirements())}
    assert extras == {"build": ("x-y",), "image": ()}


def test_doctor_knows_what_each_extra_gives() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.keys() == {*doctor.EXTRAS, "dev"}


def test_doctor_tells_missing_old_broken_and_good_apart(install: Install) -> None:
    found = doctor._examine_package(doctor.Requirement("surely-not-here", "1", "text"))
    assert (found.state, found.mend) == ("missing", "pip install 'surely-not-here>=1'")
    assert doctor._examine_package(doctor.Requirement("numpy", "99", "")).state == "too old"
    assert doctor._examine_package(doctor.Requirement("numpy", "1.9", "")).state == "ok"
    install("torn", {"torn.py": "import surely_not_here"})
    assert doctor._examine_package(doctor.Requirement("torn", "1.9", "")).state == "broken"
    assert doctor.trouble("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)") == "crashed (signal 11)"


@pytest.mark.parametrize(
    ("package", "files", "modules"),
    [
        ("cuda-bindings", ["cuda/bindings/__init__.py", "cuda/bindings/_lib/__init__.py"], ["cuda.bindings"]),
        ("tensorrt-rtx-cu13-libs", ["tensorrt_rtx_libs/__init__.py", "../../../bin/x"], ["tensorrt_rtx_libs"]),
        ("pillow", ["PIL/__init__.py", "pillow.libs/libz.so"], ["PIL"]),
        ("ruamel.yaml", ["ruamel/yaml/__init__.py"], ["ruamel.yaml"]),
        ("optimum", ["optimum/fx/__init__.py", "optimum/version.py"], ["optimum"]),
        ("matplotlib", ["matplotlib/__init__.py", "mpl_toolkits/axes_grid1/__init__.py", "pylab.py"], ["matplotlib"]),
        ("two-parts", ["one/__init__.py", "_hidden/__init__.py", "two.py"], ["one", "two"]),
        ("only-data", ["share/model.bin"], []),
    ],
)  # fmt: skip
def test_doctor_imports_what_a_package_installed(
    package: str, files: list[str], modules: list[str], install: Install
) -> None:
    install(package, dict.fromkeys(files, ""))
    assert doctor.find_modules(package) == modules


def test_doctor_imports_together_what_can_be_and_alone_what_fails(tmp_path: Path, install: Install) -> None:
    ends = {"leaving": "raise SystemExit('no')", "crashing": "import os; os.abort()"}
    names = ("sound", "leaving", "good", "crashing", "whole")
    for name in names:
        noted = f"with open({str(tmp_path / 'imported')!r}, 'a') as file: file.write('{name} ')\n"
        install(name, {f"{name}.py": noted + ends.get(name, "")})
    found = doctor._examine_packages([doctor.Requirement(name, "0", "") for name in (*names, "surely-not-here")])
    assert [(finding.state, finding.why) for finding in found] == [
        ("ok", ""),
        ("broken", "no"),
        ("ok", ""),
        ("broken", "crashed (signal 6)"),
        ("ok", ""),
        ("missing", ""),
    ]
    imported = (tmp_path / "imported").read_text().split()
    assert imported[:4] == ["sound", "leaving", "good", "crashing"]
    assert sorted(imported[4:]) == ["crashing", "leaving", "whole"], "alone"


def test_doctor_answers(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(DISTRIBUTION, requires=["sound>=2.0", "surely-not-here; extra == 'trust'"])
    install("sound", {"sound.py": ""})
    monkeypatch.setattr(doctor, "trouble", lambda code: "not today")
    monkeypatch.setattr(engines, "why_not_here", lambda order: f"no {order.runtime} today")
    findings = json.loads(run("doctor", "--json").stdout)["findings"]
    assert [(f["part"], f["name"], f["state"]) for f in findings if f["part"] != "plug-in"] == [
        ("running bundles", "sound", "ok"),
        ("trust", "surely-not-here", "missing"),
        *(("backend", name, "missing") for name in BACKENDS.own),
        ("compiler", "tensorrt", "missing"),
        ("compiler", "tensorrt-rtx", "missing"),
    ]
    said = run("doctor").stdout
    assert "openvino: not today" in said
    assert re.search(r"trust +1 missing +signatures and bills of materials", said)
    assert "tensorrt: no tensorrt today" in said


@pytest.mark.parametrize("args", [["doctor"], ["doctor", "--json"]])
def test_doctor_runs_where_the_runtime_alone_is_installed(args: list[str]) -> None:
    done = fresh(
        f"""
import sys
for name in ("typer", "rich", "pydantic", "onnx_ir"):
    sys.modules[name] = None
from compress.commands import doctor
doctor.trouble = lambda code: ""
doctor._list_requirements = lambda: [doctor.Requirement("surely-not-here", "1", "build")]
sys.argv = ["compress", *{args!r}]
import compress.cli
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "surely-not-here" in done.stdout and "tensorrt" in done.stdout


def test_the_python_face_says_how_the_build_side_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "compress.recipe.load", None)
    with pytest.raises(ModuleNotFoundError, match=r"compress\.load_recipe: .*; pip install 'compress-models\[build\]'"):
        compress.load_recipe  # noqa: B018


# --- bundles ----------------------------------------------------------------------------------------------------------


def make_bundle(name: str, **measured: Any) -> Manifest:
    folder = Path(name)
    (folder / "model").mkdir(parents=True)
    (folder / "model/model.onnx").write_bytes(b"x" * 1536)
    (folder / "layers.json").write_text(
        json.dumps(
            [{"layer": "head", "action": "kept", "reason": "too sensitive"}, {"layer": "body", "action": "int8"}]
        )
    )
    specs = (TensorSpec("image", "float32", ("batch", 3, 8, 8)),)
    artifact = Artifact("candidate", "model/model.onnx", "onnxruntime-cpu", "int8", specs, specs, 1536)
    manifest = write_bundle(
        folder,
        Manifest(
            name=name,
            task="image-classification",
            target="onnxruntime-cpu",
            preprocess={"kind": "tensor"},
            artifacts=(artifact,),
            evaluation=None,
            judgement=Judgement(gates=(Gate("top1", max_drop=0.01, min=0.5),)),
            created_by="compress 0.1.0",
        ),
    )
    if measured:
        side = Side(metrics={"top1": 0.75}, latency_ms={"p50": 1.25}, size_bytes=1536)
        made = Report("pass", name, "onnxruntime-cpu", side, side, manifest.digest, ratios={"size": 2.0}, **measured)
        write_report(made, folder)
    return manifest


def test_inspect() -> None:
    manifest = make_bundle("b")
    shown = run("inspect", "b").stdout
    for part in (
        "image float32[batch, 3, 8, 8]",
        "1.5 KiB",
        "not judged yet",
        "top1 max_drop 0.01, min 0.5",
        "kept head: too sensitive",
    ):
        assert part in shown, shown
    assert "layers: 1 kept, 1 int8" in shown
    asked = json.loads(run("inspect", "b", "--json").stdout)
    assert (asked["name"], asked["digest"], asked["verdict"], len(asked["layers"])) == ("b", manifest.digest, None, 2)
    assert run("inspect", "nowhere").exit_code == 1


def test_compare_refuses_what_was_not_validated() -> None:
    make_bundle("a")
    make_bundle("b", n_samples=1)
    report_file = Path("b/report.json")
    report_file.write_text(json.dumps({**json.loads(report_file.read_text()), "manifest_digest": "0" * 64}))
    done = run("compare", "a", "b", "nowhere")
    assert done.exit_code == 2
    assert done.stderr.splitlines() == [
        "a: no report.json; `compress validate a` writes it",
        "b/report.json: is of another bundle; `compress validate b` writes it anew",
        "nowhere/manifest.json: No such file or directory; is this a bundle's folder?",
    ]


def test_verify_and_validate(room: Callable[..., None]) -> None:
    manifest = make_bundle("b")
    assert run("verify", "b").stdout == f"b: all 2 files are as the manifest says (digest {manifest.digest})\n"
    assert json.loads(run("verify", "b", "--json").stdout) == {"verdict": "pass", "files": 2, "digest": manifest.digest}
    asked: list[object] = []
    room(
        "runtime.report.validate",
        validate=lambda path, report_folder, earlier, progress, undecided: (
            asked.append((report_folder, earlier)) or report("fail")
        ),
    )
    assert run("validate", "b").exit_code == 3 and run("validate", "b", "--report", "r").exit_code == 3
    assert asked == [(None, None), (Path("r"), None)]
    assert json.loads(run("validate", "b", "--json").stdout)["verdict"] == "fail"


def test_verify_refuses_a_changed_file() -> None:
    make_bundle("b")
    Path("b/model/model.onnx").write_bytes(b"y" * 1536)
    done = run("verify", "b")
    assert done.exit_code == 1 and "model/model.onnx" in done.stderr
