"""The recipe's records: what a recipe may say, typed and frozen. Reading YAML into them is `compress.recipe.load`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, PrivateAttr, Tag, field_validator, model_validator

from compress.formats.targets import TargetName
from compress.passes import KINDS, Pass
from compress.recipe.exports import (
    CHECKPOINT_TARGET,
    GGUF_TARGET,
    ORT_TARGET,
    AnyTarget,
    CheckpointExport,
    Export,
    GgufExport,
    GraphExport,
    OnnxExport,
    OrtExport,
)
from compress.recipe.goal import read_goals, split_goal
from compress.recipe.search import Search
from compress.specs import ChatSpec, DataSpec, ModelSpec, Preprocess, Record
from runtime.bundle.format import Gate, Judgement, Postprocess
from runtime.tasks import find_task
from runtime.tasks.metrics import is_own

if TYPE_CHECKING:
    AnyPass = Pass
else:
    AnyPass = Annotated[reduce(or_, KINDS.values()), Field(discriminator="kind")]
AnyExport = Annotated[Export, Field(discriminator="kind")]


DEVICES = r"^(auto|cpu|cuda(:\d+)?)$"


@dataclass(frozen=True)
class Variable:
    """A variable of a recipe: its text as the file writes it, and what it stands for here."""

    written: str
    value: str


@dataclass(frozen=True)
class Wording:
    """How a recipe's file words what variables stand in: `texts` by position, and the `variables` that are texts."""

    texts: Mapping[tuple[str | int, ...], str] = field(default_factory=dict)
    variables: Mapping[str, Variable] = field(default_factory=dict)


def _tell_sets(value: object) -> str:
    """Tell one set from several by name, which have mappings for values and no source."""
    if not isinstance(value, Mapping) or "source" in value:
        return "set"
    return "sets" if any(isinstance(part, Mapping | DataSpec) for part in value.values()) else "set"


def _check_set_names(sets: dict[str, DataSpec]) -> dict[str, DataSpec]:
    """Raise ValueError for a name that a gate could not say: `slice: set=NAME`."""
    for name in sets:
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) is None:
            raise ValueError(f"'{name}' names a set: use letters, digits, dot, dash and underscore")
    return sets


if TYPE_CHECKING:
    EvaluationSets = DataSpec | Mapping[str, DataSpec]
else:
    EvaluationSets = Annotated[
        Annotated[DataSpec, Tag("set")] | Annotated[dict[str, DataSpec], AfterValidator(_check_set_names), Tag("sets")],
        Discriminator(_tell_sets),
    ]


class DataSpecs(Record):
    """The named sets."""

    calibration: DataSpec | None = None
    """What passes measure ranges and statistics on."""
    train: DataSpec | None = None
    """What passes that train learn from."""
    evaluation: EvaluationSets | None = None
    """What the verdict is measured on; the bundle holds a copy. One set, or several by name: {day: ..., night: ...}."""

    @model_validator(mode="after")
    def _refuse_packed_evaluation(self) -> DataSpecs:
        if any(spec.packing for spec in self._evaluation_sets.values()):
            raise ValueError("evaluation: packing: each sample is judged alone; leave it out")
        return self

    @model_validator(mode="after")
    def _refuse_redrawn_others(self) -> DataSpecs:
        others = [self.calibration, *self._evaluation_sets.values()]
        if any(spec is not None and spec.redraw for spec in others):
            raise ValueError("redraw: is of data.train alone, what is measured stays the same; leave it out")
        return self

    @property
    def declared(self) -> dict[str, DataSpec]:
        """Return the sets that the recipe has, by name; several evaluation sets as one, each behind the one before."""
        named = {name: getattr(self, name) for name in ("calibration", "train")}
        sets = list(self._evaluation_sets.values())
        if sets:
            named["evaluation"] = sets[0] if len(sets) == 1 else _join_sets(sets)
        return {name: spec for name, spec in named.items() if spec is not None}

    @property
    def evaluation_names(self) -> tuple[str, ...]:
        """Return of each of `declared["evaluation"].parts` the name of its evaluation set; () of a plain one."""
        sets = self._evaluation_sets
        return () if "" in sets else tuple(name for name, spec in sets.items() for _ in spec.parts)

    @property
    def _evaluation_sets(self) -> Mapping[str, DataSpec]:
        if self.evaluation is None:
            return {}
        return {"": self.evaluation} if isinstance(self.evaluation, DataSpec) else self.evaluation


def _join_sets(sets: Sequence[DataSpec]) -> DataSpec:
    first, *others = sets
    return first.model_copy(update={"also": (*first.also, *others)})


