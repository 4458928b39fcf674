"""No Python of a bundle's folder runs, whatever starts our commands there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.processes.isolated import run
from runtime.processes.search_path import HOME, keep_trusted

SHADOWS = ("__future__", "argparse", "dataclasses", "json", "numpy", "onnxruntime", "typing", "typer")
"""Modules that our programs import, each after Python's own start."""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder of modules that say when they run, one of them called `runtime`."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"print('{name} of the bundle ran')\nraise SystemExit(99)\n")
    (tmp_path / "manifest.json").write_text("{}")
    return tmp_path


def call(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder` with this checkout's packages."""
    more = {"PYTHONPATH": HOME, **environment}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, **more})


SCRIPT = "import sys; sys.argv[0] = '/bin/compress-run'; from runtime.__main__ import main; sys.exit(main())"
"""What the console script does."""


@pytest.mark.parametrize(
    "program",
    [("-m", "runtime"), ("-mruntime",), ("-P", "-c", SCRIPT), ("-m", "runtime.lm_eval_adapter"), ("-m", "compress")],
)
def test_no_module_of_the_working_directory_runs(hostile: Path, program: tuple[str, ...]) -> None:
    done = call(hostile, sys.executable, *program, "--help")
    assert (done.returncode, "ran" in done.stdout) == (0, False), done.stdout + done.stderr


def test_an_empty_entry_of_pythonpath_does_not_bring_it_back(hostile: Path) -> None:
    for name in ("__future__", "typing"):  # an editable install's own finder imports them while Python starts
        (hostile / f"{name}.py").unlink()
    done = call(hostile, sys.executable, "-P", "-c", SCRIPT, "verify", ".", PYTHONPATH=f"{HOME}{os.pathsep}")
    assert done.returncode == 1 and "manifest.json" in done.stderr, done.stdout + done.stderr


def test_a_runtime_in_the_bundle_is_not_what_compress_imports(hostile: Path) -> None:
    (hostile / "runtime").mkdir()
    (hostile / "runtime/__init__.py").write_text("raise SystemExit(99)\n")
    assert call(hostile, sys.executable, "-m", "compress", "--version").returncode == 0


def test_no_child_looks_into_the_working_directory(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hostile)
    monkeypatch.syspath_prepend(str(hostile))
    monkeypatch.setenv("PYTHONPATH", f":{hostile}:.")
    nested = "import subprocess; print(subprocess.run([sys.executable, '-c', 'import typer'], capture_output=True))"
    why, printed = run(f"import json, numpy, runtime; {nested}")
    assert (why, "of the bundle ran" in printed) == ("", False), printed


def test_as_a_library_nothing_is_changed(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/__init__.py").write_text("import runtime, compress\n")
    (tmp_path / "own/__main__.py").write_text("import os, sys\nprint(sys.path[0], os.environ.get('PYTHONSAFEPATH'))\n")
    done = call(tmp_path, sys.executable, "-m", "own")
    assert done.stdout.split() == [str(tmp_path), "None"], done.stderr


def test_a_checkout_and_a_folder_named_in_full_stay_as_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HOME)
    assert keep_trusted([HOME, "/lib"]) == ["/lib", HOME] and keep_trusted(["", "/lib"]) == ["/lib", HOME]
    monkeypatch.chdir(tmp_path)
    assert keep_trusted([str(tmp_path), "/lib"]) == ["/lib"]
    assert keep_trusted([str(tmp_path), "/lib"], f":{tmp_path}") == ["/lib", str(tmp_path)]
    (tmp_path / "manifest.json").write_text("{}")
    assert keep_trusted([str(tmp_path), "/lib"], f":{tmp_path}") == ["/lib"]
