"""Tiny bundles that fuzz tests damage: made once, signed anew after each change, put back after each case."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import os
import pickle
import select
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fuzzing import COUNTS, SECONDS, assert_done_or_refused
from places import ROOT

from compress.commands.compare import compare_bundles, print_comparison
from compress.commands.inspect import inspect_bundle
from runtime import open_bundle
from runtime.bundle.format import canonical_json, read_samples
from runtime.bundle.manifest import Benchmark, Judgement, Manifest
from runtime.encode.preprocess import LanguagePreprocess, TextPreprocess
from runtime.report.validate import validate
from runtime.tasks.manifest import verify, write_bundle

KINDS = ("image", "text", "decoder")
BRIEF = Benchmark(2, 4, 1, 3)
BENCHMARKS = {"image": BRIEF, "text": BRIEF, "decoder": replace(BRIEF, prompt_tokens=4, new_tokens=2)}


def load_tiny() -> Any:
    """The makers of tests/runtime/conftest.py, which is no module that others can import."""
    found = importlib.util.spec_from_file_location("tiny", ROOT / "tests/runtime/conftest.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def make_bundle(kind: str, root: Path) -> Path:
    """A bundle of a few kilobytes that verifies, predicts and is judged in milliseconds."""
    tiny = load_tiny()
    manifest: Manifest
    if kind == "image":
        pixels = np.random.default_rng(1).integers(0, 256, (4, 4, 4, 3), np.uint8)
        for name, seed in (("model", 0), ("baseline", 1)):
            tiny.image_model(root / name / "model.onnx", seed=seed)
        columns: dict[str, Any] = {"image": pixels, "label": np.array([0, 1, 2, 3])}
        manifest = tiny.stage(root, "image-classification", tiny.IMAGE, columns)
    elif kind == "text":
        for name, seed in (("model", 0), ("baseline", 1)):
            tiny.text_model(root / name / "model.onnx", seed=seed)
        tiny.write_tokenizer(root / "model")
        manifest = tiny.stage(root, "feature-extraction", TextPreprocess(), {"text": ["the cat sat", "a dog", "far"]})
    else:
        tiny.decoder_model(root / "model/model.onnx", noise=0.3, layers=1)
        tiny.decoder_model(root / "baseline/model.onnx", layers=1)
        tiny.write_byte_tokenizer(root / "model", {"chat_template": "{{ messages[0].content }}"})
        spec = LanguagePreprocess(max_length=12, bos_token_id=256)
        manifest = tiny.stage(root, "text-generation", spec, {"text": tiny.STORIES[:3]})
        caches = {artifact.name: tiny.kv_cache(layers=1) for artifact in manifest.artifacts}
        artifacts = tuple(replace(artifact, cache=caches[artifact.name]) for artifact in manifest.artifacts)
        generation = tiny.Generation(tiny.CONTEXT, tiny.VOCAB, 256, (257,))
        manifest = replace(manifest, class_names=(), artifacts=artifacts, generation=generation)
    write_bundle(root, replace(manifest, judgement=Judgement(benchmark=BENCHMARKS[kind])))
    (root / "report.json").write_text('{"verdict": "pass", "candidate": {"metrics": {"top1": 0.5}}}')
    return root


def sign(root: Path, data: dict[str, Any]) -> None:
    """Write a manifest whose digest is that of its content."""
    data["digest"] = hashlib.sha256(canonical_json({k: v for k, v in data.items() if k != "digest"})).hexdigest()
    (root / "manifest.json").write_bytes(canonical_json(data))


def sign_files(root: Path) -> None:
    """Sign the files as they lie there, the sizes of models too, as someone would who knows how."""
    data = json.loads((root / "manifest.json").read_text())
    names = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if path.is_file()]
    data["files"] = {
        name: {
            "sha256": hashlib.sha256((root / name).read_bytes()).hexdigest(),
            "size_bytes": os.path.getsize(root / name),
        }
        for name in names
        if name not in ("manifest.json", "report.json")
    }
    for artifact in data["artifacts"]:
        if artifact["path"] in data["files"]:
            beside = (root / artifact["path"]).parent.glob("*.onnx")  # of an encoder-decoder two
            artifact["size_bytes"] = sum(file.stat().st_size for file in beside)
    sign(root, data)


@contextmanager
def damaged(pristine: Path) -> Iterator[Path]:
    """A copy of a bundle, to be changed."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "bundle"
        shutil.copytree(pristine, root)
        yield root


