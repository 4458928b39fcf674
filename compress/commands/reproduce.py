"""`compress reproduce`: build a bundle again from the recipe that lies in it, and say which files differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from compress.commands.inspect import read_host, read_json
from compress.errors import PlanError, SourceError
from compress.execution.run import apply_recipe
from compress.models.source import locate, model_digest
from compress.recipe.exports import OrtExport
from compress.recipe.load import load_recipe
from compress.recipe.repeat import repeat_training
from compress.recipe.schema import Recipe
from compress.store.cache import code_version, library_versions
from compress.store.digests import FileDigests
from compress.store.durable import temporary_folder
from compress.timing.kept import Kept
from runtime.bundle.format import Manifest
from runtime.tasks.manifest import read_manifest, verify


@dataclass(frozen=True)
class Reproduction:
    """What building again came to: names of the files that differ (or are in one bundle alone), and why they may."""

    n_files: int
    different: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def same(self) -> bool:
        return not self.different


def reproduce(
    bundle: Path, overrides: Sequence[str] = (), out: Path | None = None, cache: Path | None = None, quiet: bool = False
) -> Reproduction:
    """Build the bundle again and compare every hashed file.

    Folders that the recipe names are those of the build where they are still there, unless `overrides` say others
    (`vars.bench=DIR`). `out`: where the new bundle is kept; `cache`: where its results are; None: nothing is kept, and
    all work is done again. Training that a clock ended makes as many optimizer steps as it made then, and layers that
    were left in float because they were faster so are left there again, whatever they take on this machine.
    Raises BundleError for a bundle that is not whole, PlanError where the model is another one than the bundle's.
    """
    bundle = Path(bundle).resolve()
    manifest = verify(bundle)
    lock = read_json(bundle / "lock.json")
    recipe = repeat_training(recall_recipe(bundle, overrides), lock.get("training", {}))
    with temporary_folder() as folder:
        again, results = out or folder / bundle.name, cache or folder / "cache"
        check_model(recipe, lock, FileDigests(results))
        repeat_choices(lock.get("choices", {}), results)
        apply_recipe(recipe, again, results, quiet)
        made = read_manifest(again)
        reasons = (*_find_reasons(lock, read_json(again / "lock.json")), *_explain_chance(recipe))
    different = compare_files(manifest, made)
    return Reproduction(len(manifest.files), different, reasons if different else ())


def recall_recipe(bundle: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return a bundle's recipe where it was built, as far as its folders are still there."""
    host = read_host(bundle)
    recipe = load_recipe(bundle / "recipe.yaml", [*_recall_folders(host, overrides), *overrides])
    return recipe.at_root(Path(host.get("recipe_folder", bundle)))


def _explain_chance(recipe: Recipe) -> Iterator[str]:
    """Yield what may come out otherwise although all is the same."""
    if recipe.data.train is not None and (name := recipe.data.train.redraw):
        yield (
            f"data.train.redraw: {name} draws samples anew: they are the same again where it draws by the generators "
            "of torch, numpy or random, and others where it has its own"
        )
    if any(isinstance(export, OrtExport) for export in recipe.export):
        yield "ort/model.ort: ONNX Runtime writes some tables of its format in an order of chance"


def repeat_choices(choices: Mapping[str, Mapping[str, Any]], cache: Path) -> None:
    """Let passes choose what measurements of time made them choose; `choices`: index of the pass -> its record."""
    for record in choices.values():
        choice = {name: value for name, value in record.items() if name not in ("key", "before")}
        Kept(cache).give(str(record["key"]), {"choice": choice})
        if before := record.get("before"):
            repeat_choices({"before": before}, cache)


def compare_files(first: Manifest, second: Manifest) -> tuple[str, ...]:
    """Return the names of files that differ in their sha256, or that one of the bundles lacks."""
    names = sorted(first.files.keys() | second.files.keys())
    return tuple(name for name in names if first.files.get(name) != second.files.get(name))


def render_reproduction(result: Reproduction) -> str:
    """Return a sentence, the files that differ, and what explains them."""
    if result.same:
        return f"reproduced: all {result.n_files} files have the same bytes"
    lines = [f"not reproduced: {len(result.different)} of {result.n_files} files differ"]
    lines += [f"  differs   {name}" for name in result.different]
    lines += [f"  because   {reason}" for reason in result.reasons or ("no version, seed or digest differs",)]
    return "\n".join(lines)


def _recall_folders(host: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[str]:
    """Yield a `--set` value for each folder of the build that is still there, but for those that `overrides` give."""
    given = {text.partition("=")[0].strip() for text in overrides}
    for name, folder in host.get("folders", {}).items():
        if f"vars.{name}" not in given and Path(folder).is_absolute() and Path(folder).is_dir():
            yield f"vars.{name}={json.dumps(folder)}"


def check_model(recipe: Recipe, lock: Mapping[str, Any], digests: FileDigests) -> None:
    """Raise PlanError unless the recipe's model is the one that the bundle was made from; nothing of it is run.

    Its files are read, whatever is remembered of them, and what was read is remembered in `digests`.
    """
    wanted = lock["model"]["digest"]
    try:
        digest = model_digest(locate(recipe.model, recipe.root), partial(digests.read, anew=True))
    except SourceError as error:
        hint = "name its folder with --set vars.NAME=DIR, or start in the recipe's folder"
        raise PlanError([*error.problems, f"model: {recipe.model.source} was not found; {hint}"]) from error
    if digest != wanted:
        raise PlanError(
            f"model: {recipe.model.source} has digest {digest[:12]}, the bundle was made from {wanted[:12]}; "
            "give that model's files"
        )


def _find_reasons(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each thing that decided the two builds and is not the same."""
    if then["compress"]["code"] != code_version():
        yield "compress: its code is another one"
    for name, version in {"python": now["versions"]["python"], **library_versions()}.items():
        if then["versions"].get(name) != version:
            yield f"{name}: {then['versions'].get(name)} then, {version} now"
    for name, record in now["plugins"].items():
        if then.get("plugins", {}).get(name) != record:
            yield f"{name}: {record['distribution']} {record['version']} now, another one or other code then"
    for name, digest in now["metrics"].items():
        if then.get("metrics", {}).get(name) != digest:
            yield f"{name}: its file is another one"
    for name, record in now["data"].items():
        if then["data"].get(name, {}).get("digest") != record["digest"]:
            yield f"data.{name}: other samples"
    if then.get("training"):
        yield "training was ended by a clock then, which also set the learning rate of each step"
