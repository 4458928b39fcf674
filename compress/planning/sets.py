"""The sets of a recipe's data: their samples loaded, encoded in batches, and how much there is to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from compress.data.chat import perceived_columns
from compress.data.samples import Samples, load_samples
from compress.data.training import n_rows, pad_rows
from compress.errors import SourceError
from compress.graph.run import Feeds, open_session, run_batches
from compress.graph.specs import input_specs
from compress.models.onnx_graph import open_onnx
from compress.planning.inputs import Inputs
from compress.planning.tokens import CHECKS
from compress.store.durable import blame
from compress.tasks import find_torch_task
from runtime.backends.base import iter_calls
from runtime.backends.onnxruntime_cpu import InferenceSession
from runtime.bundle.columns import count, take
from runtime.bundle.manifest import fixed_batch
from runtime.bundle.tensors import TensorSpec, has_batch
from runtime.decode.scoring import language_encoder
from runtime.encode.language import LOSS_MASK, POSITIONS
from runtime.encode.preprocess import make_preprocessor, split_samples
from runtime.encode.seq2seq import DECODER_IDS
from runtime.tasks.predict import encoding_views

TOKEN_BYTES = 4.5
"""Of a file of texts: 4.56 of WikiText-2 by the tokenizer of Qwen2.5."""
MOST_COUNTED = 512
"""Texts whose tokens a plan counts."""
IMAGE_BATCH = 32
"""Calibration samples that go through the graph together; texts go one by one, so that none is padded."""
TEXTS = ("text", "language", "seq2seq")
"""Kinds of preprocessing that make tokens."""


def load_set(inputs: Inputs, name: str, n_classes: int | None) -> Samples:
    """Load the samples of a set that the recipe declares. Raises SourceError."""
    recipe = inputs.recipe
    spec = recipe.data.declared[name]
    task, class_names = recipe.model.task, inputs.class_names
    slices, sets = (recipe.validate_.slices, recipe.data.evaluation_names) if name == "evaluation" else ((), ())
    with blame(recipe.root, SourceError):
        images = inputs.preprocess.kind == "image"
        about = recipe.seed, n_classes, class_names, images, slices, sets, inputs.chats
        samples = load_samples(spec, recipe.root, task, inputs.names, *about)
    check = CHECKS.get(inputs.preprocess.kind)
    return samples if check is None else check(samples, name, inputs)


def count_tokens(inputs: Inputs, name: str) -> tuple[int, int]:
    """Count the tokens of a language model's set, and of its longest text, so that a plan knows the work; else 0, 0.

    The set is read for it. Of more than MOST_COUNTED texts some are counted, and stand for all.
    """
    if name not in inputs.data or inputs.preprocess.kind not in CHECKS:
        return 0, 0
    samples = load_set(inputs, name, None)
    feeds = Batches(samples, inputs, inputs.facts.inputs)
    counted = feeds[:: -(-len(feeds) // MOST_COUNTED)]
    lengths = [sum(batch[name].size for name in ("input_ids", DECODER_IDS) if name in batch) for batch in counted]
    return sum(lengths) * len(feeds) // max(len(counted), 1), max(lengths, default=0)


def text_fill(inputs: Inputs, name: str) -> float:
    """Estimate how long a text of a set is in a batch, as a part of `max_length`: told by its file's size; else 1."""
    data, longest = inputs.data.get(name), getattr(inputs.preprocess, "max_length", None)
    if data is None or longest is None:
        return 1.0
    # 2 bytes of the file a token: four or five in English, with what a batch is padded to
    return min(data.n_bytes / max(data.n_rows, 1) / 2.0 / longest, 1.0)


def measure_training(inputs: Inputs) -> tuple[int, float]:
    """Return how many rows the training set gives, and how long they are, as a part of the longest; without one 0, 1.

    Rows of joined texts are full; how many they are is told by the file's size.
    """
    data, declared = inputs.data.get("train"), inputs.recipe.data.train
    if data is None or declared is None:
        return 0, 1.0
    window = getattr(inputs.preprocess, "pack", None)
    window = getattr(inputs.preprocess, "max_length", None) if declared.packing else window
    if window is None:
        return n_rows(inputs.recipe.model.task, data.n_samples, data.columns), text_fill(inputs, "train")
    taken = data.n_bytes * data.n_samples / max(data.n_rows, 1)
    return max(round(taken / TOKEN_BYTES / window), 1), 1.0


