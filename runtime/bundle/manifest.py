"""What a bundle's manifest says: the records, and nothing that touches a file."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from runtime.bundle.detections import Detections
from runtime.bundle.engine import EngineOrder, EngineRecord
from runtime.bundle.records import PYDANTIC_CONFIG
from runtime.bundle.tensors import State, TensorSpec
from runtime.errors import BundleError

FORMAT_VERSION = 1
RULES = ("max_drop", "min_retained", "min", "max", "min_speedup")
"""The rules of a gate: names of its fields, in the order in which they are decided and shown."""

MOST_THREADS, MOST_PROCESSES = 1024, 1000
"""Of one model: more than machines have, and few enough that they start."""
MOST_BATCH, MOST_TOKENS, MOST_CALLS = 2**16, 2**20, 10**6
"""Samples in a call; tokens of a text; timed calls: a stranger's bundle may ask for no more."""
MOST_VALUES = 2**28
"""Of an image's pixels as a model reads them, a gigabyte of floats: 448 x 448 are 1.2 million to Qwen2.5-VL."""


def _check_range(record: object, name: str, least: int, most: int) -> None:
    value = getattr(record, name)
    if value < least:
        raise ValueError(f"{name} is {value}, below {least}")
    if value > most:
        raise ValueError(f"{name} is {value}, above {most}")


LOGITS_TO_KEEP = "logits_to_keep"
"""An input of a decoder's graph that need not be given, int64 [1], with transformers' name: of how many of the last
tokens there are to be logits; 0: of all."""
IMAGE_FEATURES = "image_features.{i}"
"""What a decoder that also sees reads in the places of images' tokens, float [n, width]: of all images of a call, one
after another; no rows where there are none. Its vision.onnx gives those of one image under the same names."""
PAST, PRESENT = "past_key_values.{layer}.{kind}", "present.{layer}.{kind}"
"""What a decoder's layer keeps between calls: names of an input and an output; layer from 0, kind is key, value, ..."""
SELF_PAST, SELF_PRESENT = "past_key_values.{layer}.decoder.{kind}", "present.{layer}.decoder.{kind}"
"""In an encoder-decoder: its decoder's own earlier tokens."""
CROSS = "cross.{layer}.{kind}"
"""What each of its layers makes of the encoder's output, once for a text: what the one gives and the other reads."""


@dataclass(frozen=True)
class KeptState:
    """A tensor that one call of a decoder gives, as output `present`, and the next one reads, as input `past`.

    The input's first axis is the batch. Along an axis with a name it grows by what each call reads, from nothing. With
    numbers alone, as of a convolution's last inputs or a recurrence's matrix, it is replaced, and zeros at first.
    """

    past: TensorSpec
    present: str
    shared_buffer: bool = False
    """Past and present are one buffer of fixed length, beside others that are not: texts are padded on the left."""

    def __post_init__(self) -> None:
        if not self.past.shape or sum(isinstance(size, str) for size in self.past.shape[1:]) > 1:
            raise ValueError(f"'{self.past.name}' {self.past.shape}: all sizes but the batch and one must be numbers")
        if not all(1 <= size <= MOST_BATCH for size in self.past.shape if isinstance(size, int)):
            raise ValueError(f"'{self.past.name}' {self.past.shape}: give sizes of 1 to {MOST_BATCH}")


