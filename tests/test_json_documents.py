"""What `--json` prints is what its JSON Schema says: real documents of every command, on tiny models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_servers import serve
from makers import image_recipe, write_recipe
from places import ROOT
from registry_double import Registry
from sample_projects import write_tensor_files
from shortcuts import quick_run
from typer.testing import CliRunner

from compress.cli import app
from compress.commands import bench as benching
from compress.commands import doctor
from compress.search.sweep import sweep
from runtime.backends import BACKENDS

jsonschema = pytest.importorskip("jsonschema")
__all__ = ["quick_run"]
SPACE = {"passes.0.calibration": {"choice": ["mse", "minmax"]}}
SEARCH = {"space": SPACE, "goals": ["minimize size"], "trials": 2}
Refuse = Callable[[str, Any], list[str]]


@pytest.fixture(scope="module")
def documents() -> Iterator[Any]:
    """The hook of the documentation that makes the schemas."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs/hooks")
        import documents

        yield documents


@pytest.fixture(scope="module")
def refuse(documents: Any) -> Refuse:
    """Return why a document is not what its schema says."""

    def find(name: str, document: Any) -> list[str]:
        schema = documents.write_schema(name)
        jsonschema.Draft202012Validator.check_schema(schema)
        errors = jsonschema.Draft202012Validator(schema).iter_errors(document)
        return [f"{error.json_path}: {error.message[:200]}" for error in errors]

    return find


def ask(*words: Any, code: int = 0) -> Any:
    """Return the document that a command prints."""
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert done.exit_code == code, done.stderr
    return json.loads(done.stdout, parse_constant=pytest.fail)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its data and a recipe, and what `apply --json` printed of two bundles of it."""
    folder = tmp_path_factory.mktemp("project")
    recipe = write_recipe(folder / "recipe.yaml", image_recipe(folder))
    for name, *changes in (("a",), ("b", "--set", "passes.0.calibration=minmax")):
        document = ask("apply", recipe, "--out", folder / name, "--cache", folder / "cache", *changes)
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def test_every_command_with_json_has_its_schema(documents: Any) -> None:
    from reference import list_options

    listed = [f"compress {command}" for _, commands in documents.DOCUMENTS.values() for command in commands]
    options = {name: options for name, options in list_options().items() if name.startswith("compress ")}
    assert sorted(["compress check", *listed]) == sorted(name for name in options if "--json" in options[name])


@pytest.mark.slow
def test_documents_of_a_recipe_and_its_bundle(project: Path, refuse: Refuse, tmp_path: Path) -> None:
    cache = ("--cache", project / "cache")
    bundle = shutil.copytree(project / "a", tmp_path / "a")
    assert not refuse("report", json.loads((project / "a.json").read_text()))
    assert not refuse("recipe", ask("check", project / "recipe.yaml"))
    assert not refuse("plan", ask("plan", project / "recipe.yaml", *cache))
    assert not refuse("report", ask("validate", bundle, "--baseline", project / "b"))
    assert not refuse("page", ask("report", bundle))
    assert not refuse("inspect", ask("inspect", bundle))
    assert not refuse("verify", ask("verify", bundle))
    assert not refuse("why", ask("why", bundle))
    assert not refuse("blame", ask("blame", bundle, "--budget", 0.1, *cache))
    assert not refuse("parity", ask("parity", bundle, *cache))
    assert not refuse("compare", ask("compare", bundle, project / "b"))
    assert not refuse("reproduce", ask("reproduce", bundle, *cache))


@pytest.mark.slow
def test_the_document_of_a_push(project: Path, refuse: Refuse, tmp_path: Path) -> None:
    registry = Registry(tokens={"": 10**6})  # one that asks nobody's name
    with serve(registry.answer) as place:
        assert not refuse("push", ask("push", project / "a", f"oci://{place}/a:v1"))
    registry.pull("v1", tmp_path / "pulled")
    assert not refuse("verify", ask("verify", tmp_path / "pulled"))


@pytest.mark.slow
def test_documents_of_a_search_and_a_bench(
    project: Path, refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.recipe.load import load_recipe

    recipe = load_recipe(project / "recipe.yaml", [f"search={json.dumps(SEARCH)}"])
    study = sweep(recipe, tmp_path / "study", project / "cache", jobs=0, quiet=True)
    assert not refuse("study", json.loads(json.dumps(study.to_dict())))
    write_tensor_files(tmp_path)
    monkeypatch.setattr(benching, "BACKENDS", {"onnxruntime-cpu": BACKENDS["onnxruntime-cpu"]})
    monkeypatch.setattr(benching, "FORMATS", {"float16": "FP16"})
    table = ask("bench", tmp_path / "model.onnx", "--out", tmp_path / "bench", "--budget", "20s")
    assert table["rows"][0]["state"] == "measured" and not refuse("bench", table)


@pytest.mark.slow
def test_the_document_of_the_doctor(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["numpy>=2.0", "not-there-at-all>=1"])
    assert not refuse("doctor", ask("doctor"))


def test_the_document_of_a_failure(refuse: Refuse) -> None:
    assert not refuse("error", ask("plan", "nowhere.yaml", code=2))


@pytest.mark.parametrize(("name", "change"), [("verify", {"more": 1}), ("verify", {"files": "3"})])
def test_a_document_with_another_key_or_type_is_refused(name: str, change: dict[str, Any], refuse: Refuse) -> None:
    whole = {"verdict": "pass", "files": 3, "digest": "0" * 64}
    assert not refuse(name, whole) and refuse(name, {**whole, **change}) and refuse(name, {"verdict": "pass"})
