"""The recipe's records: what a recipe may say, typed and frozen. Reading YAML into them is `compress.recipe`."""

from __future__ import annotations

from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from compress.exports import CHECKPOINT_TARGET, CheckpointExport, Export, GraphExport, OnnxExport
from compress.passes import PASSES, Pass
from compress.passes.base import Record
from compress.targets import TargetName
from runtime.bundle import Judgement
from runtime.language import LanguagePreprocess
from runtime.preprocess import ImagePreprocess, TensorPreprocess, TextPreprocess

MODEL_SOURCES = ("hf:<hub id>", "dir:<folder>", "python:<module or file.py>:<factory>", "onnx:<file>")
DATA_SOURCES = (
    "npz:<file>",
    "jsonl:<file>",
    "csv:<file>",
    "tsv:<file>",
    "text:<file>",
    "parquet:<file>",
    "imagefolder:<folder>",
    "hf:<hub id>",
)


def _source(examples: tuple[str, ...]) -> Any:
    """A text that starts as one of the examples does."""
    prefixes = "|".join(example.partition(":")[0] for example in examples)
    return Field(pattern=rf"^({prefixes}):.+", examples=list(examples))


Task = Literal["image-classification", "text-classification", "feature-extraction", "text-generation", "generic"]
if TYPE_CHECKING:
    AnyPass = Pass
else:
    AnyPass = Annotated[reduce(or_, PASSES), Field(discriminator="kind")]
AnyExport = Annotated[Export, Field(discriminator="kind")]
Preprocess = Annotated[
    ImagePreprocess | TextPreprocess | LanguagePreprocess | TensorPreprocess, Field(discriminator="kind")
]


class ModelSpec(Record):
    """Where the trained model comes from."""

    source: Annotated[str, _source(MODEL_SOURCES)]
    """hf:<hub id>, dir:<Hugging Face folder>, python:<module or file.py>:<factory>, onnx:<file>."""
    task: Task
    """What the model does: which inputs it takes, which metrics fit."""
    weights: str | None = None
    """For python: sources, a .safetensors file (or a .pt, .pth or .bin that holds tensors alone)."""
    args: dict[str, Any] = {}
    """Keyword arguments of the factory."""
    revision: str | None = None
    """Of an hf: source: a branch, tag or commit."""
    trust_remote_code: bool = False
    """Run Python that comes with an hf: or dir: model."""
    class_names: tuple[str, ...] = ()
    """Names of the classes, in the order of the model's outputs."""


class DataSpec(Record):
    """A set of samples."""

    source: Annotated[str, _source(DATA_SOURCES)]
    """Its kind and where it is."""
    samples: Annotated[int, Field(ge=1)] | None = None
    """How many to take; all of them if not given."""
    skip: Annotated[int, Field(ge=0)] = 0
    """How many to pass over first (after shuffling)."""
    shuffle: bool = True
    """Draw `samples` at random (by `seed`) rather than from the top; no effect on a whole set."""
    seed: int | None = None
    """Default: the recipe's seed."""
    columns: dict[str, str | int] = {}
    """Role (image, text, text_pair, label, or an input name) -> its column in the file: a name, or an index."""
    names: tuple[str, ...] | None = None
    """Column names of a csv or tsv that has no header line."""
    separator: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """Between the columns of a csv or tsv; default: a comma, a tabulator."""
    quoting: bool = True
    """False: quotation marks in csv/tsv are ordinary characters."""
    split: str | None = None
    """Of an hf: source, or of an imagefolder: that has a folder for each."""
    also: tuple[DataSpec, ...] = ()
    """Further sets whose samples come after these; they must have the same columns (by role)."""

    @property
    def parts(self) -> tuple[DataSpec, ...]:
        """This one, and all that `also` names, in their order."""
        return (self, *(part for more in self.also for part in more.parts))


class DataSpecs(Record):
    """The named sets."""

    calibration: DataSpec | None = None
    """What passes measure ranges and statistics on."""
    train: DataSpec | None = None
    """What passes that train learn from."""
    evaluation: DataSpec | None = None
    """What the verdict is measured on; the bundle holds a copy."""

    @property
    def declared(self) -> dict[str, DataSpec]:
        """Name -> set, of those that the recipe has."""
        return {name: spec for name in DataSpecs.model_fields if (spec := getattr(self, name)) is not None}


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
    target: TargetName = "onnxruntime-cpu"
    """The runtime that the bundle is made for."""
    passes: tuple[AnyPass, ...] = ()
    """What is done to the model, in this order."""
    export: Annotated[tuple[AnyExport, ...], Field(min_length=1)] = (OnnxExport(),)
    """The files that are written."""
    validate_: Annotated[Judgement, Field(alias="validate")] = Judgement()
    """What decides whether the result is good enough."""
    limits: Limits = Limits()
    """Bounds that the plan must keep to."""
    _root: Path = PrivateAttr(default_factory=Path)

    @property
    def root(self) -> Path:
        """The recipe's folder, where relative paths are looked for after the working directory; not in its text."""
        return self._root

    def at_root(self, root: Path) -> Recipe:
        """The same recipe, standing in the folder `root`."""
        copy = self.model_copy()
        copy._root = root
        return copy

    @property
    def opset(self) -> int:
        """Of the ONNX graph that every ONNX file is made from."""
        return next((export.opset for export in self.export if isinstance(export, GraphExport)), OnnxExport().opset)

    @property
    def has_onnx(self) -> bool:
        """True if an ONNX file is written, which the runtime can run."""
        return any(isinstance(export, GraphExport) for export in self.export)

    def target_of(self, export: Export) -> TargetName:
        """The runtime that a file is for."""
        if isinstance(export, CheckpointExport):
            return export.target or CHECKPOINT_TARGET
        return (export.target or self.target) if isinstance(export, OnnxExport) else export.kind

    def __eq__(self, other: object) -> bool:
        """Equal if they say the same, wherever they stand."""
        return isinstance(other, Recipe) and self.model_dump() == other.model_dump()
