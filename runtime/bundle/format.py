"""The bundle's format: the one module that writes it and reads it.

```
manifest.json          what everything is, the sha256 and size of every other file, and a digest of itself
model/model.onnx ...   the candidate, with the config and tokenizer that it needs
baseline/model.onnx    what it is judged against
evaluation/            the frozen samples (samples.npz, samples.jsonl) and baseline_outputs.npz; candidate_outputs.npz
                       where the candidate is a checkpoint, which is not run here; slices.jsonl, by which samples are
                       told apart, and recorded.npz, what the recipe's own metrics gave. The folder may be left out
                       whole (`compress push` does): the bundle runs then, and cannot be judged
report.json .md .xml   what validation measured, report.samples.npz, report.steps.json and compress.log: in no manifest,
                       because they are written afterwards; any other name that the manifest does not list is not the
                       bundle's
module/                the torch module's tensors and sizes, where the recipe keeps them: for the build side alone
remedies.json          what the build would do against each cause of slowness, for the judge to show
host.json              where the build ran, where its files lay and what its memory let it check: in no manifest,
                       because it is of one machine
bom.cdx.json           what `compress bom` and `compress sign` tell of the bundle that stands: in no manifest,
provenance.json        but signed
model.sig              the signature over all of it but reports, log and host.json (`runtime.bundle.signature`)
```

A bundle may come from anyone. Nothing in it is executed but engines, on the backends made for them; no path in it
leaves its folder, and one wrong byte stops the load.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bundle.columns import Array, Columns, count
from runtime.bundle.engine import ENGINES
from runtime.bundle.files import (
    checkpoint_files,
    checkpoint_size,
    code_problem,
    inside,
    ir_files,
    model_files,
    model_size,
    regular_files,
    sha256_of,
    single_file,
    write_whole,
)
from runtime.bundle.manifest import (
    FORMAT_VERSION,
    Artifact,
    Benchmark,
    BuildScore,
    EvaluationSet,
    FileRecord,
    Gate,
    Generation,
    Judgement,
    KeptState,
    KvCacheSpec,
    Manifest,
    Postprocess,
    RecordedMetric,
)
from runtime.bundle.records import Mismatch, from_json, to_json
from runtime.bundle.samples import (
    digest_columns,
    read_jsonl,
    read_npz,
    read_outputs_npz,
    split_columns,
    write_jsonl,
    write_npz,
)
from runtime.errors import BundleError, UsageError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""What a bundle may be called: deployments make folders and files of the name."""

__all__ = [
    "BOM",
    "CAME_WITHOUT",
    "FORMAT_VERSION",
    "HOST",
    "MANIFEST",
    "PROVENANCE",
    "REMEDIES_FILE",
    "SIGNATURE",
    "UNSIGNED",
    "Artifact",
    "Benchmark",
    "BuildScore",
    "EvaluationSet",
    "FileRecord",
    "Gate",
    "Generation",
    "Judgement",
    "KeptState",
    "KvCacheSpec",
    "Manifest",
    "Postprocess",
    "RecordedMetric",
    "canonical_json",
    "checkpoint_files",
    "checkpoint_size",
    "find_left_out",
    "inside",
    "is_hashed",
    "is_signed",
    "load_manifest",
    "model_files",
    "model_size",
    "read_candidate_outputs",
    "read_outputs",
    "read_recorded",
    "read_remedies",
    "read_samples",
    "read_slices",
    "require_evaluation",
    "seal_bundle",
    "verify_files",
    "write_candidate_outputs",
    "write_outputs",
    "write_recorded",
    "write_samples",
]

