"""Look at a recipe's model, students and data before anything heavy is loaded: what a plan and a run both stand on.

A student is a model that `distill` puts in the recipe's own place: looked at for the plan, and made for the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from compress.blocks.experts import unstack_experts
from compress.data.chat import ChatEncoder, are_chats, cut_windows, image_columns, pack_rows
from compress.data.inspect import DataFacts, inspect_data
from compress.data.samples import Samples, load_samples, samples_of
from compress.data.training import pad_rows
from compress.errors import PlanError, SourceError, place_errors
from compress.facts import ModelFacts, Note, SampleShapes
from compress.graph.run import Feeds, open_session, run_batches
from compress.graph.specs import input_specs
from compress.models import huggingface
from compress.models.answers import describe_not_followed
from compress.models.detections import read_detections
from compress.models.facts import ModelRun, look_at_model, model_facts, rebuilt_facts
from compress.models.feeds import feeds_shapes, model_inputs
from compress.models.huggingface import reads_samples_apart
from compress.models.language import read_generation, tokenizer_folder
from compress.models.load import TorchModel, load_torch_model
from compress.models.meta import open_on_meta
from compress.models.onnx_ends import onnx_io
from compress.models.onnx_graph import open_onnx
from compress.models.packed import quantization_of
from compress.models.preprocess import find_class_names, resolve_preprocess
from compress.models.shards import facts_by_names, read_named_model
from compress.models.source import Source, list_weight_files, locate, model_digest
from compress.passes.distill_student import Student
from compress.planning.input_checks import (
    check_samples,
    check_token_ids,
    check_weights,
    explain_between,
    find_rate_problems,
    make_image_part,
    note_masks,
    note_packing,
    note_unpacked,
    suggest_states,
)
from compress.recipe.schema import Recipe
from compress.specs import ModelSpec
from compress.store.cache import default_root
from compress.store.digests import FileDigests, identify_file
from compress.store.durable import blame
from compress.tasks import find_torch_task
from runtime.backends.base import iter_calls
from runtime.backends.onnxruntime_cpu import InferenceSession
from runtime.bundle.columns import Columns, count, take
from runtime.bundle.manifest import Generation, Judgement, fixed_batch
from runtime.bundle.tensors import TensorSpec, has_batch
from runtime.decode.answers import answer_encoder
from runtime.decode.scoring import count_targets, language_encoder
from runtime.encode.language import (
    IDS,
    LOSS_MASK,
    POSITIONS,
    LanguageEncoder,
    LanguagePreprocess,
    make_language_encoder,
)
from runtime.encode.preprocess import (
    PreprocessSpec,
    Seq2SeqPreprocess,
    make_preprocessor,
    split_samples,
)
from runtime.encode.seq2seq import DECODER_IDS
from runtime.errors import UsageError
from runtime.tasks.metrics import METRICS
from runtime.tasks.predict import encoding_views
from runtime.words import suggest

MOST_COUNTED = 512
"""Texts whose tokens a plan counts."""
BYTES_A_TOKEN = 2.0
"""Of a text in its file: four or five in English, with what a batch is padded to."""
IMAGE_BATCH = 32
"""Calibration samples that go through the graph together; texts go one by one, so that none is padded."""
WHOSE_WORDS = "which words of its reference are of which part is not known"
"""Of a sample that is read in several parts."""
NO_IMAGES = "there are images, and passes that train learn from texts alone: leave them out, or calibrate with them"
TEXTS = ("text", "language", "seq2seq")
"""Kinds of preprocessing that make tokens."""


@dataclass(frozen=True)
class Inputs:
    """`data`: set name -> its facts. `feeds`: what the model's inputs are fed with. `digest`: of the model.

    `unread`: weight files, the students' too, whose sha256 is not known yet: `digest` and `students` then rest on
    marks of these files, and name no result (`settle_digests`).
    `source`: the model's own files; `tokenizer`: the folder whose tokenizer is read. `problems`: what is wrong with the
    sets that are not in `data`, and with students. `students`: digests of the models that passes put in this one's
    place, by `Student.key`.
    """

    recipe: Recipe
    preprocess: PreprocessSpec
    names: tuple[str, ...]
    data: dict[str, DataFacts]
    feeds: SampleShapes
    facts: ModelFacts
    digest: str
    source: Source
    tokenizer: Path | None = None
    problems: tuple[str, ...] = ()
    students: Mapping[str, str] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    """Of the classes: the recipe's, or the folder's where the task says nothing without."""
    chats: ChatEncoder | None = None
    """Encodes conversations, of a model that reads them."""
    unread: tuple[Path, ...] = ()
    passed_over: tuple[str, ...] = ()
    """What was not looked at, in words for a sentence."""
    run: ModelRun | None = None
    """Of a torch model, on the meta device."""


def read_inputs(recipe: Recipe, cache: Path | None = None) -> Inputs:
    """Look at the model's shapes and the data's columns; no weight is read. `cache`: where a made tokenizer is kept.

    Digests of models are those of files that were not read: see `settle_digests`.

    Raises SourceError for the model, or when no data set tells the shape of a sample; PlanError without any data.
    """
    root, spec, source = recipe.root, recipe.model, locate(recipe.model, recipe.root)
    if source.kind == "shards":
        return _read_classless_inputs(recipe, source)
    preprocess = resolve_preprocess(source, recipe.preprocess)
    opened = open_on_meta(source)
    unpacked = note_unpacked(opened)
    names = model_inputs(opened)
    class_names = find_class_names(source)
    data, problems, chats = {}, [], _make_chat_encoder(recipe, source)
    for name, declared in recipe.data.declared.items():
        try:
            slices, images = recipe.validate_.slices if name == "evaluation" else (), preprocess.kind == "image"
            about = names, class_names, images, slices, chats, recipe.seed
            data[name] = inspect_data(declared, root, spec.task, *about)
        except SourceError as error:
            problems += [f"data.{name}: {problem}" for problem in error.problems]
    problems += suggest_states(opened, problems)
    if not data and not problems:
        raise PlanError("data: the recipe names no data set; an evaluation set is what the result is judged on")
    if not data:
        raise SourceError(problems)
    problems += find_rate_problems(preprocess, data)
    learns = any(pass_.needs_train for pass_ in recipe.passes)
    if find_torch_task(spec.task).sees and learns and "train" in data and image_columns(data["train"].shapes):
        problems.append(f"data.train: {NO_IMAGES}")
    shapes = next(iter(data.values())).shapes
    feeds = feeds_shapes(source, preprocess, shapes, names)
    if opened.source.onnx is not None:
        with place_errors("preprocess"):
            make_image_part(preprocess, onnx_io(spec, opened.source.onnx).inputs)
    coupling, blocks = (
        any(getattr(pass_, asks) for pass_ in recipe.passes) for asks in ("uses_coupling", "uses_blocks")
    )
    facts, run = look_at_model(opened, feeds, coupling, blocks)
    if any(image_columns(found.shapes) for found in data.values() if find_torch_task(spec.task).sees):
        problems += explain_between(facts)
    rewritten = any(pass_.stage_on(facts) == "model" for pass_ in recipe.passes)
    if facts.source == "onnx" and (rewritten or learns):
        facts = rebuilt_facts(facts, source, feeds, rewritten, coupling, blocks)
    folder = source.folder
    students = _look_at_students(recipe, source, feeds, coupling, blocks)
    tokenizer, notes = tokenizer_folder(source, cache or default_root())
    detections = read_detections(source, facts.outputs)
    notes = [*notes, *unpacked, *note_masks(recipe, data, folder)]
    if isinstance(preprocess, Seq2SeqPreprocess) and folder is not None:
        notes += describe_not_followed(folder)
    apart = any(declared.packing for declared in recipe.data.declared.values()) and reads_samples_apart(opened.module)
    notes += [] if apart else note_packing(recipe)
    facts = replace(
        facts, notes=(*facts.notes, *notes), students=students.facts, detections=detections, reads_apart=apart
    )
    problems += students.problems
    passed_over = check_weights(opened, facts.unread)
    look = partial(check_token_ids, opened.module, spec.task, preprocess, facts.inputs, tokenizer)
    passed_over += check_samples(spec.task, data, facts, look, preprocess, problems)
    return Inputs(
        recipe,
        preprocess,
        names,
        data,
        feeds,
        facts,
        model_digest(source, identify_file),
        source,
        tokenizer,
        tuple(problems),
        students.digests,
        class_names,
        chats,
        tuple(_list_weight_files(recipe, source)),
        tuple(passed_over),
        run,
    )


def _read_classless_inputs(recipe: Recipe, source: Source) -> Inputs:
    """Return the inputs of a model that nothing here runs: it reads no samples."""
    facts = facts_by_names(source, read_named_model(source))
    record = quantization_of(source.folder)
    if record:
        rounded = (
            f"{source.name}: its weights are quantized already ({record.get('quant_method', 'of no known method')})"
        )
        facts = replace(facts, notes=(*facts.notes, f"{rounded}; they are read as floats, and rounded a second time"))
    names = tuple(spec.name for spec in facts.inputs)
    digest, files = model_digest(source, identify_file), tuple(list_weight_files(source))
    return Inputs(recipe, LanguagePreprocess(), names, {}, {}, facts, digest, source, unread=files)


def _make_chat_encoder(recipe: Recipe, source: Source) -> ChatEncoder | None:
    """Return what encodes conversations for the recipe's model; None where it reads none."""
    spec, task = recipe.model, find_torch_task(recipe.model.task)
    if not task.chats:
        return None
    return ChatEncoder(recipe.chat, source.folder, recipe.root, spec.trust_remote_code, task.sees)


