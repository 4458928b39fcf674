"""How `compress-run` ends: whatever goes wrong is a message and an exit code, never a traceback."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import faults
import numpy as np
import pytest
from faults import Faults

from runtime.__main__ import MOST_INPUT, main
from runtime.errors import UsageError
from runtime.processes import endings
from runtime.report.validate import validate
from runtime.tasks.manifest import read_manifest, write_bundle

CODE = "import sys; from runtime.__main__ import main; sys.exit(main())"
WITHOUT = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""
"""Python that makes one package look as if it were not installed."""


def end(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit code, what stands on stderr) of one call, which shows no traceback."""
    exit_code, said = main(arguments), capsys.readouterr().err
    assert "Traceback" not in said and "a defect" not in said
    return exit_code, said


def failing(error: Exception) -> Callable[..., object]:
    def fail(*_: object, **__: object) -> object:
        raise error

    return fail


@pytest.fixture
def array(image_bundle: Path) -> str:
    """A file to predict on, outside of the bundle."""
    path = image_bundle.parent / "in.npz"
    np.savez(path, image=np.zeros((2, 4, 4, 3), np.uint8))
    return str(path)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyError("x"), 1, "KeyError: 'x' (a defect, or a library that failed; COMPRESS_DEBUG=1 shows where)"),
        (OSError(28, "No space left", "/d/x"), 1, "/d/x: No space left"),
        (MemoryError("of 9 GB"), 1, "out of memory: of 9 GB"),
        (
            ModuleNotFoundError("No module named 'numpy'", name="numpy"),
            1,
            "No module named 'numpy'; pip install compress-",
        ),
        (KeyboardInterrupt(), 130, "stopped"),
        (BrokenPipeError(errno.EPIPE, "gone"), 141, ""),
    ],
)
def test_whatever_ends_a_command_is_a_message(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(endings.DEBUG, raising=False)
    assert endings.end_command(failing(error), as_json=False) == code  # type: ignore[arg-type]
    shown = capsys.readouterr()
    assert shown.err.startswith(said) and "Traceback" not in shown.err and not shown.out
    if code != 141:
        endings.end_command(failing(error), as_json=True)  # type: ignore[arg-type]
        assert json.loads(capsys.readouterr().out)["exit_code"] == code
    monkeypatch.setenv(endings.DEBUG, "1")
    endings.end_command(failing(error), as_json=False)  # type: ignore[arg-type]
    assert ("Traceback" in capsys.readouterr().err) is (code == 1)


def test_a_model_that_cannot_be_read_is_named(
    image_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with faults.failing(Faults((image_bundle / "model",), number=errno.EACCES, at=1)):
        code, said = end(["verify", str(image_bundle)], capsys)
    assert code == 1 and "model/model.onnx: cannot be read: Permission denied" in said
    monkeypatch.setattr("mmap.mmap", failing(PermissionError(13, "Permission denied")))
    code, said = end(["predict", str(image_bundle), "x.png"], capsys)
    assert code == 1 and "model.onnx: the model file cannot be read: Permission denied" in said


@pytest.mark.slow
def test_a_bundle_that_cannot_be_written_is_judged_elsewhere(
    image_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in image_bundle.rglob("*"))
    with faults.failing(Faults((image_bundle,), at=None, number=errno.EROFS, lasting=True)):
        code, said = end(["validate", str(image_bundle)], capsys)
        assert code == 2 and f"{image_bundle}: the report cannot be written there: Read-only" in said
        with pytest.raises(UsageError, match=r"cannot be written there: Read-only.* --report"):
            validate(image_bundle, progress=failing(AssertionError("nothing runs before this is known")))
    out = tmp_path / "new/reports"
    call = ["validate", str(image_bundle), "--backend", "onnxruntime-cpu", "--report", str(out)]
    assert end(call, capsys)[0] == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "report.json",
        "report.md",
        "report.samples.npz",
        "report.xml",
    ]
    assert sorted(path.name for path in image_bundle.rglob("*")) == before


@pytest.mark.parametrize(
    ("output", "said"), [("missing/out.npz", "there is no folder"), (".", "is a folder; give the name of a file")]
)
def test_an_output_that_cannot_be_written_is_told_before_anything_runs(
    output: str, said: str, image_bundle: Path, array: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (image_bundle / "model/model.onnx").write_bytes(b"not read before the output is looked at")
    place = str(image_bundle.parent / output)
    assert end(["predict", str(image_bundle), array, "--output", place], capsys)[0] == 2
    assert said in end(["predict", str(image_bundle), array, "--output", place], capsys)[1]


def test_an_output_keeps_its_name_and_a_full_disk_is_told(
    image_bundle: Path, array: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = image_bundle.parent / "outputs"
    assert end(["predict", str(image_bundle), array, "--output", str(place)], capsys)[0] == 0
    assert np.load(place)["logits"].shape == (2, 5)
    code, said = end(["predict", str(image_bundle), array, "--output", "/dev/full"], capsys)
    assert code == 1 and "/dev/full: cannot be written: No space left" in said


@pytest.mark.parametrize("threads", ["1000000000", "9" * 5000, "1025", "-1", "two"])
def test_threads_have_a_range(threads: str, image_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = end(["bench", str(image_bundle), "--threads", threads], capsys)
    assert code == 2 and "is not a number of threads, 1 to 1024" in said


def test_bytes_that_are_no_text_are_refused(
    make_text_bundle: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(make_text_bundle("feature-extraction", {"text": ["the cat"]}))
    assert "a text is not Unicode" in end(["predict", root, "caf\udce9"], capsys)[1]
    for stdin, told in (
        (io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8", "strict"), "stdin is not utf-8"),
        (io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8", "surrogateescape"), "a text is not Unicode"),  # locale C
        (None, "stdin is closed"),
        (io.StringIO("x" * (MOST_INPUT + 1)), f"stdin has more than {MOST_INPUT} characters"),
    ):
        monkeypatch.setattr(sys, "stdin", stdin)
        code, said = end(["predict", root, "-"], capsys)
        assert code == 2 and told in said


def test_names_that_the_terminal_has_no_letters_for_are_escaped(image_bundle: Path, array: str) -> None:
    manifest = read_manifest(image_bundle)
    names = ("é\ud800", *manifest.class_names[1:])
    write_bundle(image_bundle, type(manifest)(**{**vars(manifest), "class_names": names * 1}))
    for more in ([], ["--json"]):
        command = [sys.executable, "-X", "utf8=0", "-c", CODE, "predict", str(image_bundle), array, *more]
        done = subprocess.run(command, capture_output=True, env={"PYTHONIOENCODING": "ascii"}, check=False)
        assert done.returncode == 0, done.stderr.decode()
        assert not more or len(json.loads(done.stdout)) == 2


def test_a_reader_that_goes_away_is_not_a_failure_to_report(image_bundle: Path, array: str) -> None:
    command = [sys.executable, "-c", CODE, "predict", str(image_bundle), array]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read().decode()
    assert (process.returncode, said) == (141, "")


@pytest.mark.parametrize(
    ("package", "words", "said"),
    [
        ("numpy", ["verify"], "running a bundle needs the package 'numpy', which is not installed: pip install numpy"),
        (
            "onnxruntime",
            ["bench", "--backend", "onnxruntime-cpu"],
            "backend 'onnxruntime-cpu' does not work here: the backend onnxruntime-cpu needs the package "
            "'onnxruntime', which is not installed: pip install onnxruntime",
        ),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_package_that_is_not_installed_is_named_with_the_way_to_get_it(
    package: str, words: list[str], said: str, as_json: bool, image_bundle: Path
) -> None:
    words = [*words, str(image_bundle), *(["--json"] if as_json else [])]
    call = [sys.executable, "-c", WITHOUT.format(package=package) + CODE, *words]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"{said}\n")
    assert done.stdout == "" if not as_json else json.loads(done.stdout)["problems"] == [said]


def test_a_bundle_s_files_are_checked_without_onnxruntime(image_bundle: Path) -> None:
    call = [sys.executable, "-c", WITHOUT.format(package="onnxruntime") + CODE, "verify", str(image_bundle)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