@dataclass(frozen=True)
class KvCacheSpec:
    """What a decoder keeps of earlier tokens, as inputs and outputs of its graph.

    Where all layers keep keys and values of one shape, each of `past` and `present` is [batch, n_heads, length,
    head_size]. In a graph with `shared_buffer` past and present are one buffer of fixed length, texts are padded on the
    right, and the attention mask says how long each row is; in any other graph past grows by what each call reads, but
    for a state with a buffer of its own, and texts are padded on the left.
    """

    n_layers: int
    n_heads: int
    """Of keys and values: fewer than the queries' where those share them. 0, as `head_size`, where `states` says it."""
    head_size: int
    dtype: str = "float32"
    shared_buffer: bool = False
    past: str = PAST
    """Name of an input; layer from 0, kind is key or value."""
    present: str = PRESENT
    """Name of an output."""
    states: tuple[KeptState, ...] = ()
    """All that is kept, where it is something else than keys and values of one shape in every layer."""

    def __post_init__(self) -> None:
        least = 0 if self.states else 1
        for name in ("n_layers", "n_heads", "head_size"):
            _check_range(self, name, least, MOST_BATCH)
        for name in ("past", "present"):
            if not all(part in getattr(self, name) for part in ("{layer}", "{kind}")):
                raise ValueError(f"{name} is '{getattr(self, name)}': it must hold {{layer}} and {{kind}}")

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Return the names (past, present) of all that is kept."""
        if self.states:
            return tuple((state.past.name, state.present) for state in self.states)
        return tuple(
            (self._fill_pattern(self.past, layer, kind), self._fill_pattern(self.present, layer, kind))
            for layer in range(self.n_layers)
            for kind in ("key", "value")
        )

    def shapes(self, n_rows: int, length: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each past of `n_rows` texts, `length` tokens long, by its name."""
        if not self.states:
            return dict.fromkeys((past for past, _ in self.pairs()), (n_rows, self.n_heads, length, self.head_size))
        return {
            state.past.name: (n_rows, *(length if isinstance(size, str) else size for size in state.past.shape[1:]))
            for state in self.states
        }

    def buffers(self) -> tuple[str, ...]:
        """Return the names of the pasts that are one buffer with their presents."""
        if self.shared_buffer:
            return tuple(past for past, _ in self.pairs())
        return tuple(state.past.name for state in self.states if state.shared_buffer)

    def fixed(self) -> tuple[str, ...]:
        """Return the names of the pasts that do not grow."""
        return tuple(past for past, shape in self.shapes(1, 0).items() if 0 not in shape)

    @staticmethod
    def _fill_pattern(pattern: str, layer: int, kind: str) -> str:
        return pattern.replace("{layer}", str(layer)).replace("{kind}", kind)


def find_cache(
    inputs: Iterable[TensorSpec], past: str = PAST, present: str = PRESENT, shared: Collection[str] = ()
) -> KvCacheSpec | None:
    """Return the cache of a decoder whose inputs are named after `past`; None without one.

    `shared`: those that are one buffer with their presents. BundleError for one with a size that is free and is not its
    length.
    """
    pattern = re.escape(past).replace(r"\{layer\}", r"(\d+)").replace(r"\{kind\}", r"([a-z0-9_]+)")
    named = [(spec, match) for spec in inputs if (match := re.fullmatch(pattern, spec.name))]
    if not named:
        return None
    first, whole = named[0][0], len(shared) == len(named)
    layers = {int(match[1]) for _, match in named}
    both = [(layer, kind) for layer in range(len(layers)) for kind in ("key", "value")]
    alike = {(*spec.shape[:2], *spec.shape[3:], spec.dtype, len(spec.shape)) for spec, _ in named}
    one_shape = [(int(match[1]), match[2]) for _, match in named] == both and len(alike) == 1 and len(first.shape) == 4
    if one_shape and (whole or not shared):
        heads, size = first.shape[1], first.shape[3]
        if isinstance(heads, int) and isinstance(size, int):
            return KvCacheSpec(len(layers), heads, size, first.dtype, whole, past, present)
    try:
        states = tuple(
            KeptState(spec, present.format(layer=match[1], kind=match[2]), not whole and spec.name in shared)
            for spec, match in named
        )
    except ValueError as error:
        raise BundleError(f"cache input {error}") from error
    return KvCacheSpec(len(layers), 0, 0, first.dtype, whole, past, present, states)


@dataclass(frozen=True)
class Artifact:
    """One model of the bundle: an .onnx file, a checkpoint's folder that another engine loads, a compiled engine, or
    OpenVINO's IR."""

    name: str
    """"candidate", "baseline", or "candidate-<target>" for a flavour made for another backend; "ir-openvino"."""
    path: str
    """Of the .onnx file, of a checkpoint's config.json, of an engine, or of an IR's .xml; relative to the bundle's
    folder.

    Of an encoder-decoder the decoder's .onnx file, beside which its encoder lies as encoder.onnx; `inputs`, `outputs`
    and `size_bytes` are of both together. Of a decoder that also sees, beside which vision.onnx lies, `size_bytes` is.
    """
    target: str
    """The backend it was made for."""
    precision: str
    """What its weights are stored in, in words: float32, int8, ..."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    size_bytes: int
    """The file and its external data; all the folder's safetensors of a checkpoint."""
    cache: KvCacheSpec | None = None
    """A decoder's; None: each call reads whole texts."""
    states: tuple[State, ...] = ()
    """What a call of the file hands on to the next: `inputs` and `outputs` are then of whole sequences, [1, time, ...],
    and name none of them."""
    kind: Literal["onnx", "checkpoint", "gguf", "engine", "openvino", "ort", "pte"] = "onnx"
    """A checkpoint, and a GGUF file, is not run here: its quality was measured when it was built."""
    engine: EngineRecord | None = None
    """An engine's: what it was compiled with and for."""
    remote_code: bool = False
    """A checkpoint's whose recipe said `trust_remote_code`: *.py files beside its config.json are the model's own. They
    are never run here."""

    @property
    def is_checkpoint(self) -> bool:
        """Return whether it holds weights alone, for an engine that has the model's code, and is not run here."""
        return self.kind in ("checkpoint", "gguf")

    def __post_init__(self) -> None:
        if (self.kind == "engine") != (self.engine is not None):
            raise ValueError(f"artifact '{self.name}': an engine has a record of its build, and nothing else has one")
        fixed = fixed_batch(self.inputs)
        if fixed is not None and not 1 <= fixed <= MOST_BATCH:
            raise ValueError(f"artifact '{self.name}': its inputs have a batch of {fixed}: give 1 to {MOST_BATCH}")
        if self.remote_code and self.kind != "checkpoint":
            raise ValueError(f"artifact '{self.name}': remote_code is of checkpoints alone")


