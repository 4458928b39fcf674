"""`compress bom`: a bundle's bill of materials, as scanners and registers read it: CycloneDX 1.6, JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_URL, uuid5

from compress.commands.inspect import read_host
from compress.commands.sign import package_url, read_lock, read_recipe
from compress.store.durable import blame
from runtime.bundle.files import sha256_of, write_whole
from runtime.bundle.format import BOM, MANIFEST, Manifest
from runtime.bundle.tensors import TensorSpec
from runtime.errors import MissingDependency
from runtime.report.report import Report
from runtime.report.stored import read_stored_report
from runtime.tasks.manifest import verify

if TYPE_CHECKING:
    from cyclonedx.model.component import Component

BUNDLE = "bundle"
"""The reference by which other parts of the document name the bundle."""


def write_bom(bundle: Path) -> Path:
    """Write bom.cdx.json into a whole bundle, in the place of an earlier one; return its path.

    Raises BundleError for a bundle that is not whole, UsageError for a report of another one, MissingDependency.
    """
    try:
        import cyclonedx  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingDependency("cyclonedx-python-lib", "a bill of materials (the extra 'trust')") from error
    manifest = verify(bundle)
    report = read_stored_report(bundle).report if (bundle / "report.json").is_file() else None
    document = describe_materials(bundle, manifest, report)
    with blame(bundle):
        write_whole(bundle / BOM, (json.dumps(document, indent=2, sort_keys=True) + "\n").encode())
    return bundle / BOM


def describe_materials(bundle: Path, manifest: Manifest, report: Report | None) -> dict[str, Any]:
    """Return the document: the bundle and its files, the model that it was made of, data, passes, metrics, versions.

    Same bundle and report, same document: it has no time, and its serial number is of their content.
    """
    from cyclonedx.model import Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType, Pedigree
    from cyclonedx.output.json import JsonV1Dot6

    lock, recipe = read_lock(bundle), read_recipe(bundle)
    passes = recipe.get("passes", [])
    said = {f"compress:pass:{number}": json.dumps(record, sort_keys=True) for number, record in enumerate(passes)}
    said |= {"compress:digest": manifest.digest, "compress:target": manifest.target}
    if report is not None:
        said["compress:verdict"] = report.verdict
    kinds = ", ".join(str(record["kind"]) for record in passes)
    made = Component(
        name=manifest.name,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref=BUNDLE,
        components=_list_files(bundle, manifest),
        pedigree=Pedigree(ancestors=[_describe_ancestor(bundle, recipe, lock)], notes=f"passes: {kinds or 'none'}"),
        properties=[Property(name=name, value=value) for name, value in said.items()],
    )
    data = [
        Component(
            name=name,
            type=ComponentType.DATA,
            bom_ref=f"data:{name}",
            description=f"{record['samples']} samples of {json.dumps(record['source'])}",
            properties=[
                Property(name="compress:files", value=record["file_digest"]),
                Property(name="compress:samples", value=record["digest"]),
            ],
        )
        for name, record in lock["data"].items()
    ]
    libraries = [_describe_library(name, version) for name, version in lock["versions"].items()]
    serial = uuid5(NAMESPACE_URL, f"{manifest.digest} {report and sha256_of(bundle / 'report.json')}")
    bom = Bom(components=[*data, *libraries], serial_number=serial)
    bom.metadata.component = made
    bom.metadata.tools.components.add(
        Component(name="compress", version=lock["compress"]["version"], type=ComponentType.APPLICATION)
    )
    bom.register_dependency(made, [*data, *libraries])
    document: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    del document["metadata"]["timestamp"]
    # The library knows no model cards yet: cyclonedx-python-lib 11.12 has a remark in their place.
    document["metadata"]["component"]["modelCard"] = {
        "modelParameters": {
            "task": manifest.task,
            "modelArchitecture": lock["model"].get("architecture") or "unknown",
            "datasets": [{"ref": f"data:{name}"} for name in lock["data"]],
            "inputs": _describe_tensors(manifest.artifact("candidate").inputs),
            "outputs": _describe_tensors(manifest.artifact("candidate").outputs),
        },
        "quantitativeAnalysis": {"performanceMetrics": [] if report is None else list(_list_metrics(report))},
    }
    return document


def _list_files(bundle: Path, manifest: Manifest) -> Iterator[Component]:
    """Yield the bundle's files, each with its sha256: those of the manifest, and the manifest."""
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.component import Component, ComponentType

    files = {MANIFEST: sha256_of(bundle / MANIFEST)} | {n: file.sha256 for n, file in manifest.files.items()}
    for name, digest in files.items():
        hashes = [HashType(alg=HashAlgorithm.SHA_256, content=digest)]
        yield Component(name=name, type=ComponentType.FILE, bom_ref=f"file:{name}", hashes=hashes)


