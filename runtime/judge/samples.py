"""Keep what a report's quality was computed from, a row for each sample, so that another report can be paired with it.

`report.samples.npz` lies beside report.json, which names its arrays and their sha256. Like the reports it is in no
manifest: it is of one judgement. Numbers are stored in the smallest type that holds them exactly.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.files import put_in_place, sha256_of
from runtime.bundle.manifest import Manifest, RecordedMetric
from runtime.bundle.npz import NpzError, read_arrays
from runtime.bundle.samples import write_npz
from runtime.errors import RuntimeFailure, UsageError
from runtime.metrics.base import Columns

SAMPLES_FILE = "report.samples.npz"
MOST_BYTES = 64 * 2**20
"""Of all arrays together: detections of 5,000 images, each with 300 boxes, take 30 MiB."""
_SMALLER = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32")


@dataclass(frozen=True)
class EvaluatedOn:
    """What quality was measured on, and against: reports are compared where these are the same."""

    samples: str
    """`EvaluationSet.digest`: sha256 of the frozen samples, their labels among them."""
    baselines: tuple[str, ...] = ()
    """sha256 of the baseline's outputs, and of its model; two baselines that share one are the same."""
    own_metrics: tuple[RecordedMetric, ...] = ()


def describe_evaluation(manifest: Manifest) -> EvaluatedOn | None:
    """Return what a bundle's quality is measured on, and against; None of one without an evaluation set."""
    if manifest.evaluation is None:
        return None
    outputs = manifest.files.get(manifest.evaluation.baseline_outputs)
    digests = [] if outputs is None else [outputs.sha256]
    for artifact in manifest.artifacts:
        if artifact.name == "baseline":
            folder = artifact.path.rpartition("/")[0]
            files = sorted((name, record.sha256) for name, record in manifest.files.items() if name.startswith(folder))
            digests.append(hashlib.sha256(json.dumps(files).encode()).hexdigest())
    return EvaluatedOn(manifest.evaluation.digest, tuple(digests), manifest.recorded)


@dataclass(frozen=True)
class KeptColumn:
    """One column of a metric: which array of the file it is, and the type that the metric computes with."""

    array: str
    dtype: str


@dataclass(frozen=True)
class KeptSamples:
    """What `report.samples.npz` holds: the candidate's columns of each quality metric, a row for each sample."""

    sha256: str
    columns: dict[str, tuple[KeptColumn, ...]]
    left_out: tuple[str, ...] = ()
    """Metrics whose columns would have made the file too large."""


def keep_samples(columns: Mapping[str, Columns], folder: Path, most_bytes: int = MOST_BYTES) -> KeptSamples:
    """Write the columns of each metric into `folder`, whole or not at all, and return what the report says of them.

    Metrics come in order until `most_bytes` are reached; those that do not fit are named in `left_out`.
    """
    arrays: dict[bytes, Array] = {}  # by content: metrics share labels, predictions and tokens
    kept: dict[str, tuple[KeptColumn, ...]] = {}
    left_out = []
    for metric, of_metric in columns.items():
        stored = [_store_exactly(column) for column in of_metric]
        together = {**arrays, **{_hash_array(array): array for array in stored}}
        if sum(array.nbytes for array in together.values()) > most_bytes:
            left_out.append(metric)
            continue
        arrays = together
        places = [list(arrays).index(_hash_array(array)) for array in stored]
        kept[metric] = tuple(
            KeptColumn(_name_array(place), column.dtype.name) for place, column in zip(places, of_metric, strict=True)
        )
    draft = folder / f"{SAMPLES_FILE}.{os.getpid()}.tmp"
    try:
        write_npz(draft, {_name_array(place): array for place, array in enumerate(arrays.values())})
        digest = sha256_of(draft)
        put_in_place(draft, folder / SAMPLES_FILE)
    except OSError as error:
        raise RuntimeFailure(f"cannot write {folder / SAMPLES_FILE}: {error}") from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    return KeptSamples(digest, kept, tuple(left_out))


def read_kept_samples(file: Path, kept: KeptSamples) -> dict[str, Columns]:
    """Read the columns of each metric back. Raises UsageError where the file is not the one that the report names."""
    try:
        if sha256_of(file) != kept.sha256:
            raise UsageError(f"{file}: is not the one that report.json beside it was written with")
        arrays = read_arrays(file)
        return {
            metric: tuple(arrays[column.array].astype(_numeric(column.dtype)) for column in columns)
            for metric, columns in kept.columns.items()
        }
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    except (NpzError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read as the columns of report.json beside it: {error}") from error


def _numeric(name: str) -> np.dtype:
    dtype = np.dtype(name)
    if dtype.kind not in "biuf":
        raise ValueError(f"'{name}' is no type of numbers")
    return dtype


def _store_exactly(column: Array) -> Array:
    """Return the column in the smallest type in which every number is what it was."""
    if column.dtype.kind not in "iuf":
        return column
    for name in _SMALLER:
        smaller = np.dtype(name)
        if smaller.itemsize >= column.dtype.itemsize:
            continue
        with np.errstate(all="ignore"):
            stored = column.astype(smaller)
        if np.array_equal(stored.astype(column.dtype), column):
            return stored
    return column


def _hash_array(array: Array) -> bytes:
    return hashlib.sha256(repr((array.dtype.str, array.shape)).encode() + array.tobytes()).digest()


def _name_array(place: int) -> str:
    return f"column{place:03d}"
