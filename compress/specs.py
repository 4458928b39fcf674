"""The plain records that every room may import: where a model and its data come from, and what every record is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from compress.tasks import TORCH_TASKS
from compress.tasks.base import MaskIds
from runtime.bundle.detections import Detections
from runtime.encode.language import LanguagePreprocess
from runtime.encode.preprocess import (
    AudioPreprocess,
    ImagePreprocess,
    ImageTextPreprocess,
    Seq2SeqPreprocess,
    TensorPreprocess,
    TextPreprocess,
)
from runtime.tasks import find_task


def _readable(pattern: str) -> str:
    """Raises ValueError on a `re:` pattern that is no regular expression."""
    try:
        re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


LayerPattern = Annotated[str, AfterValidator(_readable)]
"""Selects layers: a name, a type, or `re:` and a regular expression."""


class Record(BaseModel):
    """A frozen piece of a recipe; an unknown key is an error."""

    # Defaults are validated, so that 5 in a float field is written as 5.0 whether the recipe gives it or not.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


class NamesPlace:
    """Marks a field whose text names a file, a folder or a hub: it may differ between machines that build the same."""


NAMES_PLACE = NamesPlace()


def one_of(record: Record, names: Sequence[str], or_else: str = "") -> None:
    """ValueError unless exactly one of these fields is given; `or_else`: what else may be given, for its text."""
    given = [name for name in names if getattr(record, name) is not None]
    if len(given) != 1:
        have = f"{' and '.join(given)} are given" if given else "none is given"
        raise ValueError(f"give exactly one of {', '.join(names)}{or_else}; {have}")


def find_changes(record: Record, names: Iterable[str]) -> list[str]:
    """List those of these fields that do not hold their defaults, sorted.

    Which fields were given is never asked: a recipe that is written out gives all of them, and must mean the same.
    """
    fields, values = type(record).model_fields, dict(record)
    return sorted(
        name
        for name in names
        if values[name] != fields[name].get_default(call_default_factory=True, validated_data=values)
    )


MODEL_SOURCES = (
    *("hf:<hub id>", "dir:<folder>", "shards:<folder>", "gguf:<file>"),
    *("python:<module or file.py>:<factory>", "onnx:<file>"),
)
HELD = "live:<name>"
"""The source of a model that was given as an object: nobody writes it by hand."""
OF_FOLDERS = ("hf:", "dir:", "shards:", "gguf:")
"""Sources with files that say how a model's inputs are made."""
DATA_SOURCES = (
    "npz:<file>",
    "jsonl:<file>",
    "csv:<file>",
    "tsv:<file>",
    "text:<file>",
    "parquet:<file>",
    "imagefolder:<folder>",
    "audiofolder:<folder>",
    "coco:<file.json>",
    "voc:<folder>",
    "maskfolder:<folder>",
    "hf:<hub id>",
)


def _source(examples: tuple[str, ...]) -> Any:
    """A text that starts as one of the examples does."""
    prefixes = "|".join(example.partition(":")[0] for example in examples)
    return Field(pattern=rf"^({prefixes}):.+", examples=list(examples))


if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal[tuple(TORCH_TASKS)]
Preprocess = Annotated[
    ImagePreprocess
    | AudioPreprocess
    | ImageTextPreprocess
    | TextPreprocess
    | LanguagePreprocess
    | TensorPreprocess
    | Seq2SeqPreprocess,
    Field(discriminator="kind"),
]


class ModelSpec(Record):
    """Where the trained model comes from."""

    source: Annotated[str, _source((*MODEL_SOURCES, HELD)), NAMES_PLACE]
    """hf:<hub id>, dir:<Hugging Face folder>, gguf:<file>, python:<module or file.py>:<factory>, onnx:<file>.

    shards:<Hugging Face folder> is read by the names of its tensors, without the model's class: for passes that look at
    weights alone, and a checkpoint that nobody judges.

    live:<name> is written for a model that was given as an object."""
    task: TaskName
    """What the model does: which inputs it takes, which metrics fit."""
    weights: Annotated[str | None, NAMES_PLACE] = None
    """For python: sources, a .safetensors file (or a .pt, .pth or .bin that holds tensors alone)."""
    args: dict[str, Any] = {}
    """Keyword arguments of the factory."""
    revision: str | None = None
    """Of an hf: source: a branch, tag or commit."""
    trust_remote_code: bool = False
    """Run Python that comes with an hf: or dir: model; of a shards: source none is run, and it is copied."""
    inputs: dict[str, Any] = {}
    """Of an onnx: source: input -> its value, where it is the same for all samples, such as {sr: 16000}. The result has
    the value in it, and takes no such input."""
    state: dict[str, str] = {}
    """Of an onnx: source: output -> the input by which the next call reads it, such as {hn: h}; zero at the start of
    each sample. A sample is then a whole sequence, [calls, ...], of which each call reads one part."""
    class_names: tuple[str, ...] = ()
    """Names of the classes, in the order of the model's outputs."""
    detections: Detections | None = None
    """object-detection: what the outputs mean, where their names and shapes do not say."""

    @model_validator(mode="after")
    def _refuse_detections_of_others(self) -> ModelSpec:
        if self.detections is not None and find_task(self.task).outputs != "boxes":
            raise ValueError(f"detections: is for models that find boxes, and the task is {self.task}; leave it out")
        return self

    @model_validator(mode="after")
    def _refuse_ends_of_others(self) -> ModelSpec:
        given = "inputs" if self.inputs else "state" if self.state else ""
        if given and not self.source.startswith("onnx:"):
            raise ValueError(
                f"{given}: is for onnx: sources; give the parameter a default in forward, or export the model and give "
                "the file"
            )
        if len(set(self.state.values())) < len(self.state):
            raise ValueError("state: two outputs go into one input; give each its own")
        return self

    @property
    def decoder_only(self) -> bool:
        """Return whether the model writes text by its prompt alone."""
        return find_task(self.task).decoder_only


