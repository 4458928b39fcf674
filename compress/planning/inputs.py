"""Look at a recipe's model and data before anything heavy is loaded: what a plan and a run both stand on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from compress.data.chat import ChatEncoder, perceived_columns
from compress.data.inspect import DataFacts, inspect_data
from compress.data.sight import Sight, UnreadImages, find_sight
from compress.errors import PlanError, SourceError, place_errors
from compress.facts import ModelFacts, SampleShapes
from compress.models.answers import describe_not_followed
from compress.models.detections import read_detections
from compress.models.facts import ModelRun, look_at_model, rebuilt_facts
from compress.models.feeds import feeds_shapes, model_inputs
from compress.models.huggingface import reads_samples_apart
from compress.models.language import tokenizer_folder
from compress.models.meta import open_on_meta
from compress.models.onnx_ends import onnx_io
from compress.models.preprocess import find_class_names, resolve_preprocess
from compress.models.shards import facts_by_names, read_named_model
from compress.models.source import Source, list_weight_files, locate, model_digest
from compress.planning.input_checks import (
    TEXTS_ALONE,
    check_samples,
    check_token_ids,
    check_weights,
    describe_quantized,
    explain_between,
    find_rate_problems,
    make_image_part,
    note_masks,
    note_packing,
    note_unpacked,
    suggest_states,
)
from compress.planning.students import list_students, locate_student, look_at_students
from compress.recipe.exports import GraphExport
from compress.recipe.schema import Recipe
from compress.store.cache import default_root
from compress.store.digests import FileDigests, identify_file
from compress.tasks import find_torch_task
from runtime.encode.chat import IMAGE
from runtime.encode.language import LanguagePreprocess
from runtime.encode.preprocess import PreprocessSpec, Seq2SeqPreprocess


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
    sight: Sight | None = None
    """How images reach a model that also sees, of which a graph is written."""
    image_size: tuple[int, int] | None = None
    """What its images could be brought to, where a runtime cannot read them as they are."""


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
    if find_torch_task(spec.task).perceives and learns and "train" in data and perceived_columns(data["train"].shapes):
        problems.append(f"data.train: {TEXTS_ALONE}")
    shapes = next(iter(data.values())).shapes
    feeds = feeds_shapes(source, preprocess, shapes, names)
    if opened.source.onnx is not None:
        with place_errors("preprocess"):
            make_image_part(preprocess, onnx_io(spec, opened.source.onnx).inputs)
    coupling, blocks = (
        any(getattr(pass_, asks) for pass_ in recipe.passes) for asks in ("uses_coupling", "uses_blocks")
    )
    facts, run = look_at_model(opened, feeds, coupling, blocks)
    if any(perceived_columns(found.shapes) for found in data.values() if find_torch_task(spec.task).perceives):
        problems += explain_between(facts)
    rewritten = any(pass_.stage_on(facts) == "model" for pass_ in recipe.passes)
    if facts.source == "onnx" and (rewritten or learns):
        facts = rebuilt_facts(facts, source, feeds, rewritten, coupling, blocks)
    folder = source.folder
    students = look_at_students(recipe, source, feeds, coupling, blocks)
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
    sight, unread, image_size = _find_sight(recipe, chats)
    problems += unread
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
        sight,
        image_size,
    )


def _read_classless_inputs(recipe: Recipe, source: Source) -> Inputs:
    """Return the inputs of a model that nothing here runs: it reads no samples."""
    facts = facts_by_names(source, read_named_model(source))
    if quantized := describe_quantized(source):
        facts = replace(facts, notes=(*facts.notes, f"{quantized}; they are read as floats, and rounded a second time"))
    names = tuple(spec.name for spec in facts.inputs)
    digest, files = model_digest(source, identify_file), tuple(list_weight_files(source))
    return Inputs(recipe, LanguagePreprocess(), names, {}, {}, facts, digest, source, unread=files)


def _make_chat_encoder(recipe: Recipe, source: Source) -> ChatEncoder | None:
    """Return what encodes conversations for the recipe's model; None where it reads none."""
    spec, task = recipe.model, find_torch_task(recipe.model.task)
    if not task.chats:
        return None
    return ChatEncoder(recipe.chat, source.folder, recipe.root, spec.trust_remote_code, task.perceives)


def _find_sight(recipe: Recipe, chats: ChatEncoder | None) -> tuple[Sight | None, list[str], tuple[int, int] | None]:
    """Return how images reach a model that also sees, where its graph is written.

    Else why a runtime cannot read any, and to what size they could be brought.
    """
    index = next((i for i, export in enumerate(recipe.export) if isinstance(export, GraphExport)), None)
    if chats is None or chats.perceives != IMAGE:
        sized = recipe.chat.image_size is not None
        return None, [f"chat.image_size: {recipe.model.task} reads no images; leave it out"] if sized else [], None
    if index is None:
        return None, [], None
    try:
        return find_sight(chats), [], None
    except UnreadImages as error:
        return None, [f"export.{index}: {problem}" for problem in error.problems], error.size


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
        for student in list_students(recipe)
        if student.key in inputs.students
    }
    digest = model_digest(inputs.source, digest_of)
    return replace(inputs, digest=digest, students=students, unread=unread)


def _list_weight_files(recipe: Recipe, source: Source) -> list[Path]:
    """Return the weight files of the model and of students that have some; those not to be found are told elsewhere."""
    files = list_weight_files(source)
    for student in list_students(recipe):
        with suppress(SourceError):
            files += list_weight_files(locate_student(source, student))
    return list(dict.fromkeys(files))
