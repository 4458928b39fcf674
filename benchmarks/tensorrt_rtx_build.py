"""Claims of recipes/claims/*-tensorrt-rtx.yaml: real models become engines for four GPUs on a machine that has none.

The digits CNN, ResNet-56, all-MiniLM-L6-v2 (any batch and length) and a Llama of 656k parameters with its cache, each
in the precisions that suit it, for compute capabilities 8.0, 8.6, 8.9 and 12.0 (in FP8 and NVFP4 the Llama for 12.0):
every engine is compiled, and at least 99 % of the convolutions and matrix products run in the precision that the graph
asks for (of MiniLM in int8 95 %). The same int8 graphs (S8S8), run by ONNX Runtime, keep within 0.005 top-1 and 0.01
Spearman of the float models. How fast an engine is cannot be told without its GPU, and nothing here says so. There is
no peer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, Call, Claim, Measured, Row, apply_recipe, at_least, at_most, drop, run_script

NEEDS = (
    "models/cifar10-resnet56/model.safetensors",
    "models/tinystories656k-hf",
    "data/cifar10/train.npz",
    "data/stsb/sts-dev.csv",
    "data/tinystories/stories.jsonl",
)
CAPABILITIES = ("8.0", "8.6", "8.9", "12.0")
BLACKWELL = ("12.0",)
"""The only one of these with products in FP4."""
RUNTIME = "tensorrt-rtx"
AS_IT_IS: tuple[str, ...] = ()
FLOAT, HALF = ("passes=[]",), ("passes=[{kind: autocast}]",)
ENGINE_OF_QUICKSTART = (f"target={RUNTIME}", f"export=[{{kind: {RUNTIME}}}]", "validate.gates=[]")


def small_floats(scheme: str) -> tuple[str, ...]:
    engine = f"export=[{{kind: {RUNTIME}, compute_capabilities: ['12.0']}}]"
    return (f"passes=[{{kind: gptq, scheme: {scheme}}}]", engine, "validate.gates=[]")


QUICK = ("data.evaluation.samples=64", "validate.gates=[]")


@dataclass(frozen=True)
class Subject:
    """A recipe and its variants: precision -> `--set`. `metric`: judged of int8, `most`: its largest drop."""

    name: str
    recipe: str
    variants: dict[str, tuple[str, ...]]
    metric: str = ""
    most: float = 0.0
    held: float = 0.99
    capabilities: tuple[str, ...] = CAPABILITIES
    own_data: bool = False
    """The recipe needs nothing of the bench folder."""

    def variables(self, call: Call) -> tuple[str, ...]:
        return () if self.own_data else (f"vars.bench={call.bench}",)


SUBJECTS = (
    Subject(
        "digits CNN",
        "quickstart.yaml",
        {"fp32": (*ENGINE_OF_QUICKSTART, *FLOAT), "fp16": (*ENGINE_OF_QUICKSTART, *HALF), "int8": ENGINE_OF_QUICKSTART},
        "top1",
        0.005,
        own_data=True,
    ),
    Subject(
        "ResNet-56",
        "claims/cifar10-resnet56-tensorrt-rtx.yaml",
        {"fp32": FLOAT, "fp16": HALF, "int8": AS_IT_IS},
        "top1",
        0.005,
    ),
    Subject("MiniLM", "claims/minilm-tensorrt-rtx.yaml", {"fp16": HALF, "int8": AS_IT_IS}, "spearman", 0.01, held=0.95),
    Subject("Llama 656k", "claims/tinystories-tensorrt-rtx.yaml", {"fp16": HALF, "int4": AS_IT_IS}),
    Subject(
        "Llama 656k, small floats",
        "claims/tinystories-tensorrt-rtx.yaml",
        {scheme.lower(): small_floats(scheme) for scheme in ("FP8", "NVFP4")},
        capabilities=BLACKWELL,
    ),
)


def measure(call: Call) -> Measured:
    rows: list[Row] = []
    claims: list[Claim] = []
    for subject in SUBJECTS:
        for precision, sets in subject.variants.items():
            name = f"{subject.name} {precision}"
            bundle = call.out / name.replace(" ", "-")
            given = (*subject.variables(call), *sets, *(QUICK if call.quick else ()))
            apply_recipe(ROOT / "recipes" / subject.recipe, given, bundle, call.out / f"{bundle.name}-cache")
            report = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
            row = built(name, bundle)
            row["all there"] = set(subject.capabilities) <= set(row["capabilities"].split())
            rows.append(row)
            claims.append(at_least(f"{name}: share in the asked precision", row["share"], subject.held))
            if precision == "int8" and not call.quick:
                claims.append(at_most(f"{name}: {subject.metric} drop", drop(report, subject.metric), subject.most))
    covered = sum(row["all there"] for row in rows)
    variants = sum(len(subject.variants) for subject in SUBJECTS)
    return [at_least("engines for all their GPUs", covered, variants), *claims], rows


def built(name: str, bundle: Path) -> Row:
    """What the manifest records of the engine; the share is None where none was built."""
    found = next(engines(bundle), None)
    if found is None:
        return {"model": name, "backend": RUNTIME, "failed": "no engine", "capabilities": "", "share": None}
    record = found["engine"]
    return {
        "model": name,
        "backend": f"{RUNTIME} {record['version']}",
        "capabilities": " ".join(record["compute_capabilities"]),
        "products": ", ".join(f"{count} {kind}" for kind, count in record["asked"].items()),
        "share": record["held"],
        "kernels": record["n_layers"],
        "engine_bytes": found["size_bytes"],
    }


def engines(bundle: Path) -> Iterator[dict[str, Any]]:
    """Those of the candidate."""
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    yield from (one for one in manifest["artifacts"] if one.get("engine") and one["name"] == f"engine-{RUNTIME}")


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