Check = Callable[[Manifest], None]
"""Raises ValueError where a manifest's task does not fit what else it says: no task is known here."""
NO_LAYERS = ("note", "measured")
"""Types of rows of layers.json that are of no layer."""
MANIFEST, HOST = "manifest.json", "host.json"
BOM, PROVENANCE, SIGNATURE = "bom.cdx.json", "provenance.json", "model.sig"
ARRAYS, TEXTS, BASELINE_OUTPUTS = (
    "evaluation/samples.npz",
    "evaluation/samples.jsonl",
    "evaluation/baseline_outputs.npz",
)
CANDIDATE_OUTPUTS = "evaluation/candidate_outputs.npz"
SLICES, RECORDED = "evaluation/slices.jsonl", "evaluation/recorded.npz"
REMEDIES_FILE = "remedies.json"
EVALUATION = "evaluation/"
CAME_WITHOUT = "came without its evaluation data: it runs, and cannot be judged here"
FOLDERS = ("model/", "baseline/", EVALUATION, "module/")
"""What every bundle may have; others are those of its artifacts."""
REPORTS = tuple(f"report.{end}" for end in ("json", "md", "xml", "html", "earlier.html", "samples.npz", "steps.json"))
LOG = "compress.log"
WRITTEN_AFTERWARDS = re.compile(rf"(?:{'|'.join(map(re.escape, REPORTS))})(?:\.[0-9]+\.tmp)?|{re.escape(LOG)}")
"""Names of what validation writes, a draft that a kill left of it included."""
UNSIGNED = (*REPORTS, LOG, HOST, SIGNATURE)
"""What a signature leaves out: what changes on the machine that judges, and the signature itself."""
MAX_MANIFEST_BYTES, MOST_REMEDY_BYTES = 64 * 2**20, 2**14
FILES_OF = {
    "onnx": model_files,
    "checkpoint": checkpoint_files,
    "gguf": single_file,
    "engine": single_file,
    "openvino": ir_files,
    "ort": single_file,
    "pte": single_file,
}
"""Kind of artifact -> the files that its size counts."""


def canonical_json(value: Any) -> bytes:
    """Encode a value in the one way it is written: sorted keys, two spaces, ASCII, final newline.

    ValueError for NaN, infinity.
    """
    return json.dumps(to_json(value), sort_keys=True, indent=2, ensure_ascii=True, allow_nan=False).encode() + b"\n"


def seal_bundle(staging: Path, manifest: Manifest, check: Check) -> Manifest:
    """Hash every file under `staging`, write manifest.json there, and give it back with its files and digest.

    Same files and manifest, same bytes. BundleError if the folder holds what a bundle may not (links), or the result
    would not be read again.
    """
    files, problems = regular_files(staging)
    if problems:
        raise BundleError([f"{staging}: holds what a bundle may not", *problems])
    records = {
        name: FileRecord(sha256_of(path), path.stat().st_size) for name, path in files.items() if is_hashed(name)
    }
    manifest = replace(manifest, files=records, digest="")
    manifest = replace(manifest, digest=_compute_digest(to_json(manifest)))
    write_whole(staging / MANIFEST, canonical_json(manifest))
    return load_manifest(staging, check)


def load_manifest(path: Path, check: Check) -> Manifest:
    """Read the manifest of the bundle in the folder `path`, checked by itself.

    BundleError for another format version, a wrong type, a digest or bytes that are not its content's, and a path that
    leaves the folder. The other files are not looked at; `verify_files` does that.
    """
    file = path / MANIFEST
    try:
        if file.stat().st_size > MAX_MANIFEST_BYTES:
            raise BundleError(f"{file}: larger than {MAX_MANIFEST_BYTES} bytes, not a manifest")
        raw = file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise BundleError(f"{file}: {reason}; is this a bundle's folder?") from error
    try:
        data = json.loads(raw, object_pairs_hook=refuse_duplicates)
        manifest = _parse_manifest(data)
        check(manifest)
        intact = raw == canonical_json(data) and manifest.digest == _compute_digest(data)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file}: {error}") from error
    if not intact:
        raise BundleError(f"{file}: its digest is not that of its content; it was changed after it was written")
    problems = list(_path_problems(path, manifest))
    if problems:
        raise BundleError(problems)
    return manifest


def verify_files(path: Path, check: Check) -> Manifest:
    """Read the manifest; check each file's size and sha256, that none is unlisted, and that models read no other file.

    Evaluation data may be left out, whole. BundleError lists all problems, one a line.
    """
    manifest = load_manifest(path, check)
    left_out = find_left_out(path, manifest)
    files, problems = regular_files(path)
    unlisted = sorted(name for name in files.keys() - manifest.files.keys() if is_hashed(name))
    problems += [f"{name}: not in the manifest; remove it" for name in unlisted]
    problems += [code_problem(name) for name in files.keys() - manifest.files.keys() if code_problem(name)]
    for name, record in sorted(manifest.files.items()):
        if name not in left_out:
            problems += _file_problems(files.get(name), name, record)
    if not problems:
        for artifact in manifest.artifacts:
            problems += _artifact_problems(path, manifest, artifact)
    if problems:
        raise BundleError([f"{path}: not the bundle that its manifest describes", *problems])
    return manifest