@dataclass(frozen=True)
class Generation:
    """What generating text needs to know of a decoder, and its makers' settings for sampling."""

    context_length: int
    """Tokens of prompt and answer together."""
    vocab_size: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Any of them ends an answer."""
    pad_token_id: int | None = None
    temperature: float = 1.0
    """This and the rest: used where a call samples and does not give its own."""
    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        _check_range(self, "context_length", 1, 2**31)
        _check_range(self, "vocab_size", 1, 2**31)
        single = {"bos_token_id": self.bos_token_id, "pad_token_id": self.pad_token_id}
        for name, token in (*single.items(), *(("eos_token_ids", token) for token in self.eos_token_ids)):
            if token is not None and not 0 <= token < self.vocab_size:
                raise ValueError(f"{name} {token} is not in the vocabulary of {self.vocab_size}")


@dataclass(frozen=True)
class PixelOrder:
    """Where a model that reads patches has each value of an image's pixels [channels, height, width]."""

    shape: tuple[int, ...]
    """Of what it reads; what the loops leave of it is `rest`."""
    loops: tuple[tuple[int, int], ...]
    """Counts and steps, the outermost first, over the pixels in one row: as of an array's shape and strides."""
    start: int = 0
    """The place of the first value."""
    rest: float = 0.0
    """Fills what is left."""

    def __post_init__(self) -> None:
        ends = [(count - 1) * step for count, step in self.loops]
        if min(self.shape, default=0) < 1 or any(count < 1 for count, _ in self.loops):
            raise ValueError(f"shape {self.shape} and loops {self.loops} must count from 1")
        if math.prod(self.shape) > MOST_VALUES:
            raise ValueError(f"shape {self.shape} is of more than {MOST_VALUES} values")
        if math.prod(count for count, _ in self.loops) > math.prod(self.shape):
            raise ValueError(f"loops {self.loops} are more than shape {self.shape} has room for")
        if self.start + sum(min(end, 0) for end in ends) < 0:
            raise ValueError(f"loops {self.loops} from {self.start} leave the image")

    @property
    def n_pixels(self) -> int:
        """Return how many values an image must have."""
        return 1 + self.start + sum(max((count - 1) * step, 0) for count, step in self.loops)


@dataclass(frozen=True)
class PromptImages:
    """How images come into the prompt of a decoder that also sees."""

    marker: str
    """What the chat template writes where an image is."""
    text: str
    """What is tokenized in its place; it holds the token of images once for each row of an image's features."""
    preprocess: dict[str, object]
    """A `runtime.encode.images.ImagePreprocess`: pixels as vision.onnx reads them, but for their order."""
    order: PixelOrder | None = None
    """In which vision.onnx reads them; none: as they are, [1, channels, height, width]."""

    def __post_init__(self) -> None:
        if not self.marker:
            raise ValueError("marker is empty: nothing says where an image is")