def _describe_ancestor(bundle: Path, recipe: Mapping[str, Any], lock: Mapping[str, Any]) -> Component:
    """Return the model that was compressed, with its licence where its card says it, and a word where it does not."""
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.model import Property
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    source, revision = str(lock["model"]["source"]), recipe.get("model", {}).get("revision")
    licence = find_licence(source, revision, read_host(bundle))
    said = {"compress:digest": str(lock["model"]["digest"])}
    if not licence:
        said["compress:licence"] = "unknown: no README.md with a license in its header lies with the model's files"
    kind, _, name = source.partition(":")
    owner, _, model = name.rpartition("/")
    return Component(
        name=source,
        version=revision,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref="ancestor",
        purl=PackageURL("huggingface", owner, model, revision) if kind == "hf" else None,
        licenses=[LicenseFactory().make_from_string(licence)] if licence else (),
        properties=[Property(name=key, value=value) for key, value in said.items()],
    )


def find_licence(source: str, revision: str | None, host: Mapping[str, Any]) -> str:
    """Return the licence that a model's card names, of a folder or of what the hub's cache holds; "" for none.

    `host`: the bundle's host.json, which says where the source's variables and relative paths were. Nothing is fetched.
    """
    from huggingface_hub import ModelCard, try_to_load_from_cache

    kind, _, name = source.partition(":")
    if kind == "hf":
        card = try_to_load_from_cache(name, "README.md", revision=revision)
    elif kind == "dir":
        folder = re.sub(r"\$\{(\w+)\}", lambda match: host.get("folders", {}).get(match[1], match[0]), name)
        card = str(Path(host.get("recipe_folder", "/"), folder, "README.md"))
    else:
        return ""
    if not isinstance(card, str) or not Path(card).is_file():
        return ""
    try:
        licence = ModelCard.load(card).data.get("license")
    except Exception:  # noqa: BLE001  (a stranger's YAML: what cannot be read says nothing)
        return ""
    return licence if isinstance(licence, str) else ""


def _describe_library(name: str, version: str) -> Component:
    from cyclonedx.model.component import Component, ComponentScope, ComponentType
    from packageurl import PackageURL

    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        scope=ComponentScope.EXCLUDED,  # it built the bundle, and is not in it
        bom_ref=f"library:{name}",
        purl=PackageURL.from_string(package_url(name, version)),
    )


def _describe_tensors(specs: tuple[TensorSpec, ...]) -> list[dict[str, str]]:
    return [{"format": f"{spec.name}: {spec.dtype}[{', '.join(map(str, spec.shape))}]"} for spec in specs]


def _list_metrics(report: Report) -> Iterator[dict[str, Any]]:
    """Yield what the report measured of the candidate, and its ratios to the baseline; intervals where it has some."""
    ratios = {f"{name}_ratio": value for name, value in report.ratios.items()}
    bounds = {**report.candidate.intervals, **{f"{n}_ratio": both for n, both in report.ratio_intervals.items()}}
    for name, value in {**report.candidate.metrics, **ratios}.items():
        if not _is_number(value):
            continue
        metric: dict[str, Any] = {"type": name, "value": f"{value:.6g}"}
        low, high = bounds.get(name, (None, None))
        if _is_number(low) and _is_number(high):
            metric["confidenceInterval"] = {"lowerBound": f"{low:.6g}", "upperBound": f"{high:.6g}"}
        yield metric


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
