"""The JSON Schema of each document that `--json` prints, from the records that the document is made of.

What a document has beside its record's fields stands here as a TypedDict; a test holds real documents against both.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Literal, NotRequired, get_type_hints

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict

from compress.commands.bench_rows import BenchTable
from compress.commands.blame import Blame
from compress.commands.compare import Comparison, LayerChange, RecipeChange, SliceComparison
from compress.commands.doctor import Extra, Finding
from compress.commands.ladder import Ladder, Rung
from compress.commands.parcel import Push
from compress.commands.parity import Parity
from compress.commands.reproduce import Reproduction
from compress.facts import LayerDecision, Note
from compress.planning.measured_speed import LatencyForecast
from compress.recipe.field_texts import read_field_texts
from compress.recipe.vocabulary import editor_schema
from compress.search.trials import Trial
from runtime.bundle.manifest import Gate, Manifest
from runtime.judge.explain import Explanation
from runtime.judge.findings import Findings

Schema = dict[str, Any]


def extend(record: type, **more: Any) -> Any:
    """Return a record's fields and further ones as one object."""
    extended: Any = TypedDict(f"{record.__name__}Document", {**get_type_hints(record), **more})  # type: ignore[operator]
    extended.__doc__ = record.__doc__
    return extended


class Problems(TypedDict):
    """What any command prints that failed: exit code 1 (a run), 2 (the recipe or the call), 130, 143 (stopped)."""

    verdict: Literal["error"]
    exit_code: int
    problems: list[str]


class PlannedModel(TypedDict):
    source: str
    architecture: str
    macs: int | None


class Bytes(TypedDict):
    before: int
    after: int


class Step(TypedDict):
    """What is done at once: an export, a pass, the baseline's outputs. `cached`: its result is there already."""

    name: str
    key: str
    cached: bool
    before_bytes: int
    after_bytes: int
    layers: list[LayerDecision]
    notes: list[Note]


class DataSet(TypedDict):
    source: str
    samples: int
    digest: str


class Stage(TypedDict):
    """A stage of the run. `between`: two bounds of the seconds, one where as much work took so long here before."""

    name: str
    seconds: float
    between: tuple[float, float]
    memory_bytes: int


class Work(TypedDict):
    """What the run will take; `between` as of a stage."""

    seconds: float
    between: tuple[float, float]
    memory_bytes: int
    disk_bytes: int
    bundle_bytes: int
    stages: list[Stage]


class PlanDocument(TypedDict):
    """What a recipe would do, and whether it can work. `latency`: a forecast; null where none is made."""

    name: str
    model: PlannedModel
    target: str
    device: str
    size_bytes: Bytes
    steps: list[Step]
    data: dict[str, DataSet]
    forecast: Work
    latency: LatencyForecast | None
    notes: list[Note]


class Page(TypedDict):
    """Where the page is, and the judgement that it shows."""

    page: str
    report: Findings


class Goal(TypedDict):
    direction: Literal["minimize", "maximize"]
    metric: str
    as_ratio: bool


class StudyDocument(TypedDict):
    """A study. `best`, `nearest`, `front`: numbers of trials; `nearest` misses the gates least while none holds all."""

    format_version: int
    name: str
    goals: list[Goal]
    space: dict[str, dict[str, Any]]
    gates: list[Gate]
    seed: int
    target: str
    judged_on: str
    ended: str
    best: int | None
    nearest: int | None
    front: list[int]
    trials: list[extend(Trial, on_front=bool)]


class Verified(TypedDict):
    """All files are as the manifest says. `signed_with`: the key that was asked for; `left_out`: evaluation data that
    the bundle came without."""

    verdict: Literal["pass"]
    files: int
    digest: str
    signed_with: NotRequired[str]
    left_out: NotRequired[list[str]]


class LadderDocument(TypedDict):
    torch_to_onnx: float | None
    rungs: list[extend(Rung, holds=bool)]
    holds: bool