@dataclass(frozen=True)
class Gate:
    """A bound that a metric must keep to; at least one of the rules `max_drop` to `min_speedup` is given."""

    metric: str
    """The name of a metric: top1, spearman, latency_p50, size, ...; or one's own, python:FILE.py:FUNCTION."""
    max_drop: float | None = None
    """At most this much worse than the baseline, in the metric's own unit."""
    min_retained: float | None = None
    """At least this share of the baseline's value: 0.99. Where lower is better, of baseline over candidate."""
    min: float | None = None
    """At least this."""
    max: float | None = None
    """At most this."""
    min_speedup: float | None = None
    """At least this many times as fast as the baseline."""
    worst: str | None = None
    """Hold the worst slice of this column of `slices` to the rules ("set": of the named evaluation sets)."""
    slice: str | None = None
    """Hold one slice to the rules, COLUMN=VALUE: set=night, label=cat."""
    undecided: Literal["fail", "pass"] | None = None
    """What to do when the confidence interval holds the bound; default: what `validate` says."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG

    def __post_init__(self) -> None:
        if not self.bounds:
            raise ValueError(f"gate on '{self.metric}' has no rule: give one of {', '.join(RULES)}")
        for name, bound in self.bounds.items():
            if not math.isfinite(bound):
                raise ValueError(f"gate on '{self.metric}': {name} is {bound}, not a finite number")
        if self.max_drop is not None and self.max_drop < 0:
            raise ValueError(
                f"gate on '{self.metric}': max_drop is {self.max_drop}, below 0; a drop is a positive number"
            )
        for name in ("min_speedup", "min_retained"):
            if (bound := getattr(self, name)) is not None and bound <= 0:
                raise ValueError(f"gate on '{self.metric}': {name} is {bound}, not above 0")
        if self.worst is not None and self.slice is not None:
            raise ValueError(f"gate on '{self.metric}': worst and slice are given; give one, or two gates")
        if self.slice is not None and not all(self.slice.partition("=")):
            raise ValueError(f"gate on '{self.metric}': slice is '{self.slice}'; write COLUMN=VALUE, such as label=cat")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"gate on '{self.metric}': min {self.min} is above max {self.max}")

    @property
    def bounds(self) -> dict[str, float]:
        """Return the rules that are given, as rule -> bound."""
        return {rule: bound for rule in RULES if (bound := getattr(self, rule)) is not None}


@dataclass(frozen=True)
class Benchmark:
    """How speed is measured."""

    batch_size: int = 1
    """Samples in a call whose latency is measured."""
    throughput_batch_size: int = 64
    """Samples in a call whose throughput is measured."""
    warmup: int = 10
    """Calls that are run first and not counted."""
    iterations: int = 100
    """Calls that are counted, for each of baseline and candidate, in all processes together; more where a gate is about
    speed (six seconds of them)."""
    processes: int | None = None
    """Fresh processes that time both models; default: 9 where a gate is about speed, else 6. More make intervals
    narrower; below 6 there are none at a confidence of 0.95."""
    threads: int = 1
    """Threads inside one operator."""
    sequence_length: int | None = None
    """Tokens in each text; default: the texts as they are."""
    latency_percentile: float = 95.0
    """Of calls: what limits are held against, and what the metric latency_percentile gives; 99.9 is fine, too."""
    latency_limit_ms: float | None = None
    """Also measure the throughput at the largest batch whose latency_percentile stays within this."""
    prompt_tokens: int = 128
    """Of models that generate: tokens of each prompt, or of what the encoder reads."""
    new_tokens: int = 64
    """Of models that generate: tokens generated after each prompt; of slow ones the first are timed, 16 at least."""
    ttft_limit_ms: float | None = None
    """Of models that generate: also measure goodput; latency_percentile of the time to the first token within this."""
    tpot_limit_ms: float | None = None
    """Of models that generate: also measure goodput; latency_percentile of the time for a further token within this."""
    price_per_hour: float | None = None
    """Also give the cost of a million samples (generated tokens) on a machine of this price, in its currency."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG

    def __post_init__(self) -> None:
        _check_range(self, "batch_size", 1, MOST_BATCH)
        _check_range(self, "throughput_batch_size", 1, MOST_BATCH)
        _check_range(self, "warmup", 0, MOST_CALLS)
        _check_range(self, "iterations", 1, MOST_CALLS)
        if self.processes is not None:
            _check_range(self, "processes", 1, MOST_PROCESSES)
        _check_range(self, "threads", 1, MOST_THREADS)
        _check_range(self, "prompt_tokens", 1, MOST_TOKENS)
        _check_range(self, "new_tokens", 2, MOST_TOKENS)
        if self.sequence_length is not None:
            _check_range(self, "sequence_length", 1, MOST_TOKENS)
        if not 0 < self.latency_percentile < 100:
            raise ValueError(f"latency_percentile is {self.latency_percentile}, not between 0 and 100")
        for name in ("latency_limit_ms", "ttft_limit_ms", "tpot_limit_ms", "price_per_hour"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}, not a positive number")


