"""A package outside adds a metric, a pass and a backend: the one that the documentation shows, in a folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from child_processes import run_python
from makers import changed, image_recipe, write_recipe
from onnx import numpy_helper
from places import ROOT
from shortcuts import QUICK_COMMAND

PAGE = ROOT / "docs/howto/extend.md"
FILE = re.compile(r'^```\w+ title="([\w./]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def install(folder: Path, entry_points: str, name: str = "acme-compress", **files: str) -> Path:
    """Lay a distribution into a folder as pip does: its modules, its name and its entry points."""
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)
    for module, text in files.items():
        (folder / f"{module}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the page."""
    folder = tmp_path_factory.mktemp("site")
    files = dict(FILE.findall(PAGE.read_text()))
    for name in [name for name in files if name.endswith(".py")]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(files[name])
    groups = tomllib.loads(files["pyproject.toml"])["project"]["entry-points"]
    assert len(groups) == 3
    lines = [f"[{group}]\n{name} = {path}\n" for group in groups for name, path in groups[group].items()]
    return install(folder, "".join(lines))


@pytest.fixture(scope="module")
def bundle(acme: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle in whose recipe all three are named."""
    folder = tmp_path_factory.mktemp("recipe")
    recipe = changed(
        image_recipe(folder),
        target="onnxruntime-plain",
        passes=[{"kind": "clip_weights", "deviations": 1.0}],
        validate={"gates": [{"metric": "brier", "max": 2.0}]},
    )
    out = folder / "bundle"
    call = ("apply", write_recipe(folder / "tiny.yaml", recipe), "--out", out, "--quiet")
    assert python(acme, "-c", QUICK_COMMAND, *call, cache=folder / "cache").returncode == 0
    return out


def python(*words: Any, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with the folder `words[0]` among those where distributions are installed."""
    search = os.pathsep.join([str(words[0]), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": search, "COMPRESS_CACHE": str(cache or "")}
    return run_python(*words[1:], cwd=Path("/"), environment=environment)


def last_problem(done: subprocess.CompletedProcess[str], exit_code: int = 1) -> str:
    """The message that a command ended with, which is no traceback."""
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip()


def test_the_recipe_of_the_page_is_read_where_the_package_is_installed(acme: Path, tmp_path: Path) -> None:
    (line,) = (line for line in PAGE.read_text().splitlines() if line.startswith("compress apply"))
    words = shlex.split(line)
    changes = [word for pair in pairwise(words) if pair[0] == "--set" for word in pair]
    assert len(changes) == 6
    call = ("-m", "compress", "check", ROOT / "recipes/quickstart.yaml", *changes)
    shown = python(acme, *call)
    assert shown.returncode == 0, shown.stderr
    assert "deviations: 3.0" in shown.stdout
    assert "unknown pass 'clip_weights'" in last_problem(python(tmp_path, *call), 2)


def test_a_pass_from_outside_changes_the_weights(bundle: Path) -> None:
    def weights(name: str) -> dict[str, np.ndarray]:
        graph = onnx.load(next((bundle / name).glob("*.onnx"))).graph
        return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}

    before, after = weights("baseline"), weights("model")
    matrices = [name for name, value in before.items() if value.ndim > 1 and value.dtype == np.float32]
    assert len(matrices) == 3
    for name in matrices:
        assert np.array_equal(after[name], np.clip(before[name], -before[name].std(), before[name].std()))
        assert not np.array_equal(after[name], before[name])
    rows = json.loads((bundle / "layers.json").read_text())
    assert [row["action"] for row in rows] == ["clipped"] * 3


def test_a_metric_and_a_backend_from_outside_judge(acme: Path, bundle: Path) -> None:
    report = json.loads((bundle / "report.json").read_text())
    assert report["backend"] == "onnxruntime-plain"
    assert report["candidate"]["metrics"]["brier"] < 2.0
    assert [gate["metric"] for gate in report["gates"]] == ["brier"]
    assert report["environment"]["versions"]["acme-compress"] == "1.0"
    done = python(acme, "-m", "runtime", "validate", bundle, "--backend", "onnxruntime-plain", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["backend"] == "onnxruntime-plain"


def test_the_lock_names_what_was_used_of_outside(bundle: Path) -> None:
    plugins = json.loads((bundle / "lock.json").read_text())["plugins"]
    assert list(plugins) == [
        "compress.passes: clip_weights",
        "runtime.backends: onnxruntime-plain",
        "runtime.metrics: brier",
    ]
    assert {(record["distribution"], record["version"]) for record in plugins.values()} == {("acme-compress", "1.0")}
    assert len({record["code"] for record in plugins.values()}) == 1


def test_a_bundle_is_judged_without_the_package_but_for_what_it_lacks(bundle: Path, tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "runtime", "validate", bundle, "--report", tmp_path)
    assert "unknown metric 'brier'" in last_problem(done, 2)


def test_passes_are_done_again_when_the_code_of_a_plugin_changes(acme: Path, bundle: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from compress.recipe.load import load_recipe; "
        "from compress.planning.make_plan import make_plan; "
        "plan = make_plan(load_recipe(sys.argv[1]), Path(sys.argv[2])); print([row.cached for row in plan.steps])"
    )
    recipe, cache = bundle.parent / "tiny.yaml", bundle.parent / "cache"
    assert python(acme, "-c", code, recipe, cache).stdout.strip() == "[True, True, True]"
    site = tmp_path / "site"
    shutil.copytree(acme, site)
    (site / "acme/work.py").write_text((site / "acme/work.py").read_text() + "# another version\n")
    assert python(site, "-c", code, recipe, cache).stdout.strip() == "[False, False, False]"


def test_no_image_is_written_for_a_backend_whose_packages_are_not_known(
    acme: Path, bundle: Path, tmp_path: Path
) -> None:
    where = ("--to", "docker", "--backend", "onnxruntime-plain", "--out", tmp_path / "image")
    done = python(acme, "-m", "compress", "deploy", bundle, *where)
    assert "docker: onnxruntime-plain is a plug-in's backend" in last_problem(done)


DOCTOR = """
import json
from compress.commands import doctor
from runtime.plugins import BACKEND_GROUP, find_plugins
doctor._list_requirements, doctor.ENGINES = list, ()
doctor._list_backends = lambda: [plugin.name for plugin in find_plugins(BACKEND_GROUP)]
print(json.dumps(doctor.examine()["findings"]))
"""
"""What it finds of plug-ins; importing each library and backend in a process of its own takes seconds."""
SORTING = """
from runtime.tasks.image_classification import ImageClassification
class Sorting(ImageClassification):
    name = "photo-sorting"
    about = "photos into heaps"
SORTING = Sorting()
"""
TORCH_SORTING = """
from dataclasses import replace
from compress.tasks.image_classification import IMAGE_CLASSIFICATION
SORTING = replace(IMAGE_CLASSIFICATION, name="photo-sorting")
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with a task."""
    points = "[runtime.tasks]\nphoto-sorting = photos:SORTING\n[compress.tasks]\nphoto-sorting = torch_photos:SORTING\n"
    return install(tmp_path_factory.mktemp("kit"), points, "photo-kit", photos=SORTING, torch_photos=TORCH_SORTING)


def test_a_task_from_outside_is_one_on_both_sides(photos: Path, tmp_path: Path) -> None:
    recipe = changed(image_recipe(tmp_path), model={"task": "photo-sorting"})
    call = ("apply", write_recipe(tmp_path / "tiny.yaml", recipe), "--out", tmp_path / "bundle", "--quiet")
    done = python(photos, "-c", QUICK_COMMAND, *call, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "bundle/report.json").read_text())["task"] == "photo-sorting"
    plugins = json.loads((tmp_path / "bundle/lock.json").read_text())["plugins"]
    assert list(plugins) == ["compress.tasks: photo-sorting", "runtime.tasks: photo-sorting"]
    done = python(photos, "-m", "compress", "new", "--task", "photo-sorting", "--out", tmp_path / "new.yaml")
    assert done.returncode == 0 and "task: photo-sorting" in (tmp_path / "new.yaml").read_text()
    done = python(tmp_path / "elsewhere", "-m", "runtime", "validate", tmp_path / "bundle")
    assert "'photo-sorting' is not one of" in last_problem(done)


def test_the_schema_has_what_is_installed(acme: Path, photos: Path) -> None:
    schema = json.loads(python(os.pathsep.join(map(str, (acme, photos))), "-m", "compress", "schema").stdout)
    assert '"photo-sorting"' in json.dumps(schema)
    assert schema["$defs"]["ClipWeights"]["properties"]["deviations"]["description"] == "Standard deviations that stay."
    assert '"brier"' in json.dumps(schema["$defs"]["Gate"]["properties"]["metric"])
    assert '"onnxruntime-plain"' in json.dumps(schema["properties"]["target"])
    plain = json.loads((ROOT / "recipes/schema.json").read_text())
    assert schema["$defs"]["Int8"] == plain["$defs"]["Int8"]


def test_names_are_known_without_importing_what_they_name(acme: Path) -> None:
    code = (
        "import sys; from runtime.tasks.metrics import METRICS, metric_names; from runtime.backends import BACKENDS; "
        "assert 'brier' in metric_names() and 'onnxruntime-plain' in BACKENDS and METRICS['top1']; "
        "assert not [name for name in sys.modules if name.startswith('acme')]; "
        "from compress.recipe.schema import Recipe; assert 'acme.passes' in sys.modules; "
        "assert not {'acme.work', 'torch', 'onnx'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(acme), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["acme.passes", "acme.metrics", "acme.backends", "acme.work"])
def test_a_module_of_the_package_can_be_the_first_import(acme: Path, module: str) -> None:
    done = python(acme, "-c", f"import {module}; from compress.recipe.schema import Recipe")
    assert done.returncode == 0, done.stderr


def test_nothing_is_read_from_the_working_directory(acme: Path) -> None:
    asked = "from runtime.tasks.metrics import METRICS; assert 'brier' not in METRICS"
    code = f"import os; os.chdir({str(acme)!r}); {asked}"
    done = subprocess.run([sys.executable, "-c", code], cwd=acme, env={"PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 0


BROKEN = {
    "import": ("runtime.metrics", "absent", "no_import:METRIC", "import surely_not_here"),
    "work": ("compress.passes", "lazy", "no_work:Lazy", """
from typing import ClassVar, Literal
from compress.facts import PassPlan
from compress.passes import Pass


class Lazy(Pass):
    work: ClassVar[str] = "no_work:nowhere"
    kind: Literal["lazy"] = "lazy"

    def check(self, facts, target):
        return PassPlan(facts)
"""),
    "backend": ("runtime.backends", "nobody", "no_backend:BACKEND", "BACKEND = 'onnxruntime'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders, each with a distribution that cannot be used."""
    return {
        key: install(tmp_path_factory.mktemp(key), f"[{group}]\n{name} = {path}\n", f"no-{key}", **{f"no_{key}": text})
        for key, (group, name, path, text) in BROKEN.items()
    }


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        (
            "import",
            {"validate": {"gates": [{"metric": "absent", "min": 0}]}},
            "plug-in 'absent' of runtime.metrics, no_import:METRIC in no-import 1.0: importing no_import:METRIC ends "
            "in ModuleNotFoundError: No module named 'surely_not_here'; mend it, or remove it: pip uninstall no-import",
        ),
        (
            "work",
            {"passes": [{"kind": "lazy"}]},
            "plug-in 'lazy' of compress.passes, no_work:Lazy in no-work 1.0: importing no_work:nowhere ends in "
            "AttributeError: module 'no_work' has no attribute 'nowhere'; mend it, or remove it: pip uninstall no-work",
        ),
        (
            "backend",
            {"target": "nobody"},
            "plug-in 'nobody' of runtime.backends, no_backend:BACKEND in no-backend 1.0: it is a str, and must be a "
            "runtime.backends.base.Backend; mend it, or remove it: pip uninstall no-backend",
        ),
    ],
    ids=list(BROKEN),
)
def test_a_plan_says_what_is_wrong_with_a_plugin(
    broken: dict[str, Path], tmp_path: Path, key: str, change: dict[str, Any], message: str
) -> None:
    file = write_recipe(tmp_path / "tiny.yaml", changed(image_recipe(tmp_path), **change))
    assert last_problem(python(broken[key], "-m", "compress", "plan", file, cache=tmp_path / "cache")) == message


def test_doctor_lists_plugins_and_what_is_wrong_with_them(acme: Path, photos: Path, broken: dict[str, Path]) -> None:
    site = os.pathsep.join(map(str, (acme, photos, *broken.values())))
    findings = {finding["name"]: finding for finding in json.loads(python(site, "-c", DOCTOR).stdout)}
    assert findings["onnxruntime-plain"]["part"] == "backend"
    assert findings["onnxruntime-plain"]["state"] == "ok"
    assert findings["nobody"]["state"] == "missing"
    plugins = {name: finding["state"] for name, finding in findings.items() if finding["part"] == "plug-in"}
    assert plugins == {
        "compress.passes: clip_weights": "ok",
        "runtime.metrics: brier": "ok",
        "runtime.backends: onnxruntime-plain": "ok",
        "compress.tasks: photo-sorting": "ok",
        "runtime.tasks: photo-sorting": "ok",
        "runtime.metrics: absent": "broken",
        "compress.passes: lazy": "broken",
        "runtime.backends: nobody": "broken",
    }
    assert findings["runtime.metrics: brier"]["version"] == "acme-compress 1.0"
    assert "surely_not_here" in findings["runtime.metrics: absent"]["why"]
