"""Same recipe, same inputs: same bytes. And nothing is done twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from makers import MEASURED, bundle_bytes, changed, cli, plan, write_recipe
from typer.testing import CliRunner

from compress.cli import app
from compress.commands.reproduce import render_reproduction, reproduce
from compress.context import PassResult
from compress.errors import PlanError
from compress.execution.lock import list_clocked
from compress.execution.run import apply_recipe
from compress.recipe.load import load_recipe
from compress.recipe.repeat import repeat_training
from runtime.tasks.manifest import read_manifest

Net = tuple[Path, dict[str, Any]]


def run(*words: object) -> Result:
    """One command in this process, with stdout and stderr apart."""
    return CliRunner().invoke(app, [str(word) for word in words])


def sets_of(folder: Path) -> list[str]:
    """What tells a recipe of `net` where its files are."""
    wanted = {"model.source": f"python:{folder}/net.py:make", "model.weights": f"{folder}/net.safetensors"}
    wanted |= {"data.calibration.source": f"npz:{folder}/train.npz", "data.evaluation.source": f"npz:{folder}/test.npz"}
    return [word for key, value in wanted.items() for word in ("--set", f"{key}={value}")]


def test_another_machine_gives_the_same_bytes(net: Net, bundle: Path, tmp_path: Path) -> None:
    """Another process, checkout, cache, home, user, language and time zone."""
    checkout = tmp_path / "checkout of somebody else"
    shutil.copytree(net[0], checkout)
    recipe = write_recipe(checkout / "again.yaml", net[1])
    person = {"HOME": str(tmp_path), "USER": "eve", "LC_ALL": "C", "LANG": "tr_TR.UTF-8", "TZ": "Asia/Kathmandu"}
    done = cli(
        ["apply", str(recipe), "--out", "elsewhere/tiny", "--cache", "fresh", "--quiet"], tmp_path, True, **person
    )
    assert done.returncode == 0, done.stderr
    assert bundle_bytes(tmp_path / "elsewhere/tiny") == bundle_bytes(bundle)


def test_folders_of_a_machine_are_named_and_their_places_kept_apart(net: Net, cache: Path, tmp_path: Path) -> None:
    recipe = changed(net[1], vars={"files": "${env:NO_SUCH_VARIABLE:-data}"})
    recipe["data"]["evaluation"]["source"] = "npz:${files}/test.npz"
    made = []
    for name in ("here", "there"):
        folder = tmp_path / name
        shutil.copytree(net[0], folder)
        file = write_recipe(folder / "named.yaml", recipe)
        weights, train = folder / "net.safetensors", folder / "train.npz"
        sets = [f"vars.files={folder}", f"model.weights={weights}", f"data.calibration.source=npz:{train}"]
        apply_recipe(load_recipe(file, sets), folder / "out/tiny", cache, quiet=True)
        made.append(folder / "out/tiny")
    assert bundle_bytes(made[0]) == bundle_bytes(made[1])
    hashed = [path for path in made[0].rglob("*") if path.is_file() and path.name not in MEASURED]
    assert not [path.name for path in hashed if str(tmp_path).encode() in path.read_bytes()]
    text = (made[0] / "recipe.yaml").read_text()
    assert "npz:${files}/test.npz" in text and "${weights}/net.safetensors" in text
    assert "vars: {weights: weights, files: '${env:NO_SUCH_VARIABLE:-data}'}" in text
    host = json.loads((made[0] / "host.json").read_text())
    assert host["folders"] == {name: str(tmp_path / "here") for name in ("files", "weights")}
    for shown in (run("check", made[0] / "recipe.yaml"), run("check", made[0] / "recipe.yaml", *sets_of(net[0]))):
        assert shown.exit_code == 0, shown.output
    folders = [word for name in ("files", "weights") for word in ("--set", f"vars.{name}={net[0]}")]
    given = [*sets_of(net[0])[:2], *sets_of(net[0])[4:6]]  # what the bundle's recipe has no variable for
    planned = run("plan", made[0] / "recipe.yaml", "--cache", cache, "--json", *folders, *given)
    assert [row["cached"] for row in json.loads(planned.stdout)["steps"]] == [True, True, True], planned.output


def test_a_bundle_s_recipe_reads_back_from_any_folder(
    net: Net, bundle: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = bundle / "recipe.yaml"
    checked = run("check", recipe)
    assert (checked.exit_code, checked.stdout) == (0, recipe.read_text())
    for folder, sets in ((tmp_path, sets_of(net[0])), (net[0], [])):
        monkeypatch.chdir(folder)
        planned = run("plan", recipe, "--cache", cache, "--json", *sets)
        assert planned.exit_code == 0, planned.output
        assert [row["cached"] for row in json.loads(planned.stdout)["steps"]] == [True, True, True]
    monkeypatch.chdir(tmp_path)
    lost = run("plan", recipe, "--cache", cache)
    assert lost.exit_code == 2
    assert f"looked for {tmp_path}/net.safetensors and {bundle}/net.safetensors" in lost.stderr
    assert not list(tmp_path.iterdir())


def test_a_bundle_is_built_again_from_its_own_recipe(net: Net, bundle: Path) -> None:
    result = reproduce(bundle, quiet=True)
    assert result.same and result.n_files == len(read_manifest(bundle).files)
    assert render_reproduction(result) == f"reproduced: all {result.n_files} files have the same bytes"


def test_what_differs_is_named_with_its_reason(net: Net, bundle: Path, cache: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(net[0], moved)
    (moved / "test.npz").write_bytes((moved / "train.npz").read_bytes())
    sets = [f"data.evaluation.source=npz:{moved / 'test.npz'}"]
    result = reproduce(bundle, sets, tmp_path / "again", cache, quiet=True)
    assert {"evaluation/samples.npz", "lock.json"} <= set(result.different)
    assert "model/model.onnx" not in result.different
    assert result.reasons == ("data.evaluation: other samples",)
    assert "differs   evaluation/samples.npz" in render_reproduction(result)


def test_another_model_is_refused_before_anything_of_it_runs(net: Net, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("raise SystemExit('this code ran')")
    with pytest.raises(PlanError, match="the bundle was made from"):
        reproduce(bundle, [f"model.source=python:{tmp_path / 'net.py'}:make"], quiet=True)
    with pytest.raises(PlanError, match=r"--set vars\.NAME=DIR"):
        reproduce(bundle, ["model.weights=nowhere.safetensors"], quiet=True)


def test_training_that_a_clock_ended_makes_as_many_steps_again(net: Net) -> None:
    passes = [{"kind": "distill", "epochs": 3.0, "max_seconds": 5.0}, {"kind": "int8"}]
    recipe = load_recipe(write_recipe(net[0] / "clocked.yaml", changed(net[1], passes=passes)))
    found = {"optimizer": "sgd", "learning_rate": 0.03}
    results = [PassResult(None, measured={"distill": {"steps": 7.0}}, settled=found), PassResult(None)]
    made = dict(list_clocked(recipe, results))
    assert made == {"0": {"steps": 7, **found}}
    trained, rounded = repeat_training(recipe, made).passes
    assert (trained.steps, trained.epochs, trained.max_seconds, trained.learning_rate) == (7, None, None, 0.03)
    assert repeat_training(recipe, {"0": 7}).passes[0].steps == 7
    assert rounded == recipe.passes[1]


@pytest.mark.parametrize(
    ("change", "cached"),
    [
        ({"name": "other"}, [True, True, True]),
        ({"validate": {"benchmark": {"iterations": 11}}}, [True, True, True]),
        ({"validate": {"gates": [{"metric": "agreement", "min": 0.5}]}}, [True, True, False]),
        ({"passes": [{"kind": "int8", "calibration": "minmax"}]}, [True, True, False]),
        ({"target": "openvino"}, [True, False, False]),
        ({"data": {"evaluation": {"source": "npz:test.npz", "samples": 90}}}, [True, False, False]),
        ({"data": {"calibration": {"source": "npz:train.npz", "samples": 60}}}, [False, True, False]),
        ({"preprocess": {"kind": "image", "channels": "L", "mean": [0.5]}}, [False, False, False]),
        ({"model": {"args": {"hidden": 32}}}, [False, False, False]),
    ],
)
def test_a_step_depends_on_what_decides_it(
    net: Net, bundle: Path, cache: Path, change: dict[str, Any], cached: list[bool]
) -> None:
    steps = plan(changed(net[1], **change), net[0], cache).steps
    assert [step.cached for step in steps] == cached