class Limits(Record):
    """Bounds that the plan must keep to."""

    memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Main memory that the work may take."""
    disk_gib: Annotated[float, Field(gt=0)] | None = None
    """Disk that bundle and cache may take."""


class Recipe(Record):
    """What a user wants done."""

    version: Literal[1]
    """Of the recipe format."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", examples=["resnet-edge"])]
    """Names the bundle: letters, digits, dot, dash and underscore."""
    description: str = ""
    """What the recipe is for."""
    seed: int = 0
    """Of everything drawn at random, unless it has a seed of its own."""
    model: ModelSpec
    """The trained model."""
    preprocess: Preprocess | None = None
    """Default: what the model's own files say (tokenizer, image processor); tensors as they are otherwise."""
    data: DataSpecs = DataSpecs()
    """The sets of samples."""
    chat: ChatSpec = ChatSpec()
    """Of language models whose data are conversations: how these are rendered, and whose tokens count."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", examples=["auto", "cpu", "cuda", "cuda:1"])] = (
        "auto"
    )
    """What passes over a torch model compute on: a GPU (`cuda`, `cuda:1`), the processor, or a GPU where there is one.
    Results are the same but for the rounding of sums, so that finished work is taken up again on another device."""
    target: AnyTarget = "onnxruntime-cpu"
    """The runtime that the bundle is made for."""
    passes: tuple[AnyPass, ...] = ()
    """What is done to the model, in this order."""
    postprocess: Postprocess | None = None
    """What is made of the outputs before they are answers; judged, and applied wherever the bundle runs."""
    export: Annotated[tuple[AnyExport, ...], Field(min_length=1)] = (OnnxExport(),)
    """The files that are written."""
    keep_module: bool = False
    """The bundle also keeps the torch module that the passes left, in module/: `compress.load_torch` gives it back, to
    train on or to export elsewhere. Passes over the ONNX graph are not in it."""
    validate_: Annotated[Judgement, Field(alias="validate")] = Judgement()
    """What decides whether the result is good enough."""
    limits: Limits = Limits()
    """Bounds that the plan must keep to."""
    search: Search | None = None
    """Values that may be others, and what is looked for among them: `compress sweep` tries them."""
    goal: str | tuple[str, ...] = ()
    """What is to be reached, in words: `size >= 6x, latency_p50 >= 3.5x, top1 drop <= 0.013`. `compress sweep` chooses
    the passes and their numbers; those that stand in `passes` are tried first."""
    _root: Path = PrivateAttr(default_factory=Path)
    _wording: Wording = PrivateAttr(default_factory=Wording)

    @field_validator("goal")
    @classmethod
    def _read_goal(cls, goal: str | tuple[str, ...]) -> tuple[str, ...]:
        terms = tuple(split_goal(goal)) if isinstance(goal, str) else goal
        read_goals(terms)
        return terms

    @model_validator(mode="after")
    def _refuse_two_searches(self) -> Recipe:
        if self.goal and self.search is not None:
            raise ValueError("goal makes a search of its own, and search is given; leave one of them out")
        return self

    @property
    def held(self) -> str:
        """Return what of the recipe is an object of this process, which no other has; "" where nothing is."""
        if self.model.source.startswith("live:"):
            return self.model.source
        train = self.data.train
        return f"data.train.redraw: {train.redraw}" if train is not None and train.redraw else ""

    @property
    def generates(self) -> bool:
        """Return whether the model writes text, token by token."""
        return find_task(self.model.task).generates

    @property
    def unit(self) -> Literal["call", "token"]:
        """Return what is timed of the result: a call, or each token of an answer."""
        return find_task(self.model.task).unit

    @property
    def seeks_passes(self) -> bool:
        """Return whether the passes are yet to be found."""
        return bool(self.goal) and not self.passes

    @property
    def goal_gates(self) -> tuple[Gate, ...]:
        """Return the gates that the goal's terms stand for."""
        return read_goals(tuple(self.goal))

    @property
    def root(self) -> Path:
        """Return the recipe's folder, where relative paths are sought after the working directory; not in its text."""
        return self._root

    @property
    def wording(self) -> Wording:
        """Return how the recipe's file words it; empty for a recipe that was made in Python."""
        return self._wording

    def at_root(self, root: Path, wording: Wording | None = None) -> Recipe:
        """Return the same recipe, standing in the folder `root`, where its file words it so (None: as it did)."""
        copy = self.model_copy()
        copy._root = root
        copy._wording = self._wording if wording is None else wording
        return copy

    @property
    def opset(self) -> int:
        """Return the opset of the ONNX graph that every ONNX file is made from."""
        return next((export.opset for export in self.export if isinstance(export, GraphExport)), OnnxExport().opset)

    @property
    def has_onnx(self) -> bool:
        """Return whether an ONNX file is written, which the runtime can run."""
        return any(isinstance(export, GraphExport) for export in self.export)

    @property
    def code_sources(self) -> tuple[str, ...]:
        """Return the sources of models whose own Python runs, already to plan the recipe."""
        students = [student for p in self.passes if (student := p.find_student()) is not None]
        runs = self.model.trust_remote_code and not self.model.source.startswith("shards:")
        own = [self.model.source] if runs else []
        named = [source for source in (self.model.source, *(student.source for student in students)) if source]
        return tuple(dict.fromkeys([*own, *(source for source in named if source.startswith("python:"))]))

    @property
    def own_metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics that are functions of the recipe's own, each once."""
        judged = self.validate_
        names = dict.fromkeys((*judged.metrics, *(gate.metric for gate in judged.gates)))
        return tuple(name for name in names if is_own(name))

    def target_of(self, export: Export) -> TargetName:
        """Return the runtime that a file is for."""
        if isinstance(export, CheckpointExport):
            return export.target or CHECKPOINT_TARGET
        if isinstance(export, GgufExport):
            return GGUF_TARGET
        if isinstance(export, OrtExport):
            return ORT_TARGET
        return (export.target or self.target) if isinstance(export, OnnxExport) else export.kind

    def __repr__(self) -> str:
        passes = ", ".join(pass_.kind for pass_ in self.passes) or "no passes"
        return f"<Recipe {self.name}: {self.model.source}; {passes}; {self.target}>"

    def __eq__(self, other: object) -> bool:
        """Compare what two recipes say, wherever they stand."""
        return isinstance(other, Recipe) and self.model_dump() == other.model_dump()