class Compared(TypedDict):
    """Bundles against the first of them."""

    against: str
    comparisons: list[
        extend(
            Comparison,
            notes=list[str],
            recipe=list[RecipeChange],
            layers=list[LayerChange],
            slices=SliceComparison | None,
        )
    ]


class Diagnosis(TypedDict):
    """What is installed and works here."""

    python: str
    cpu: str
    cpu_flags: list[str]
    findings: list[Finding]
    extras: list[Extra]


LadderDocument.__doc__ = Ladder.__doc__
ABOUT_PARITY = (
    "Every form of a model against the one before, or the graph against an engine; `divergence`: where they part."
)
JUDGED = ("apply", "quantize", "validate", "compile")
DOCUMENTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "error": (Problems, ()),
    "plan": (PlanDocument, ("plan",)),
    "report": (Findings, JUDGED),
    "page": (Page, ("report",)),
    "bench": (BenchTable, ("bench",)),
    "study": (StudyDocument, ("sweep", "auto")),
    "why": (Explanation, ("why",)),
    "blame": (Blame, ("blame",)),
    "compare": (Compared, ("compare",)),
    "inspect": (extend(Manifest, layers=list[Any], verdict=str | None), ("inspect",)),
    "verify": (Verified, ("verify",)),
    "parity": (extend(Parity, holds=bool) | LadderDocument, ("parity",)),
    "reproduce": (extend(Reproduction, verdict=Literal["pass", "fail"]), ("reproduce",)),
    "push": (extend(Push, verdict=Literal["pass"]), ("push",)),
    "doctor": (Diagnosis, ("doctor",)),
}
"""Name of a document -> (what it is made of, the commands of `compress` that print it)."""


@cache
def write_schema(name: str) -> Schema:
    """Return the JSON Schema of a document; "recipe": what `compress check` prints."""
    if name == "recipe":
        return editor_schema()
    made = TypeAdapter(DOCUMENTS[name][0]).json_schema(mode="serialization", schema_generator=Documents)
    return {"$schema": GenerateJsonSchema.schema_dialect, **made}


class Documents(GenerateJsonSchema):
    """A generator for what is printed: all fields of a record are there, with their docstrings, and no others."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return field["type"] == "dataclass-field" or super().field_is_required(field, total)

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> Schema:
        return self.generate_inner(schema["schema"])

    def float_schema(self, schema: Any) -> Schema:
        return {"type": ["number", "null"]}  # JSON has no NaN: what could not be measured is null

    def typed_dict_schema(self, schema: Any) -> Schema:
        return super().typed_dict_schema(schema) | {"additionalProperties": False}

    def dataclass_schema(self, schema: Any) -> Schema:
        made = super().dataclass_schema(schema) | {"additionalProperties": False}
        texts = read_field_texts(schema["cls"])
        for name, part in made["properties"].items():
            if name in texts:
                part["description"] = " ".join(texts[name].split())
        return made


def list_documents() -> list[str]:
    """Return the table of the documents, the commands that print them, and their schemas."""
    rows = ["| `compress check` | The recipe, every default written out. | [recipe.json](schemas/recipe.json) |"]
    for name, (_, commands) in DOCUMENTS.items():
        printed_by = ", ".join(f"`compress {command}`" for command in commands) or "any, where it failed"
        about = " ".join(write_schema(name).get("description", ABOUT_PARITY).partition("\n\n")[0].split())
        rows.append(f"| {printed_by} | {about} | [{name}.json](schemas/{name}.json) |")
    return ["| printed by | what it is | schema |", "|---|---|---|", *rows]


def write_files() -> dict[str, str]:
    """Return page of the site -> the schema that it is, as text."""
    return {
        f"reference/schemas/{name}.json": json.dumps(write_schema(name), indent=2) + "\n"
        for name in ("recipe", *DOCUMENTS)
    }