def assert_bundle_used_or_refused(kind: str, root: Path) -> None:
    """Assert of each thing that a user does with a bundle from someone else that it is done or refused."""
    from rich.console import Console

    quiet = Console(file=open(os.devnull, "w"))  # noqa: SIM115
    with quiet.file:
        assert_done_or_refused(kind, lambda: inspect_bundle(root, quiet))
        assert_done_or_refused(kind, lambda: verify(root))
        assert_done_or_refused(kind, lambda: predict(root))
        reports = root.parent / "report"
        assert_done_or_refused(kind, lambda: validate(root, ["onnxruntime-cpu"], report_folder=reports))
        assert_done_or_refused(kind, lambda: print_comparison(compare_bundles([reports, copy_report(reports)]), quiet))


def copy_report(reports: Path) -> Path:
    """Copy a report as that of another bundle, for none is compared with itself; where there is none, nothing."""
    other = reports.parent / "other"
    if (reports / "report.json").is_file():
        shutil.copytree(reports, other)
        text = (other / "report.json").read_text("utf-8")
        (other / "report.json").write_text(json.dumps(json.loads(text) | {"manifest_digest": "0" * 64}), "utf-8")
    return other


def predict(root: Path) -> None:
    """Run the bundle's model on its own samples, or continue a text."""
    with open_bundle(root) as bundle:
        if bundle.manifest.generates:
            bundle.generate("Once", max_new_tokens=2)
            bundle.generate("Once", max_new_tokens=2, chat=True)
            return
        columns = read_samples(root, bundle.manifest)
        bundle.predict({name: column[:2] for name, column in columns.items() if name != "label"})


def assert_ends_in_child(kind: str, call: Callable[[], None], seconds: float = 6 * SECONDS) -> None:
    """Assert that `call` ends well in a forked process: native code that crashes or hangs fails this case alone."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(readable)
        COUNTS.clear()
        try:
            call()
            said: Any = dict(COUNTS)
        except BaseException:  # noqa: BLE001  (whatever it is, the parent says so)
            said = traceback.format_exc()
        with os.fdopen(writable, "wb") as pipe:
            pickle.dump(said, pipe)
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        answered, _, _ = select.select([pipe], [], [], seconds)
        if not answered:
            os.kill(child, signal.SIGKILL)
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    assert answered, f"{kind}: no end after {seconds} s"
    assert os.WIFEXITED(status) and data, f"{kind}: ended by signal {os.WTERMSIG(status)}"
    said = pickle.loads(data)
    assert isinstance(said, dict), said
    for name, ends in said.items():
        for end, count in ends.items():
            counts = COUNTS.setdefault(name, {})
            counts[end] = counts.get(end, 0) + count


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in parsed JSON, the outer before the inner."""
    found = [path] if path else []
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inner:
        found += places(value, (*path, key))
    return found


DELETE = "\0delete"


def edited(data: dict[str, Any], edits: list[tuple[int, Any]]) -> dict[str, Any]:
    """A copy in which the n-th place (of those that there are) has another value, or is gone."""
    changed = copy.deepcopy(data)
    for number, value in edits:
        listed = places(changed)
        if not listed:
            break
        *outer, last = listed[number % len(listed)]
        place: Any = changed
        for key in outer:
            place = place[key]
        if value == DELETE:
            del place[last]
        else:
            place[last] = copy.deepcopy(value)
    return changed
