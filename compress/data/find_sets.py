"""Find what a path or a hub id holds: the kind of its source, its splits; and divide one set into disjoint ones."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from compress.data.table import IMAGE_FOLDERS, MASK_FOLDERS
from compress.errors import RecipeError, SourceError
from compress.specs import DATA_SOURCES, DataSpec
from compress.store.paths import resolve_path
from runtime.tasks.sources import AUDIO_SUFFIXES, IMAGE_SUFFIXES

SUFFIXES = {
    ".npz": "npz",
    ".jsonl": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".parquet": "parquet",
    ".json": "coco",
}
SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}
"""Kind of split -> its usual names, for folders, files and splits of the hub."""
EVALUATED_SHARE, MOST_EVALUATED, MOST_CALIBRATED = 0.2, 5000, 512
"""Of a set that has no splits; and samples of a calibration set that nobody gave."""
SET_EXAMPLE = "{source: FILE, columns: {text: 1}}"
EXAMPLES = {"--preprocess": "{kind: image, mean: [0.3, 0.3, 0.3]}"}
"""Flag -> how its mapping may look; those of sets are all alike."""
DataGiven = str | Mapping[str, Any]
"""A source, a path, a hub id; or a set as recipes have it."""


def read_set(given: DataGiven, root: Path, flag: str) -> dict[str, Any]:
    """Return a set as recipes have it, of a source, a path, a hub id, or `{source: ..., columns: ...}` as text.

    Of a folder whose files are splits the source is the folder, of kind "files", which `find_splits` takes apart.
    RecipeError and SourceError name the flag.
    """
    values = parse_mapping(given, flag) if isinstance(given, str) and given.lstrip().startswith("{") else given
    spec = {"source": values} if isinstance(values, str) else dict(values)
    source = spec.get("source")
    if not isinstance(source, str):
        raise RecipeError(f"{flag}: {given}: a set needs a `source`, one of {', '.join(DATA_SOURCES)}")
    try:
        spec["source"] = find_source(source, root)
    except SourceError as error:
        raise SourceError([f"{flag}: {problem}" for problem in error.problems]) from error
    if not spec["source"].startswith("files:"):
        check_set(spec, flag)
    return spec


def check_set(spec: Mapping[str, Any], flag: str) -> DataSpec:
    """Return the typed set; RecipeError, which names the flag, for a key or a value that a set does not have."""
    try:
        return DataSpec.model_validate(spec, strict=False)
    except ValidationError as error:
        found = [f"{flag}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise RecipeError(found) from error


def parse_mapping(text: str, flag: str) -> Mapping[str, Any]:
    """Return what a flag gives in YAML, such as {source: FILE, columns: {text: 1}}. RecipeError."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        values = YAML(typ="safe", pure=True).load(io.StringIO(text))
    except YAMLError as error:
        first = str(error).partition("\n")[0]
        raise RecipeError(f"{flag}: not YAML ({first}); write '{EXAMPLES.get(flag, SET_EXAMPLE)}'") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{flag} {text}: not a mapping; write '{EXAMPLES.get(flag, SET_EXAMPLE)}'")
    return values


def find_source(text: str, root: Path) -> str:
    """Return the source of a path or hub id, its kind before it; a source that has one as it is. SourceError."""
    kinds = [example.partition(":")[0] for example in DATA_SOURCES]
    if text.partition(":")[0] in kinds:
        return text
    try:
        path = resolve_path(root, text)
    except SourceError:
        if Path(text).suffix not in SUFFIXES and re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", text):
            return f"hf:{text}"
        raise
    kind = _find_folder_kind(path) if path.is_dir() else SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise SourceError(f"{text}: what it holds cannot be told; say its kind: {', '.join(DATA_SOURCES)}")
    if kind == "file":
        (file,) = _list_data_files(path)
        return f"{SUFFIXES[file.suffix.lower()]}:{Path(text) / file.name}"
    return f"{kind}:{text}"


def _find_folder_kind(folder: Path) -> str | None:
    """Return the kind of a folder's source; "files" of one with a file for each split, "file" with one file alone."""
    inside = {path.name for path in folder.iterdir() if path.is_dir()}
    if {"JPEGImages", "Annotations"} <= inside:
        return "voc"
    levels = [inside, *({p.name for p in (folder / name).iterdir() if p.is_dir()} for name in sorted(inside))]
    if any(level & set(IMAGE_FOLDERS) and level & set(MASK_FOLDERS) for level in levels):
        return "maskfolder"
    if len(_find_split_files(folder)) > 1:
        return "files"
    if len(_list_data_files(folder)) == 1:
        return "file"
    suffixes = {file.suffix.lower() for file in folder.rglob("*") if file.is_file()}
    if suffixes & set(IMAGE_SUFFIXES):
        return "imagefolder"
    return "audiofolder" if suffixes & set(AUDIO_SUFFIXES) else None