class Batches(Sequence[Feeds]):
    """Encoded batches of a sample set, made when they are asked for, so that a large set is never held encoded.

    Of a model with states: its single calls, sequence after sequence, with the states that the float model gives.
    `apart`: of rows that hold several samples, with the positions by which a torch model reads these apart. Of samples
    with images or sounds, one in each batch, with what the model's processor made of these.
    """

    def __init__(
        self,
        samples: Samples,
        inputs: Inputs,
        specs: tuple[TensorSpec, ...],
        size: int | None = None,
        apart: bool = False,
    ) -> None:
        self.apart = apart and POSITIONS in samples.columns
        self.preprocessor = make_preprocessor(inputs.preprocess, specs, inputs.tokenizer)
        task = inputs.recipe.model.task
        views = encoding_views(task, samples.columns)
        self.views = [split_samples(self.preprocessor, view).columns for view in views]
        self.seen = tuple(perceived_columns(self.views[0])) if find_torch_task(task).perceives else ()
        fixed = fixed_batch(specs)
        self.size = size or fixed or (1 if inputs.preprocess.kind in TEXTS else IMAGE_BATCH)
        n = count(self.views[0])
        starts = range(0, n - n % self.size if fixed else n, self.size)
        self.rows = [(view, np.arange(start, min(start + self.size, n))) for view in self.views for start in starts]
        self.calls = _FloatCalls(inputs, self._encode) if inputs.facts.states else None

    @property
    def loss_masks(self) -> list[np.ndarray] | None:
        """Return which tokens of each text count as predicted, bool [t] each; None: all, or these are no texts."""
        if LOSS_MASK not in self.views[0] or self.preprocessor.spec.kind != "language":
            return None
        return language_encoder(self.preprocessor).loss_masks(self.views[0])

    def __len__(self) -> int:
        return len(self.rows) * (1 if self.calls is None else self.calls.n_steps)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._encode(index) if self.calls is None else self.calls.make(*divmod(index, self.calls.n_steps))

    def _encode(self, index: int) -> Feeds:
        view, rows = self.rows[index]
        feeds = self.preprocessor.encode(view, rows)
        if self.seen:
            several = {name: [np.asarray(values) for values in take(view, name, rows)] for name in self.seen}
            arrays = {name: [values for values in held if values.size] for name, held in several.items()}
            feeds |= {name: np.concatenate(held) for name, held in arrays.items() if held}
        return feeds | {POSITIONS: pad_rows(take(view, POSITIONS, rows))} if self.apart else feeds

    def __iter__(self) -> Iterator[Feeds]:
        return (self[i] for i in range(len(self)))


class _FloatCalls:
    """What the float model of an ONNX file reads in each call of a sequence. `encode`: number -> the whole sequence."""

    def __init__(self, inputs: Inputs, encode: Callable[[int], Feeds]) -> None:
        self.inputs, self.encode = inputs, encode
        self.last: tuple[int, list[Feeds]] = -1, []

    @cached_property
    def n_steps(self) -> int:
        return int(next(iter(self.encode(0).values())).shape[1])

    @cached_property
    def graph(self) -> ir.Model:
        source = self.inputs.source
        assert source.onnx is not None
        model = open_onnx(source.onnx, source.spec.inputs).model
        ir.external_data.load_to_model(model)
        return model

    @cached_property
    def session(self) -> InferenceSession:
        return open_session(self.graph)

    def make(self, number: int, step: int) -> Feeds:
        """Return what call number `step` of a sequence reads; the calls of the last sequence are kept."""
        if self.last[0] != number:
            batched = {spec.name: has_batch(spec) for spec in input_specs(self.graph)}

            def run(feeds: Feeds) -> Feeds:
                return next(run_batches(self.session, [feeds]))

            calls = iter_calls(run, batched, self.inputs.facts.states, self.encode(number))
            self.last = number, [given for given, _ in calls]
        return self.last[1][step]


def example_feeds(feeds: Feeds, specs: Sequence[TensorSpec]) -> Feeds:
    """Return a batch of two samples where the batch is free, so that the exporter takes no size of 1 for a constant.

    Two of any number: a set of fewer samples, whose first batch is smaller, is then exported the same.
    """
    if fixed_batch(specs) is not None:
        return feeds
    n = len(next(iter(feeds.values())))
    alone = n < 2
    return {name: np.concatenate([values, values]) if alone else values[:2] for name, values in feeds.items()}