class MessageKeys(Record):
    """How a set writes the messages of its conversations."""

    role: str = "role"
    """Key of who speaks: `from` in some."""
    content: str = "content"
    """Key of what is said: `value` in some."""
    roles: dict[str, str] = {}
    """The set's names of roles -> those that the chat template knows, such as {human: user, gpt: assistant}."""


TEMPLATE_FILE = ".jinja"
"""How the name of a file with a chat template ends."""
RENDERING = (
    *("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)
"""What is asked of transformers' `apply_chat_template` here, and no recipe may ask otherwise."""


class ChatSpec(Record):
    """How conversations become the tokens that a model reads, and which of them count."""

    template: Annotated[str | None, NAMES_PLACE] = None
    """A file that ends in .jinja, or the name of one of several that the model has; default: the model's own."""
    arguments: dict[str, Any] = {}
    """Variables of the template, such as {enable_thinking: false}."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Whose tokens passes that train learn from and the verdict is measured on."""
    image_size: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = None
    """Bring every image to [height, width] before the model's processor reads it, whatever its shape was."""

    @model_validator(mode="after")
    def _refuse_own_arguments(self) -> ChatSpec:
        taken = sorted(self.arguments.keys() & set(RENDERING))
        if taken:
            raise ValueError(f"arguments: {', '.join(taken)} is set as conversations are read; leave it out")
        return self


class DataSpec(Record):
    """A set of samples."""

    source: Annotated[str, _source(DATA_SOURCES), NAMES_PLACE]
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
    """Role (image, audio, text, text_pair, messages, tools, label, an input, a slice) -> its column in the file: a
    name, or an index."""
    names: tuple[str, ...] | None = None
    """Column names of a csv or tsv that has no header line."""
    separator: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """Between the columns of a csv or tsv; default: a comma, a tabulator."""
    quoting: bool = True
    """False: quotation marks in csv/tsv are ordinary characters."""
    split: str | None = None
    """Of an hf: source, of an imagefolder:, audiofolder: or maskfolder: that has a folder for each, or of a voc: folder
    (ImageSets/Main)."""
    masks: MaskIds = MaskIds()
    """What the numbers in masks stand for, of semantic-segmentation."""
    boxes: Literal["xyxy", "xywh", "cxcywh"] | None = None
    """Form of labelled boxes, in pixels: corners, corner and size, centre and size. Default: what the format has; of
    columns xywh (COCO's) where they are called bbox, else xyxy."""
    images: Annotated[str | None, NAMES_PLACE] = None
    """Folder of a coco: file's images; default: the file's own, which those of a jsonl: file are relative to, too."""
    messages: MessageKeys = MessageKeys()
    """Of a column of conversations: how its messages are written."""
    packing: bool = False
    """Of text-generation: several short samples in one row, up to `max_length`, to calibrate and train on. Each is
    read as if it stood alone, unless the plan notes that the model attends across the samples of a row."""
    also: tuple[DataSpec, ...] = ()
    """Further sets whose samples come after these; they must have the same columns (by role)."""
    redraw: str | None = None
    """Of data.train, written for a set that was given as an object and draws its samples at random: the name under
    which the process holds it. What is learned from is drawn anew there each time; all else is of `source`, which has
    one draw of each sample. No other process can: leave it out there."""

    @model_validator(mode="after")
    def _refuse_redrawn_parts(self) -> DataSpec:
        if self.also and any(part.redraw for part in self.parts):
            raise ValueError("also: a set that is drawn anew stands alone; leave `redraw` out, or the other sets")
        return self

    @model_validator(mode="after")
    def _refuse_packing_of_parts(self) -> DataSpec:
        if any(part.packing for part in self.parts[1:]):
            raise ValueError("also: packing is of the whole set: say it beside `also`, not inside")
        return self

    @property
    def parts(self) -> tuple[DataSpec, ...]:
        """This one, and all that `also` names, in their order."""
        return (self, *(part for more in self.also for part in more.parts))
