"""What is built and installed: the same bytes twice, and a wheel that needs no clone."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from zipfile import ZipFile

import pytest
from child_processes import run_python
from places import ROOT
from shortcuts import QUICK_COMMAND

build = pytest.importorskip("hatchling.build", reason="hatchling is not installed: pip install hatchling")
LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)\s]*)?\)")


def build_in(folder: Path, make: Callable[[str], str], out: Path) -> Path:
    """Build a distribution of the sources in `folder`; return its file."""
    out.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return out / make(str(out))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution."""
    return build_in(ROOT, build.build_sdist, tmp_path_factory.mktemp("sources") / "dist")


@pytest.fixture(scope="module")
def unpacked(sources: Path) -> Path:
    """What lies in it, with other times and without the metadata that a build adds."""
    with tarfile.open(sources) as archive:
        archive.extractall(sources.parents[1], filter="data")
    folder = sources.parents[1] / sources.name.removesuffix(".tar.gz")
    (folder / "PKG-INFO").unlink()
    for file in folder.rglob("*"):
        os.utime(file)
    return folder


@pytest.fixture(scope="module")
def installed(unpacked: Path) -> Path:
    """The wheel that is built of it, laid out as an installer would."""
    wheel = build_in(unpacked, build.build_wheel, unpacked.parent / "wheel")
    with ZipFile(wheel) as archive:
        archive.extractall(unpacked.parent / "site-packages")
    return unpacked.parent / "site-packages"


def test_sources_that_are_built_of_themselves_have_the_same_bytes(sources: Path, unpacked: Path) -> None:
    assert build_in(unpacked, build.build_sdist, unpacked.parent / "again").read_bytes() == sources.read_bytes()


def test_a_wheel_says_which_pythons_it_is_for(installed: Path) -> None:
    (metadata,) = installed.glob("compress_models-*.dist-info/METADATA")
    assert re.search(r"^Requires-Python: <3\.15,>=3\.11$", metadata.read_text(), re.MULTILINE)


def test_every_page_in_a_wheel_links_to_what_is_there(installed: Path) -> None:
    share = installed / "compress/share"
    pages = [*share.glob("docs/**/*.md"), share / "recipes/README.md", share / "README.md"]
    assert len(pages) > 40
    made = {"passes"}  # pages of the site alone
    for page in pages:
        for link in LINK.findall(page.read_text()):
            assert (page.parent / link).exists() or made & set(Path(link).parts), f"{page}: {link}"


@pytest.mark.slow
def test_an_installed_wheel_runs_the_demo_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    def run(*words: str) -> CompletedProcess[str]:
        given = os.environ | {"PYTHONPATH": str(installed), "COMPRESS_CACHE": str(tmp_path / "cache")}
        return run_python("-c", QUICK_COMMAND, *words, cwd=folder, environment=given)

    (folder := tmp_path / "empty").mkdir()
    done = run("demo")
    assert done.returncode in (0, 3), done.stderr  # 3: its speed is undecided, for it is hardly timed here
    assert "bundle: bundles/quickstart-digits" in done.stdout
    assert (folder / "bundles/quickstart-digits/model/model.onnx").is_file()
    copied = run("new", "--example", "goal").stdout
    assert f"explained in {installed / 'compress/share/docs/howto/goal.md'}" in copied
    assert run("check", "recipe.yaml").returncode == 0