def settle_digests(inputs: Inputs, digests: FileDigests, read: bool = False, verify: bool = False) -> Inputs:
    """Return the inputs with the digests of weight files: of large ones only those that are remembered.

    `read`: all of them, read where they must be, and remembered. `verify`: every file is read again, whatever is
    remembered. Raises OSError.
    """
    recipe = inputs.recipe
    files = _list_weight_files(recipe, inputs.source)
    if read or verify:
        digests.read_all(files, verify)
    unread = digests.find_unread(files)

    def digest_of(path: Path) -> str:
        return identify_file(path) if path in unread else digests.look(path)

    students = {
        student.key: model_digest(locate_student(inputs.source, student), digest_of)
        for student in _list_students(recipe)
        if student.key in inputs.students
    }
    digest = model_digest(inputs.source, digest_of)
    return replace(inputs, digest=digest, students=students, unread=unread)


def _list_students(recipe: Recipe) -> list[Student]:
    """Return the models that passes put in the given one's place."""
    found = [pass_.find_student() for pass_ in recipe.passes]
    return [student for student in found if student is not None and student.separate]


def _list_weight_files(recipe: Recipe, source: Source) -> list[Path]:
    """Return the weight files of the model and of students that have some; those not to be found are told elsewhere."""
    files = list_weight_files(source)
    for student in _list_students(recipe):
        with suppress(SourceError):
            files += list_weight_files(locate_student(source, student))
    return list(dict.fromkeys(files))


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
    return samples if not recipe.generates else _check_tokens(samples, name, inputs)