@dataclass(frozen=True)
class Judgement:
    """What decides whether the candidate is good enough."""

    gates: tuple[Gate, ...] = ()
    """All of them must hold."""
    metrics: tuple[str, ...] = ()
    """What to report; default: every metric that fits the task and the labels. python:FILE.py:FUNCTION is one's own."""
    slices: tuple[str, ...] = ()
    """Also report each class (label), and each value of these columns of the evaluation set's file."""
    confidence: float = 0.95
    """Of the intervals."""
    undecided: Literal["fail", "pass"] = "fail"
    """What a gate does when its interval holds the bound."""
    seed: int = 0
    """Of the order in which samples and models are timed."""
    batch_size: int = 32
    """Samples in a call while quality is measured."""
    benchmark: Benchmark = Benchmark()
    """How speed is measured."""
    steps: Literal["auto"] | bool = "auto"
    """Also measure what each pass left, as the bundle is built. auto: from two passes on, of models up to 512 MiB."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence < 1:  # below, an interval is a point, and every gate is decided by chance
            raise ValueError(f"confidence is {self.confidence}: give 0.5 to less than 1, such as 0.95")
        _check_range(self, "seed", 0, 2**128)
        _check_range(self, "batch_size", 1, MOST_BATCH)
        if twice := sorted({name for name in self.slices if self.slices.count(name) > 1}):
            raise ValueError(f"slices: '{twice[0]}' is there twice")


@dataclass(frozen=True)
class Postprocess:
    """What is made of a model's outputs before anyone sees an answer. A task says which fields it takes."""

    top_k: int | None = None
    """Answer with so many classes, the likeliest first; where a sample has several labels, with at most so many."""
    reject_below: float | None = None
    """No answer where the likeliest class has a lower probability (softmax)."""
    threshold: float | None = None
    """Answer with every label whose probability is at least this, of a model that gives several."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG

    def __post_init__(self) -> None:
        if self.top_k is not None:
            _check_range(self, "top_k", 1, MOST_BATCH)
        for name in ("reject_below", "threshold"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ValueError(f"{name} is {value}, not between 0 and 1")

    @property
    def set_fields(self) -> tuple[str, ...]:
        """Return the names of the fields that are set."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not None)


@dataclass(frozen=True)
class RecordedMetric:
    """A metric of the recipe's own, computed by its code when the bundle was built; nothing of that code is here."""

    name: str
    """As gates name it: python:FILE.py:FUNCTION, the file without its folders."""
    sha256: str
    """Of the file that its function stands in."""
    higher_is_better: bool = True
    unit: str = ""
    per_sample: bool = True
    """A value for each sample, whose mean it is; False: one number, and what it is with groups of samples left out.

    evaluation/recorded.npz holds the values in the order of these records, lists `baseline` and `candidate` of arrays
    float64 [N], or [1 + groups] with the number itself first."""


@dataclass(frozen=True)
class BuildScore:
    """How the quality of a candidate was measured that nothing here runs: when it was built."""

    by: str
    """The library and its version: torch 2.13.0."""
    gaps: tuple[str, ...] = ()
    """What the engine computes otherwise than was measured, as sentences: gates on quality are undecided then."""
    not_run: str = ""
    """Why a candidate that is a graph was not run where it was built; "": it was, or it is a checkpoint."""


@dataclass(frozen=True)
class EvaluationSet:
    """The frozen samples and what the baseline said to them; paths are relative to the bundle's folder."""

    n_samples: int
    arrays: str | None
    """evaluation/samples.npz: images, tensors, labels."""
    texts: str | None
    """evaluation/samples.jsonl: one object of texts for each sample."""
    baseline_outputs: str
    """evaluation/baseline_outputs.npz; text-generation: nll (nats, summed) and n_tokens of each sample."""
    digest: str
    """sha256 of the samples' content, whatever file they are stored in."""
    slices: str | None = None
    """evaluation/slices.jsonl: what each sample has in the columns that only slice it, as texts; no model reads it."""
    baseline_metrics: dict[str, float] | None = None
    """What the build measured of the baseline's outputs with the labels; None: bundles of before it did."""