def find_left_out(path: Path, manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the evaluation data of a bundle that came without it; () where any of it is there."""
    names = tuple(sorted(name for name in manifest.files if name.startswith(EVALUATION)))
    return () if any(os.path.lexists(path / name) for name in names) else names


def write_samples(folder: Path, columns: Columns, slices: Mapping[str, Sequence[str]] | None = None) -> EvaluationSet:
    """Freeze samples in the bundle's folder: numbers and images to evaluation/samples.npz, texts to samples.jsonl.

    Image files and Pillow images are decoded. `slices`, which no model reads, go to slices.jsonl. The record already
    names where `write_outputs` puts the baseline's outputs. UsageError where columns differ in length or hold neither
    numbers nor texts.
    """
    arrays, texts = split_columns(columns)
    (folder / "evaluation").mkdir(parents=True, exist_ok=True)
    if arrays:
        write_npz(folder / ARRAYS, {name: parts[0] if len(parts) == 1 else parts for name, parts in arrays.items()})
    if texts:
        write_jsonl(folder / TEXTS, texts)
    if slices:
        write_jsonl(folder / SLICES, slices)
    return EvaluationSet(
        n_samples=count(columns),
        arrays=ARRAYS if arrays else None,
        texts=TEXTS if texts else None,
        baseline_outputs=BASELINE_OUTPUTS,
        digest=digest_columns(columns),
        slices=SLICES if slices else None,
    )


def read_slices(path: Path, manifest: Manifest) -> dict[str, list[str]]:
    """Read the columns by which samples are told apart, `write_samples`'s `slices`; errors as in `read_samples`."""
    evaluation = require_evaluation(path, manifest)
    if evaluation.slices is None:
        return {}
    columns = read_jsonl(inside(path, evaluation.slices))
    _check_count(path, columns, evaluation.n_samples)
    return columns


def write_recorded(folder: Path, baseline: Sequence[Array], candidate: Sequence[Array]) -> None:
    """Write what the recipe's own metrics gave at the build, as `RecordedMetric` says, to evaluation/recorded.npz."""
    (folder / "evaluation").mkdir(parents=True, exist_ok=True)
    write_npz(folder / RECORDED, {"baseline": list(baseline), "candidate": list(candidate)})


def read_recorded(path: Path, manifest: Manifest) -> list[tuple[Array, Array]]:
    """Read (baseline, candidate) of each of `manifest.recorded`, float64; BundleError where they are not as it says."""
    if not manifest.recorded:
        return []
    file = inside(path, RECORDED)
    columns = read_npz(file)
    sides = [columns.get(name, []) for name in ("baseline", "candidate")]
    n = require_evaluation(path, manifest).n_samples
    if any(not isinstance(side, list) or len(side) != len(manifest.recorded) for side in sides):
        raise BundleError(f"{file}: does not hold both sides of {len(manifest.recorded)} metrics; build it again")
    pairs = list(zip(*sides, strict=True))
    for record, pair in zip(manifest.recorded, pairs, strict=True):
        shapes = {values.shape for values in pair} | ({(n,)} if record.per_sample else set())
        least = 1 if record.per_sample else 3  # the number, and what it is without either of two groups
        if len(shapes) > 1 or any(v.dtype != np.float64 or v.ndim != 1 or v.size < least for v in pair):
            raise BundleError(f"{file}: what it holds of {record.name} is not what its manifest says; build it again")
    return pairs


def read_samples(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Read the frozen samples of the bundle in `path`: columns as `write_samples` was given them, images as arrays.

    UsageError if the bundle has none; BundleError if they are not the n_samples that the manifest promises.
    """
    evaluation = require_evaluation(path, manifest)
    columns: dict[str, Any] = {}
    if evaluation.arrays is not None:
        columns |= read_npz(inside(path, evaluation.arrays))
    if evaluation.texts is not None:
        columns |= read_jsonl(inside(path, evaluation.texts))
    _check_count(path, columns, evaluation.n_samples)
    return columns


def write_outputs(folder: Path, outputs: Mapping[str, Array]) -> None:
    """Write the baseline's outputs over the frozen samples to evaluation/baseline_outputs.npz under `folder`."""
    (folder / "evaluation").mkdir(parents=True, exist_ok=True)
    write_npz(folder / BASELINE_OUTPUTS, outputs)


def read_outputs(path: Path, manifest: Manifest) -> dict[str, Array]:
    """Read what `write_outputs` kept; errors as in `read_samples`."""
    evaluation = require_evaluation(path, manifest)
    outputs = read_outputs_npz(inside(path, evaluation.baseline_outputs))
    _check_count(path, outputs, evaluation.n_samples)
    return outputs


def write_candidate_outputs(folder: Path, outputs: Mapping[str, Array]) -> None:
    """Write a checkpoint's outputs over the frozen samples, by which it is judged, to evaluation/candidate_outputs.npz.

    For text-generation nll, n_tokens, kl and agree, as `runtime.decode.scoring.score` describes them.
    """
    (folder / "evaluation").mkdir(parents=True, exist_ok=True)
    write_npz(folder / CANDIDATE_OUTPUTS, outputs)


def read_candidate_outputs(path: Path, manifest: Manifest) -> dict[str, Array]:
    """Read what `write_candidate_outputs` kept; BundleError if the bundle has none, or not one row for each sample."""
    evaluation = require_evaluation(path, manifest)
    if CANDIDATE_OUTPUTS not in manifest.files:
        raise BundleError(f"{path}: the candidate is a checkpoint, and {CANDIDATE_OUTPUTS} is missing; build it again")
    outputs = read_outputs_npz(inside(path, CANDIDATE_OUTPUTS))
    _check_count(path, outputs, evaluation.n_samples)
    return outputs


def require_evaluation(path: Path, manifest: Manifest) -> EvaluationSet:
    """Return the record of the frozen samples; UsageError where the bundle has none, or came without them."""
    if manifest.evaluation is None:
        raise UsageError(f"{path}: this bundle has no evaluation set; give data.evaluation in its recipe")
    if find_left_out(path, manifest):
        raise UsageError(
            f"{path}: {CAME_WITHOUT}, nor timed on its own samples; ask who published it for the folder "
            f"evaluation/ ({manifest.evaluation.n_samples} samples, whose digests the manifest has), and put it there"
        )
    return manifest.evaluation


def _check_count(path: Path, columns: Columns, expected: int) -> None:
    try:
        n = count(columns)
    except UsageError as error:
        raise BundleError(f"{path}: evaluation set: {error}") from error
    if n != expected:
        raise BundleError(f"{path}: the evaluation set has {n} samples, its manifest says {expected}")


def _parse_manifest(data: Any) -> Manifest:
    """Parse a manifest; ValueError for one of another format version, of wrong types, or that contradicts itself."""
    if not isinstance(data, dict):
        raise Mismatch("not a JSON object")
    if data.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"format_version is {data.get('format_version')!r}; this version of runtime reads {FORMAT_VERSION}"
        )
    manifest = from_json(Manifest, data, "manifest")
    if not NAME.fullmatch(manifest.name):
        raise ValueError(f"manifest.name: {manifest.name!r} is more than letters, digits, dot, dash and underscore")
    names = [artifact.name for artifact in manifest.artifacts]
    if len(set(names)) != len(names) or "candidate" not in names:
        raise ValueError(
            f"manifest.artifacts: {', '.join(names) or 'none'}; names must differ and one must be 'candidate'"
        )
    for order in manifest.orders:
        if order.runtime not in ENGINES or order.graph not in names:
            raise ValueError(f"manifest.orders: {order.name}: there is no runtime {order.runtime} or no {order.graph}")
    return manifest


def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of such pairs, for `json.loads`. ValueError where a key is there twice."""
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1}) if len(set(keys)) != len(keys) else []
    if twice:
        raise ValueError(f"'{twice[0]}' is there twice")
    return dict(pairs)


def _compute_digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json({key: value for key, value in data.items() if key != "digest"})).hexdigest()


def _path_problems(root: Path, manifest: Manifest) -> Iterator[str]:
    """Yield a problem for each path that leaves the folder, differs only in case, or that `files` does not list."""
    evaluation = manifest.evaluation
    used = [artifact.path for artifact in manifest.artifacts]
    for record in (artifact.engine for artifact in manifest.artifacts if artifact.engine is not None):
        used += [name for name in (record.weights_from, record.layers) if name]
    if evaluation is not None:
        frozen = (evaluation.arrays, evaluation.texts, evaluation.baseline_outputs, evaluation.slices)
        used += [path for path in frozen if path]
    used += [RECORDED] if manifest.recorded else []
    for name in dict.fromkeys([*manifest.files, *used]):
        try:
            inside(root, name)
        except BundleError as error:
            yield str(error)
    yield from (
        f"{name}: named in the manifest, but not among its files" for name in used if name not in manifest.files
    )
    yield from (f"{name}: may not be among the manifest's files" for name in manifest.files if not is_hashed(name))
    yield from _use_problems(manifest, manifest.files, used)
    folded: dict[str, str] = {}
    for name in manifest.files:
        if folded.setdefault(name.casefold(), name) != name:
            yield f"{name}: the same file as {folded[name.casefold()]} where case is not told apart"


def _use_problems(manifest: Manifest, names: Collection[str], used: Sequence[str]) -> Iterator[str]:
    """Yield a problem for each file that something could run, or whose folder holds nothing of the bundle's.

    Such a folder may be a package's: whoever stands in the bundle's folder and starts Python would run it. A
    checkpoint's own code is told by its manifest, and lies where nothing but transformers looks for it; a .bin is
    weights where it lies with an .xml of its name in the folder of an IR.
    """
    homes = {name.partition("/")[0] for name in (*used, *FOLDERS)}
    own_code = {a.path.rpartition("/")[0] for a in manifest.artifacts if a.remote_code and "/" in a.path}
    irs = {a.path.rpartition("/")[0] for a in manifest.artifacts if a.kind == "openvino" and "/" in a.path}
    for name in names:
        top, _, rest = name.partition("/")
        folder, _, file = name.rpartition("/")
        if folder in irs and file.endswith(".bin") and name.removesuffix(".bin") + ".xml" in names:
            continue
        if rest and top not in homes:
            yield f"{name}: no model of the manifest lies in the folder {top}; a bundle has no use for it"
        elif not (folder in own_code and file.endswith(".py")) and (problem := code_problem(name)):
            yield problem


def is_hashed(name: str) -> bool:
    """Return False for the manifest itself, what is written once it stands, and what is of one machine alone."""
    return name not in (MANIFEST, HOST, BOM, PROVENANCE, SIGNATURE) and WRITTEN_AFTERWARDS.fullmatch(name) is None


def is_signed(name: str) -> bool:
    """Return whether a signature covers the file of that name: all that is hashed, the manifest, what is told of it."""
    return name in (MANIFEST, BOM, PROVENANCE) or is_hashed(name)


def _file_problems(file: Path | None, name: str, record: FileRecord) -> list[str]:
    if file is None:
        return [f"{name}: missing"]
    try:
        size = file.stat().st_size
        if size != record.size_bytes:
            return [f"{name}: {size} bytes, the manifest says {record.size_bytes}"]
        if sha256_of(file) != record.sha256:
            return [f"{name}: its sha256 is not the manifest's"]
    except OSError as error:
        return [f"{name}: cannot be read: {error.strerror}"]
    return []


def _artifact_problems(root: Path, manifest: Manifest, artifact: Artifact) -> list[str]:
    try:
        files = FILES_OF[artifact.kind](inside(root, artifact.path))
    except BundleError as error:
        return [f"{artifact.path}: {problem}" for problem in error.problems]
    unlisted = [file.name for file in files if file.relative_to(root).as_posix() not in manifest.files]
    if unlisted:
        return [f"{artifact.path}: reads {', '.join(unlisted)}, which is not among the manifest's files"]
    size = sum(file.stat().st_size for file in files)
    if size != artifact.size_bytes:
        whats = {"checkpoint": "in its tensors", "openvino": "with its weights", "onnx": "with external data"}
        what = whats.get(artifact.kind, "in the file")
        return [f"{artifact.path}: {size} bytes {what}, the manifest says {artifact.size_bytes}"]
    return []


def read_layers(root: Path, manifest: Manifest) -> tuple[dict[str, Any], ...]:
    """Read what the build wrote about each layer, layers.json; nothing where the bundle has none.

    Raises BundleError where it is not a list of objects.
    """
    if "layers.json" not in manifest.files:
        return ()
    try:
        layers = json.loads((root / "layers.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{root / 'layers.json'}: not JSON: {error}") from error
    if not isinstance(layers, list) or not all(isinstance(row, dict) for row in layers):
        raise BundleError(f"{root / 'layers.json'}: must be a list of objects, one for each layer or note")
    return tuple(layers)


def read_remedies(root: Path, manifest: Manifest) -> dict[str, str]:
    """Read what would end each cause of slowness, pieces of recipes, remedies.json; nothing where the bundle has none.

    Raises BundleError where it is not a small object of printable texts.
    """
    if REMEDIES_FILE not in manifest.files:
        return {}
    try:
        if manifest.files[REMEDIES_FILE].size_bytes > MOST_REMEDY_BYTES:
            raise ValueError(f"larger than {MOST_REMEDY_BYTES} bytes")
        remedies = json.loads((root / REMEDIES_FILE).read_text(encoding="utf-8"), object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{root / REMEDIES_FILE}: {error}") from error
    if not isinstance(remedies, dict) or not all(map(_is_plain_text, remedies.values())):
        raise BundleError(
            f"{root / REMEDIES_FILE}: must be an object of printable texts, a piece of a recipe by its name"
        )
    return remedies


def _is_plain_text(value: object) -> bool:
    """Return whether a value is a text without what steers a terminal."""
    return isinstance(value, str) and all(line.isprintable() for line in value.split("\n"))