def generation_of(inputs: Inputs) -> Generation | None:
    """Return what generating text needs to know; None for another task, or a source without a folder of its own."""
    if not inputs.recipe.generates or inputs.source.folder is None:
        return None
    vocab_size = inputs.facts.outputs[0].shape[-1]
    assert isinstance(vocab_size, int)
    generation = read_generation(inputs.source.folder, vocab_size)
    if not isinstance(inputs.preprocess, Seq2SeqPreprocess):
        return generation
    target = inputs.preprocess.target
    return replace(generation, context_length=target.most_tokens, eos_token_ids=target.end_tokens)


def count_tokens(inputs: Inputs, name: str) -> tuple[int, int]:
    """Count the tokens of a language model's set, and of its longest text, so that a plan knows the work; else 0, 0.

    The set is read for it. Of more than MOST_COUNTED texts some are counted, and stand for all.
    """
    if name not in inputs.data or not inputs.recipe.generates:
        return 0, 0
    samples = load_set(inputs, name, None)
    feeds = Batches(samples, inputs, inputs.facts.inputs)
    counted = feeds[:: -(-len(feeds) // MOST_COUNTED)]
    if isinstance(inputs.preprocess, Seq2SeqPreprocess):
        lengths = [batch[DECODER_IDS].size + batch.get("input_ids", np.empty(0)).size for batch in counted]
    else:
        lengths = [len(each["input_ids"][0]) for each in counted]
    return sum(lengths) * len(feeds) // max(len(counted), 1), max(lengths, default=0)


def text_fill(inputs: Inputs, name: str) -> float:
    """Estimate how long a text of a set is in a batch, as a part of `max_length`: told by its file's size; else 1."""
    data, longest = inputs.data.get(name), getattr(inputs.preprocess, "max_length", None)
    if data is None or longest is None:
        return 1.0
    return min(data.n_bytes / max(data.n_rows, 1) / BYTES_A_TOKEN / longest, 1.0)


def _check_tokens(samples: Samples, name: str, inputs: Inputs) -> Samples:
    """Return texts as they are, or packed where the recipe says so.

    Raises SourceError for tokens that the model does not know, and where none counts.
    """
    vocab_size = inputs.facts.outputs[0].shape[-1]
    assert isinstance(vocab_size, int)
    if isinstance(inputs.preprocess, Seq2SeqPreprocess):
        encoded = answer_encoder(
            make_preprocessor(inputs.preprocess, inputs.facts.inputs, inputs.tokenizer, vocab_size)
        )
        with place_errors(f"data.{name}"):
            encoded.references(samples.columns)
            split = split_samples(encoded, samples.columns)
        if name == "evaluation" and (split.rows_each > 1).all():
            _refuse_token_metrics(inputs.recipe.validate_)
        return samples
    assert isinstance(inputs.preprocess, LanguagePreprocess)
    encoder = make_language_encoder(inputs.preprocess, inputs.facts.inputs, inputs.tokenizer, vocab_size)
    with place_errors(f"data.{name}"):
        _check_seen(samples.columns, name, inputs)
        columns = _pack_samples(encoder, samples.columns, name, inputs)
        sequences, masks = encoder.sequences(columns), encoder.loss_masks(columns)
        if max(map(len, sequences)) < 2:
            raise UsageError("no text has two tokens: there is nothing to predict")
        if name != "calibration" and not count_targets(sequences, masks).any():
            raise UsageError(
                f"the assistant says nothing in the first {inputs.preprocess.max_length} tokens of any conversation: "
                "give others, a larger preprocess.max_length, or chat.loss_on: all"
            )
    return samples if columns is samples.columns else samples_of(dict(columns))


def _check_seen(columns: Columns, name: str, inputs: Inputs) -> None:
    """Raise UsageError for images where only texts can be, and for a conversation that would be cut with them."""
    if not (seen := image_columns(columns)):
        return
    spec = inputs.preprocess
    assert isinstance(spec, LanguagePreprocess)
    if name == "train" and any(pass_.needs_train for pass_ in inputs.recipe.passes):
        raise UsageError(NO_IMAGES)
    if spec.pack is not None or inputs.recipe.data.declared[name].packing:
        raise UsageError("samples with images cannot share a row: leave out packing, and preprocess.pack")
    for row, ids in enumerate(columns[IDS]):
        if len(ids) > spec.max_length and any(np.size(column[row]) for column in seen.values()):
            raise UsageError(
                f"sample {row} has {len(ids)} tokens with those of its images, more than preprocess.max_length "
                f"({spec.max_length}): raise that, or give smaller images"
            )


def _pack_samples(encoder: LanguageEncoder, columns: Columns, name: str, inputs: Inputs) -> Columns:
    """Return windows of all samples joined (`preprocess.pack`), rows of several (the set's `packing`), or the samples.

    Conversations are token ids already, which both join as they join texts; what counts of them stays what it was.
    """
    chats = are_chats(inputs.data[name].columns)
    if encoder.spec.pack is not None and chats:
        whole = columns[IDS]
        return cut_windows(whole, columns.get(LOSS_MASK) or _mark_all(whole), encoder.spec.pack)
    if encoder.spec.pack is not None or not inputs.recipe.data.declared[name].packing:
        return encoder.samples(columns)
    sequences = encoder.sequences(columns)
    generation = None if chats else generation_of(inputs)  # a template ends what it writes itself
    ends = generation.eos_token_ids if generation is not None else ()
    masks = encoder.loss_masks(columns) or _mark_all(sequences)
    return pack_rows(sequences, masks, encoder.spec.max_length, ends[0] if ends else None)


def _mark_all(sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.ones(len(ids), np.uint8) for ids in sequences]


def _refuse_token_metrics(judgement: Judgement) -> None:
    """Raise SourceError for metrics of a reference's tokens, where no evaluation sample is read in one part."""
    wanted = dict.fromkeys((*judgement.metrics, *(gate.metric for gate in judgement.gates)))
    of_tokens = [name for name in wanted if name in METRICS and METRICS[name].shape == "tokens"]
    if of_tokens:
        raise SourceError(
            f"validate: {', '.join(of_tokens)}: all samples of data.evaluation are longer than the model reads at "
            f"once, and of such a sample {WHOSE_WORDS}; judge the texts (wer, cer, chrf), or add shorter samples"
        )


def leave_out_unlearnable(samples: Samples, inputs: Inputs) -> tuple[Samples, Note | None]:
    """Return the samples of the training set that can be learned from, and a note of those that are left out.

    An encoder-decoder learns a reference along what it belongs to: a sample that is read in several parts has none for
    each. Of a conversation the assistant's part is learned, which may be none. SourceError where all are such.
    """
    if LOSS_MASK in samples.columns:
        return _leave_out_silent(samples, inputs)
    if not isinstance(inputs.preprocess, Seq2SeqPreprocess):
        return samples, None
    encoder = make_preprocessor(inputs.preprocess, inputs.facts.inputs, inputs.tokenizer)
    kept = np.flatnonzero(split_samples(encoder, samples.columns).rows_each == 1)
    if len(kept) == samples.n:
        return samples, None
    text = (
        f"data.train: {samples.n - len(kept)} of {samples.n} samples are longer than the model reads at once and are "
        f"not learned from: {WHOSE_WORDS}"
    )
    if not len(kept):
        raise SourceError(f"{text}; cut them, with their references")
    columns = {name: take(samples.columns, name, kept) for name in samples.columns}
    return samples_of(columns), Note("warning", text)


def _leave_out_silent(samples: Samples, inputs: Inputs) -> tuple[Samples, Note | None]:
    """Return the conversations in whose first `max_length` tokens the assistant speaks, and a note of the others."""
    encoder = language_encoder(make_preprocessor(inputs.preprocess, inputs.facts.inputs, inputs.tokenizer))
    counted = count_targets(encoder.sequences(samples.columns), encoder.loss_masks(samples.columns))
    kept = np.flatnonzero(counted)
    if len(kept) == samples.n:
        return samples, None
    text = (
        f"data.train: in {samples.n - len(kept)} of {samples.n} conversations the assistant says nothing within "
        "max_length, and they are not learned from"
    )
    return samples_of({name: take(samples.columns, name, kept) for name in samples.columns}), Note("warning", text)


def describe_counted(samples: Samples, name: str, inputs: Inputs) -> Note | None:
    """Return a note of how many of a set's tokens are the assistant's, and count; None where all tokens do."""
    chats = find_torch_task(inputs.recipe.model.task).chats and are_chats(inputs.data[name].columns)
    if not chats or inputs.recipe.chat.loss_on == "all":
        return None
    encoder = language_encoder(make_preprocessor(inputs.preprocess, inputs.facts.inputs, inputs.tokenizer))
    sequences = encoder.sequences(samples.columns)
    counted = count_targets(sequences, encoder.loss_masks(samples.columns))
    text = (
        f"data.{name}: {counted.sum()} of {count_targets(sequences, None).sum()} predicted tokens are the assistant's, "
        "and these alone count"
    )
    return Note("info", text)


class Batches(Sequence[Feeds]):
    """Encoded batches of a sample set, made when they are asked for, so that a large set is never held encoded.

    Of a model with states: its single calls, sequence after sequence, with the states that the float model gives.
    `apart`: of rows that hold several samples, with the positions by which a torch model reads these apart. Of samples
    with images, one in each batch, with what the model's processor made of these.
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
        self.seen = tuple(image_columns(self.views[0])) if find_torch_task(task).sees else ()
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
    """Return a batch of two samples where the batch is free, so that the exporter takes no size of 1 for a constant."""
    if fixed_batch(specs) is None and len(next(iter(feeds.values()))) < 2:
        return {name: np.concatenate([values, values]) for name, values in feeds.items()}
    return feeds


@dataclass(frozen=True)
class Students:
    """By `Student.key`: facts and digests of those that a recipe's passes build anew; and what is wrong with others."""

    facts: dict[str, ModelFacts] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def _look_at_students(recipe: Recipe, source: Source, feeds: SampleShapes, coupling: bool, blocks: bool) -> Students:
    """Look at all students of a recipe; no weight is read. `feeds`, `coupling`, `blocks`: as for `model_facts`."""
    students = Students()
    for number, pass_ in enumerate(recipe.passes):
        student = pass_.find_student()
        if student is None or not student.separate:
            continue
        try:
            its = locate_student(source, student)
            changed = replace(its, config=_collect_changes(its, student))
            students.facts[student.key] = model_facts(changed, feeds, coupling, blocks)
            students.digests[student.key] = model_digest(its, identify_file)
        except SourceError as error:
            students.problems.extend(f"passes.{number}: distill: {problem}" for problem in error.problems)
    return students


def locate_student(source: Source, student: Student) -> Source:
    """Return where the student comes from; `source`: the recipe's own model. SourceError if it is not there."""
    if student.source is None:
        return source
    changes = {"source": student.source, "weights": student.weights, "args": student.args, "revision": None}
    return locate(source.spec.model_copy(update=changes), source.root)


def locate_result(inputs: Inputs) -> Source:
    """Return the model whose code the result has: the last that a pass puts in the place of the recipe's own."""
    source = inputs.source
    for pass_ in inputs.recipe.passes:
        if (student := pass_.find_student()) is not None:
            source = locate_student(source, student)
    return source


def make_student(inputs: Inputs, loaded: TorchModel, student: Student, seed: int) -> TorchModel:
    """Build the student that takes the place of `loaded`, with its own weights.

    Given by its configuration, or where its source has none, it gets those of a seed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if not student.config:
            return load_torch_model(locate_student(inputs.source, student), inputs.feeds)
        source = replace(inputs.source, config=_collect_changes(inputs.source, student))
        module = huggingface.build_untrained(source).float().eval().requires_grad_(False)
    unstack_experts(module)
    return replace(loaded, module=module)


def _collect_changes(source: Source, student: Student) -> dict[str, Any]:
    """Return the values that the student's config.json changes; lists with one entry a block follow their number."""
    if not student.config:
        return {}
    if source.kind != "huggingface" or source.shapes is not None:
        lacks = "has no config.json" if source.shapes is None else "has sizes that its config.json does not say"
        raise SourceError(f"student: config: {source.name} {lacks}; give the student as a source of its own")
    known = huggingface.load_config(source).to_dict()
    changes: dict[str, Any] = {}
    for key, value in student.config.items():
        if type(known.get(key)) is not int:
            raise SourceError(_explain_unknown(source.spec, key, known))
        lists = {k: v for k, v in known.items() if isinstance(v, list) and len(v) == known[key]}
        if "layer" in key:
            changes |= {k: [v[i] for i in student.starts(known[key], value)] for k, v in lists.items()}
        changes[key] = value
    return changes


def _explain_unknown(spec: ModelSpec, key: str, known: dict[str, Any]) -> str:
    numbers = [name for name, value in known.items() if type(value) is int]
    hint = suggest(key, numbers)
    return f"student: config: {spec.source} has no number '{key}' in its config.json{hint}"