@dataclass(frozen=True)
class FileRecord:
    """What a file of the bundle must be."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that a machine needs to know to run and judge the bundle."""

    format_version: int = FORMAT_VERSION
    """Of this file; a reader refuses another."""
    name: str
    """The recipe's."""
    task: str
    """What the model does: image-classification, text-generation, ..."""
    target: str
    """The runtime that the bundle was made for."""
    class_names: tuple[str, ...] = ()
    """Names of the classes, in the order of the model's outputs."""
    preprocess: dict[str, object]
    """A `runtime.encode.preprocess` spec; `spec_from_dict` reads it."""
    detections: Detections | None = None
    """Of a detector: what its outputs mean."""
    artifacts: tuple[Artifact, ...]
    """The models: "candidate", "baseline", and those for further targets."""
    evaluation: EvaluationSet | None
    """The frozen samples."""
    judgement: Judgement
    """What the recipe's `validate` says: gates, metrics, how speed is measured."""
    postprocess: Postprocess | None = None
    """What is made of the outputs, as a part of the model."""
    recorded: tuple[RecordedMetric, ...] = ()
    """Metrics of the recipe's own."""
    generation: Generation | None = None
    """Of a model that generates text: what generating needs to know."""
    images: PromptImages | None = None
    """Of one that also sees, where its graphs are in the bundle."""
    source_bytes: int | None = None
    """Of the weight files that the model came in, where the bundle holds no baseline to run."""
    score: BuildScore | None = None
    """Where the candidate is a checkpoint that nothing here runs, or the bundle holds no baseline to run beside it."""
    orders: tuple[EngineOrder, ...] = ()
    """Engines that the recipe asks for; those without an artifact of their name are left for `compress compile`."""
    files: dict[str, FileRecord] = field(default_factory=dict)
    """Every file of the bundle but the manifest itself and what validation writes; `write_bundle` fills it."""
    created_by: str
    """"compress" and its version."""
    digest: str = ""
    """sha256 of the manifest without this field; `write_bundle` fills it."""

    @property
    def generates(self) -> bool:
        """Return whether the model writes text, token by token: a decoder."""
        return self.generation is not None

    @property
    def streams(self) -> bool:
        """Return whether a sample is a sequence of calls, each of which hands states on to the next."""
        return any(artifact.states for artifact in self.artifacts)

    @property
    def alone(self) -> bool:
        """Return whether the candidate is run without a baseline beside it, which was too large: torch's sums stand
        for the comparison of the two."""
        names = {artifact.name for artifact in self.artifacts}
        return "baseline" not in names and self.score is not None and self.artifact("candidate").kind != "checkpoint"

    def is_scored(self, backend: str) -> bool:
        """Return whether the candidate's quality on `backend` is what was measured at the build: it is not run there.

        So it is of a checkpoint, and of a graph that its own target alone can run.
        """
        alien = self.score is not None and self.score.not_run != "" and backend != self.target
        return alien or self.candidate_for(backend).is_checkpoint

    def artifact(self, name: str) -> Artifact:
        """Return the artifact called `name`; KeyError if there is none."""
        return {artifact.name: artifact for artifact in self.artifacts}[name]

    def waiting(self) -> tuple[EngineOrder, ...]:
        """Return the orders that no artifact fills yet."""
        built = {artifact.name for artifact in self.artifacts}
        return tuple(order for order in self.orders if order.name not in built)

    def candidate_for(self, backend: str) -> Artifact:
        """Return the compressed model to run on `backend`: its engine, IR, .pte or flavour, else "candidate"."""
        return self._pick_first(
            f"engine-{backend}", f"ir-{backend}", f"pte-{backend}", f"candidate-{backend}", "candidate"
        )

    def graph_for(self, backend: str) -> Artifact:
        """Return the ONNX file that `candidate_for` is, or was made from."""
        chosen = self.candidate_for(backend)
        if chosen.kind in ("openvino", "pte"):
            return self._pick_first(f"candidate-{backend}", "candidate")
        graphs = {order.name: order.graph for order in self.orders}
        return self.artifact(graphs.get(chosen.name, chosen.name))

    def baseline_for(self, backend: str) -> Artifact:
        """Return the float model to run on `backend`; KeyError if there is none."""
        return self._pick_first(f"baseline-{backend}", "baseline")

    def _pick_first(self, *names: str) -> Artifact:
        there = {artifact.name for artifact in self.artifacts}
        return self.artifact(next((name for name in names if name in there), names[-1]))


def fixed_batch(specs: Sequence[TensorSpec]) -> int | None:
    """Return the batch size that a model with these inputs is bound to, if it is."""
    return next((spec.shape[0] for spec in specs if spec.shape and isinstance(spec.shape[0], int)), None)