def _list_data_files(folder: Path, without: tuple[str, ...] = (".json", ".txt")) -> list[Path]:
    """List the files with samples that lie in a folder itself; texts beside them are mostly a licence or a note."""
    kept = SUFFIXES.keys() - set(without)
    return sorted(file for file in folder.iterdir() if file.is_file() and file.suffix.lower() in kept)


def _find_split_files(folder: Path) -> dict[str, Path]:
    """Find the file of each split, by names such as train.npz or sts-dev.csv; the first of several in their order."""
    found: dict[str, Path] = {}
    for file in _list_data_files(folder, (".json",)):
        if (split := _split_of(file.stem)) is not None:
            found.setdefault(split, file)
    return found


def _split_of(name: str) -> str | None:
    words = re.split(r"[^a-z]+", name.lower())
    return next((split for split, names in SPLIT_NAMES.items() if set(words) & set(names)), None)


def find_splits(spec: Mapping[str, Any], root: Path) -> dict[str, dict[str, Any]]:
    """Return the sets that a source has by itself, by kind of split (train, validation, test); {} where it has none.

    A set that names its split has no others. SourceError where a hub's data set cannot be looked at.
    """
    kind, _, rest = str(spec["source"]).partition(":")
    if spec.get("split") is not None:
        return {}
    if kind == "files":
        files = _find_split_files(resolve_path(root, rest))
        named = {split: f"{SUFFIXES[file.suffix.lower()]}:{Path(rest) / file.name}" for split, file in files.items()}
        return {split: {**spec, "source": source} for split, source in named.items()}
    names = _list_split_names(kind, rest, root)
    by_split: dict[str, dict[str, Any]] = {}
    for name in names:
        split = _split_of(name)
        if split is not None and split not in by_split:
            by_split[split] = {**spec, "split": name}
    if kind == "hf" and names and not by_split:
        return {"train": {**spec, "split": names[0]}}
    return by_split


def _list_split_names(kind: str, rest: str, root: Path) -> list[str]:
    if kind == "hf":
        from datasets import get_dataset_split_names

        dataset, _, config = rest.partition(":")
        try:
            return list(get_dataset_split_names(dataset, config or None))
        except (OSError, ValueError) as error:
            raise SourceError(f"hf:{rest}: its splits cannot be told: {error}; name one: {{source, split}}") from error
    if kind == "voc":
        return sorted(file.stem for file in (resolve_path(root, rest) / "ImageSets/Main").glob("*.txt"))
    if kind in ("imagefolder", "audiofolder", "maskfolder"):
        folder = resolve_path(root, rest)
        halves = [folder / half for half in ("", *IMAGE_FOLDERS) if (folder / half).is_dir()]
        inside = {path.name for half in halves for path in half.iterdir() if path.is_dir()}
        return sorted(name for name in inside if _split_of(name) is not None)
    return []


def divide_set(spec: Mapping[str, Any], n: int) -> dict[str, dict[str, Any]]:
    """Return evaluation and training sets of one set with `n` samples, which share none of its rows.

    They are ranges (`skip`, `samples`) of one order, drawn by the recipe's seed: a fifth to evaluate on, at most
    MOST_EVALUATED. SourceError for fewer than two samples.
    """
    if n < 2:
        raise SourceError(f"{spec['source']}: {n} sample cannot be divided; give --evaluation and --calibration")
    n_evaluated = max(1, min(int(n * EVALUATED_SHARE), MOST_EVALUATED))
    first = int(spec.get("skip", 0))
    return {
        "evaluation": {**fix_draws(spec), **({"skip": first} if first else {}), "samples": n_evaluated},
        "train": {**spec, "skip": first + n_evaluated, "samples": n - n_evaluated},
    }


def take_calibration(spec: Mapping[str, Any], n: int, most: int = MOST_CALIBRATED) -> dict[str, Any]:
    """Return a calibration set of at most so many of the `n` samples of a set."""
    return {**fix_draws(spec), "samples": min(n, most)}


def fix_draws(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the set with one draw of each sample, where a program draws them anew."""
    return {key: value for key, value in spec.items() if key != "redraw"}
