"""Make a plan of a recipe and the facts about its model and data: what will be done, and whether it can work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from compress.blocks.device import choose_device, describe_device
from compress.blocks.experts import unstack_experts
from compress.blocks.materialise import copy_without_weights, tied_names
from compress.blocks.sizes import shapes_of, transformers_config
from compress.data.chat import are_chats
from compress.distill.schedule import MEASURED_BYTES
from compress.errors import CompressError, ExportError, NotExportable, PlanError, SourceError
from compress.export.checkpoint_rules import checkpoint_notes, checkpoint_problems, find_tied_problems, scoring_gaps
from compress.export.decoder import find_states
from compress.export.gguf import describe_gguf
from compress.facts import ModelFacts, Note, PassPlan, sample_bytes
from compress.formats.schemes import Scheme
from compress.formats.targets import TARGETS
from compress.graph.cleanup import describe_clean_up
from compress.models.factory import USER_ERRORS
from compress.models.facts import ModelRun
from compress.models.language import has_chat_template
from compress.models.meta import module_on_meta
from compress.passes import Pass
from compress.planning.cache_keys import CacheKeys, cache_keys
from compress.planning.durations import EITHER_WAY, Durations
from compress.planning.forecast import BASELINE, EXPORT, JUDGING, Forecast, Volumes, find_timed_batch, forecast
from compress.planning.gates import foresee_gates
from compress.planning.importance import check_importance
from compress.planning.in_files import note_missing_float, note_narrow_source, stays_in_files
from compress.planning.inputs import Inputs, read_inputs, settle_digests
from compress.planning.judging import is_scored_by_torch, runs_once
from compress.planning.latency import forecast_latency
from compress.planning.measurements import measurement_note, pass_names
from compress.planning.plan import Plan, PlannedWork
from compress.planning.sets import IMAGE_BATCH, TEXTS, count_tokens, measure_training
from compress.planning.students import locate_result
from compress.planning.validation import collect_problems, engine_notes, order_problems, quantized_problems
from compress.pruning.configuration import fit_config
from compress.pruning.shrink import remove_all
from compress.pruning.surgery import remove
from compress.recipe.exports import CheckpointExport, GgufExport, GraphExport
from compress.recipe.network import restrict_network
from compress.recipe.schema import Recipe
from compress.store.cache import ResultCache, default_root
from compress.store.digests import FileDigests
from compress.store.durable import blame
from compress.tasks import find_torch_task
from compress.timing.kept import Kept
from compress.work import WORK, find_work
from runtime.backends import BACKENDS
from runtime.bundle.format import Judgement
from runtime.bundle.manifest import fixed_batch
from runtime.encode.language import LanguagePreprocess
from runtime.judge.evidence import count_least_samples
from runtime.measure.benchmark import count_least_processes, explain_unavailable
from runtime.metrics import MEASURED, SIZES
from runtime.processes.memory import available_bytes
from runtime.tasks.metrics import METRICS
from runtime.words import size_text

TO_BE_FOUND = "goal: the passes that reach it are yet to be found: `compress sweep RECIPE --out DIR` does that"
AS_WRITTEN = "search: this is of the values that stand in the recipe; `compress sweep` tries the others"
Schemes = dict[str, Scheme]
"""Layer -> how a checkpoint stores it."""


def make_plan(
    recipe: Recipe,
    cache: Path | None = None,
    twins: bool = True,
    log: Callable[[str], None] | None = None,
    verify: bool = False,
    timed: bool = True,
) -> Plan:
    """Check that the recipe can work and say how. Loads no weights, and no network but for a recipe that names the hub.

    Its forecast of speed is measured, which takes seconds the first time; `twins`: also where a torch model has to be
    built and exported for it; `timed`: whether it is measured at all. `log`: told what is measured; None: stderr.
    `verify`: the weight files are read after all, for their digests.
    Raises PlanError with all problems at once (naming layers), SourceError for a model, or data, that cannot be read.
    """
    restrict_network(recipe)
    told = [AS_WRITTEN] if recipe.search is not None else [TO_BE_FOUND] if recipe.seeks_passes else []
    recipe = _settle_goal(recipe.model_copy(update={"search": None}))
    _check_work(recipe)
    store = ResultCache(cache or default_root())
    store.refuse_file()
    with blame(recipe.root, SourceError):
        inputs = read_inputs(recipe, store.root)
        inputs = settle_digests(inputs, FileDigests(store.root))
        keys = cache_keys(inputs)
    before = inputs.facts
    done, problems, schemes = _plan_passes(inputs, keys, store)
    after = done[-1].plan.facts if done else before
    n_trained, filled = measure_training(inputs)
    samples = {name: found.n_samples for name, found in inputs.data.items()} | {"train": n_trained}
    batch = 1 if inputs.preprocess.kind in TEXTS else fixed_batch(before.inputs) or IMAGE_BATCH
    (tokens, _), (scored, longest) = (count_tokens(inputs, name) for name in ("calibration", "evaluation"))
    decisions = [planned.work.decisions for planned in done]
    n_unread = sum(path.stat().st_size for path in inputs.unread)
    held = sum(found.n_samples * sample_bytes(found.shapes) for found in inputs.data.values())
    volumes = Volumes(samples, batch, tokens, scored, longest, filled, n_unread, held)
    about = (recipe, before, after, volumes, decisions, find_timed_batch(inputs), find_durations(recipe, store.root))
    found = [before, *(planned.plan.facts for planned in done)][: len(done)]
    expected = forecast(*about, found=found)
    checkpoints = [_check_checkpoint(inputs, index, schemes, done) for index in range(len(recipe.export))]
    checkpoints.append(_check_gguf(inputs, schemes))
    checkpoints += [check_importance(inputs, index, planned.plan) for index, planned in enumerate(done)]
    packed = quantized_problems(recipe, before)  # no pass finds a layer then, which is no second fault
    misplaced = {text.partition(": ")[0] for text in order_problems(recipe.passes, before)}  # told of that alone
    others = [] if packed else [text for text in problems if text.partition(": ")[0] not in misplaced]
    problems = [*inputs.problems, *packed, *collect_problems(inputs, expected, store.root), *others]
    if not problems:  # of a layer that a pass cannot take its checkpoint needs no word
        problems = [problem for found, _ in checkpoints for problem in found]
    if not problems:
        problems = _check_decoder(inputs, keys, done, store.root)
    if problems:
        raise PlanError(problems)
    cleaned = (Note("info", describe_clean_up(before.clean_up)),) if before.clean_up else ()
    first = [
        PlannedWork(name, key, store.has(key), before.n_bytes, before.n_bytes, notes=notes)
        for name, key, notes in zip(
            (EXPORT, BASELINE), _list_first_keys(recipe, before, keys), (cleaned, ()), strict=True
        )
    ]
    work = (*first, *(planned.work for planned in done))
    unsaid = _warn_unsaid_sizes(inputs, done)
    notes = (
        *(Note("info", text) for text in told),
        *_collect_notes(inputs),
        *_note_unread(inputs),
        *_note_passed_over(inputs),
        *(note for _, found in checkpoints for note in found),
        *unsaid,
    )
    runs = timed and not before.classless
    latency, of_speed = forecast_latency(inputs, keys, store.root, twins, log) if runs else (None, [])
    if latency is not None and not latency.blocks:  # of a few blocks nothing follows about memory
        expected = forecast(*about, latency, found)
    device = describe_device(choose_device(recipe.device)) if recipe.passes else ""
    of_gates = foresee_gates(recipe, before, after, latency) if recipe.passes else []
    notes = (
        *notes,
        *of_speed,
        *of_gates,
        *_warn_of_memory(inputs, expected, work),
        *_note_short_courses(inputs, expected),
    )
    made = Plan(recipe, inputs, work, keys, before, after, notes, expected, latency, device)
    return settle_keys(made, store, verify=True) if verify else made


def find_durations(recipe: Recipe, root: Path) -> Durations:
    """Return what stages took on this machine, with the threads and on the device that a run has."""
    return Durations(Kept(root), torch.get_num_threads(), recipe.device)


def _settle_goal(recipe: Recipe) -> Recipe:
    """Return the recipe with the gates of its goal in the goal's place."""
    gates = (*recipe.validate_.gates, *recipe.goal_gates)
    return recipe.model_copy(update={"goal": (), "validate_": replace(recipe.validate_, gates=gates)})


def settle_keys(plan: Plan, cache: ResultCache, verify: bool = False) -> Plan:
    """Return the plan with the keys of its results, once the weight files have been read whose digest is not known.

    `verify`: all weight files are read again. See `compress.store.digests`. Raises SourceError for a file that cannot
    be read.
    """
    with blame(plan.recipe.root, SourceError):
        inputs = settle_digests(plan.inputs, FileDigests(cache.root), read=True, verify=verify)
    keys = cache_keys(inputs)
    first = _list_first_keys(plan.recipe, plan.before, keys)
    work = [
        replace(work, key=key, cached=cache.has(key))
        for work, key in zip(plan.steps, (*first, *keys.passes), strict=True)
    ]
    notes = tuple(note for note in plan.notes if note not in _note_unread(plan.inputs))
    return replace(plan, inputs=inputs, keys=keys, steps=tuple(work), notes=notes)


def _list_first_keys(recipe: Recipe, facts: ModelFacts, keys: CacheKeys) -> tuple[str, str]:
    """Return the keys of what comes before all passes: the float graph, and the baseline's outputs."""
    if runs_once(recipe, facts):
        return keys.float_graph, keys.beside
    return keys.float_graph, keys.torch_outputs if stays_in_files(recipe, facts) else keys.baseline


def _note_unread(inputs: Inputs) -> list[Note]:
    """Say that weights have not been read, so that what the cache has of them is not known yet."""
    n_bytes = sum(path.stat().st_size for path in inputs.unread)
    # what is smaller is read in less than a second
    if n_bytes < 2**30:
        return []
    text = f"no digest of the weights ({size_text(n_bytes)}) is known yet: apply reads them once, and then knows"
    return [Note("info", f"{text} what the cache holds of them")]


def _note_passed_over(inputs: Inputs) -> list[Note]:
    """Say what the plan did not look at, and apply may refuse."""
    return [Note("info", f"not looked at before apply: {', '.join(inputs.passed_over)}")] if inputs.passed_over else []


@dataclass(frozen=True)
class _Done:
    """A pass that has been planned: its row, and what it promises."""

    work: PlannedWork
    plan: PassPlan


def _plan_passes(inputs: Inputs, keys: CacheKeys, store: ResultCache) -> tuple[list[_Done], list[str], Schemes]:
    """Check each pass on the facts that the one before it leaves.

    Returns the passes, the problems of all, and how layers are stored.
    """
    recipe, facts = inputs.recipe, inputs.facts
    done, problems = [], []
    schemes: Schemes = {}
    for index, (pass_, key) in enumerate(zip(recipe.passes, keys.passes, strict=True)):
        plan = pass_.check(facts, TARGETS[recipe.target])
        problems += [f"passes.{index}: {problem}" for problem in plan.problems]
        sizes = facts.n_bytes, plan.facts.n_bytes
        notes = (*plan.notes, *_train_notes(pass_, inputs))
        done.append(_Done(PlannedWork(pass_.kind, key, store.has(key), *sizes, plan.decisions, notes), plan))
        facts = plan.facts
        schemes |= plan.schemes
    return done, problems, schemes


def _train_notes(pass_: Pass, inputs: Inputs) -> list[Note]:
    """Return what the plan says of learning, once the training set is known."""
    n, _ = measure_training(inputs)
    return pass_.train_notes(inputs.facts, n) if n and pass_.needs_train else []


def _check_checkpoint(
    inputs: Inputs, index: int, schemes: Schemes, done: Sequence[_Done]
) -> tuple[list[str], list[Note]]:
    """Return why the export of that number, if a checkpoint, cannot be written or loaded, and notes on it."""
    recipe, export = inputs.recipe, inputs.recipe.export[index]
    if not isinstance(export, CheckpointExport) or inputs.facts.source == "onnx":
        return [], []
    kv_cache = next((each.plan.kv_cache for each in done if each.plan.kv_cache), None)
    engine = recipe.target_of(export)
    about = (inputs.facts, schemes, export, engine, kv_cache)
    notes = checkpoint_notes(*about)
    if not recipe.has_onnx:
        gaps = scoring_gaps(inputs.facts.structure, kv_cache, engine)
        notes += [Note("warning", f"{gap}: gates on quality stay undecided") for gap in gaps]
    elif kv_cache is not None:
        notes.append(
            Note(
                "info",
                f"the ONNX graph is judged, with its own cache; how {engine} rounds the "
                "checkpoint's keys and values is not scored",
            )
        )
    return [f"export.{index}: {problem}" for problem in checkpoint_problems(*about)], notes


def _check_decoder(inputs: Inputs, keys: CacheKeys, done: Sequence[_Done], root: Path) -> list[str]:
    """Return why no graph of a language model can be made, or none for a target: its code is run by shapes alone."""
    recipe = inputs.recipe
    graphs = [(index, recipe.target_of(e)) for index, e in enumerate(recipe.export) if isinstance(e, GraphExport)]
    if not graphs or not recipe.model.decoder_only or inputs.facts.source == "onnx":
        return []
    keep, key = Kept(root), [keys.made_of[keys.float_graph]]
    known = keep.read("decoder", key)
    if known is None:
        assert inputs.run is not None
        module = copy_without_weights(inputs.run.module)
        try:
            cache = find_states(getattr(module, "wrapped", module), sight=inputs.sight)
        except NotExportable as error:
            return [f"export.{graphs[0][0]}: {problem}" for problem in error.problems]
        except (CompressError, *USER_ERRORS):
            return []  # its code looks at values, which the export has
        known = {"recurrent": cache.recurrent, "fixed": cache.find_fixed(), "unlike": cache.find_unlike()}
        keep.write("decoder", key, known)
    problems = []
    if known["unlike"] and (index := next((i for i, each in enumerate(done) if each.plan.kv_cache), None)) is not None:
        text = "an ONNX graph keeps 8-bit keys and values where all layers keep them alike"
        problems.append(f"passes.{index}: kv_cache: {text}, and {known['unlike']}; leave it out")
    for index, target in graphs:
        if known["recurrent"] and not target.startswith("onnxruntime"):
            text = f"its recurrence is written as an operator of ONNX Runtime, which {target} does not have"
            problems.append(f"export.{index}: {text}; use target: onnxruntime-cpu, or target: transformers")
        elif known["fixed"] and target.startswith("tensorrt"):
            text = f"{known['fixed']} is zeros before each text, and an engine's memory is not"
            problems.append(f"export.{index}: {text}; use target: onnxruntime-cpu, or target: transformers")
    return problems


def _check_gguf(inputs: Inputs, schemes: Schemes) -> tuple[list[str], list[Note]]:
    """Return why a GGUF file cannot be written of the model, and notes on it; nothing where none is asked for."""
    recipe = inputs.recipe
    index, export = next(((i, e) for i, e in enumerate(recipe.export) if isinstance(e, GgufExport)), (0, None))
    if export is None or inputs.facts.source == "onnx" or export.kind not in find_torch_task(recipe.model.task).files:
        return [], []
    source = locate_result(recipe, inputs.source)
    module, _ = module_on_meta(source)
    unstack_experts(module)
    problems = list(find_tied_problems(inputs.facts, schemes))
    try:
        described = describe_gguf(module, schemes, export, source.folder, {}, tied_names(module))
    except ExportError as error:
        return [f"export.{index}: {error}"], []
    problems += described.problems
    if source.shapes is not None:
        problems.append(f"{source.shapes.name} has sizes that config.json cannot say, and a GGUF file says no more")
    notes = [Note("warning", f"gguf: {text}") for text in described.notes]
    return [f"export.{index}: {text}" for text in problems], notes


def _warn_unsaid_sizes(inputs: Inputs, done: Sequence[_Done]) -> list[Note]:
    """Warn where a checkpoint of the pruned model will need a shapes.json, and with it `compress` to read it."""
    recipe, units = inputs.recipe, {group: n for each in done for group, n in each.plan.units.items()}
    written = [export for export in recipe.export if isinstance(export, CheckpointExport | GgufExport)]
    why = explain_unsaid_sizes(inputs.run, units) if inputs.run is not None and written and units else ""
    if not why:
        return []
    if any(isinstance(export, GgufExport) for export in written):
        raise PlanError(
            f"export: a GGUF file cannot say the sizes that prune_channels leaves ({why}); use other ratios"
        )
    text = (
        f"no config.json can say the sizes that prune_channels leaves ({why}): the checkpoint gets a shapes.json, by "
        "which `dir:` loads it, and transformers and vLLM do not; other ratios or dimensions may leave what it can say"
    )
    return [Note("warning", text)]


EXPERTS = ".experts."
"""In the name of every expert's layers, once they are single."""
_IN_ONNXRUNTIME = "quality is judged in onnxruntime-cpu instead, and gates on speed and memory stay undecided"
_BY_TORCH = (
    "torch measures its quality as it is built, with inputs and cache rounded as the engine rounds them, and nothing "
    "measures its speed"
)


def _collect_notes(inputs: Inputs) -> tuple[Note, ...]:
    recipe, data = inputs.recipe, inputs.data
    texts = list(inputs.facts.notes)
    if inputs.facts.classless:
        texts.append(
            "nothing runs a shards: source, so that nobody knows what rounding costs its answers: the verdict will be "
            "unjudged, and the report has the error of each layer's weights"
        )
        return tuple(Note("warning", text) for text in texts)
    if "calibration" in data and data["calibration"].digest == data["evaluation"].digest:
        texts.append("data: calibration and evaluation come from one file; apply counts the samples that are in both")
    if (reason := explain_unavailable(recipe)) is not None:
        runs = recipe.has_onnx and not is_scored_by_torch(recipe, inputs.facts)
        how = _IN_ONNXRUNTIME if runs else _BY_TORCH
        why = f": {reason}" if recipe.target in BACKENDS else ""
        texts.append(f"{recipe.target} does not run here{why}; {how}")
    texts += [*_warn_plain_texts(inputs), *_warn_few_samples(inputs, data["evaluation"].n_samples)]
    texts += _warn_few_processes(recipe.validate_)
    if not recipe.validate_.gates:
        texts.append("validate: no gates; the verdict will be unjudged, whatever is measured")
    notes = [Note("warning", text) for text in texts]
    if recipe.has_onnx and any(EXPERTS in layer.name for layer in inputs.facts.layers):
        notes.append(
            Note("slow", "an ONNX graph computes all experts for every token; engines that route read checkpoints")
        )
    if inputs.sight is not None:
        notes.append(
            Note("info", "onnxruntime-genai has a layout of its own for models that see, which is not written")
        )
    measured = measurement_note(recipe, inputs.facts, data["evaluation"].n_samples)
    of_size = (note_missing_float(recipe, inputs.facts), note_narrow_source(recipe, inputs.facts))
    notes += [note for note in of_size if note is not None]
    return (*notes, *engine_notes(inputs), *([measured] if measured else []))


def _warn_few_samples(inputs: Inputs, n_samples: int) -> list[str]:
    """Warn of gates on quality that so few samples cannot decide, even if the candidate loses nothing."""
    judgement, spec = inputs.recipe.validate_, inputs.preprocess
    longest = (spec.pack or spec.max_length) - 1 if isinstance(spec, LanguagePreprocess) else 0
    texts = []
    for gate in judgement.gates:
        least = count_least_samples(gate, judgement.confidence, longest) if gate.metric in METRICS else 0
        if n_samples < least:
            bounds = ", ".join(f"{rule} {limit:g}" for rule, limit in gate.bounds.items())
            wider = ", or ask for less" if METRICS[gate.metric].kind == "proportion" else ""
            texts.append(
                f"gate on {gate.metric}: {n_samples} evaluation samples cannot show {bounds}, even if nothing is lost; "
                f"give at least {least}{wider}"
            )
    return texts


def _warn_few_processes(judgement: Judgement) -> list[str]:
    """Warn of gates on what fresh processes tell where the recipe has fewer than give an interval."""
    given, least = judgement.benchmark.processes, count_least_processes(judgement)
    gated = [gate.metric for gate in judgement.gates if gate.metric in MEASURED.keys() - SIZES]
    if given is None or not gated or given >= least:
        return []
    some = ", ".join(gated)
    return [f"validate.benchmark.processes: {given} of them cannot decide the gate on {some}; give at least {least}"]


def _warn_plain_texts(inputs: Inputs) -> list[str]:
    """Warn of sets of plain text that a model with a chat template is calibrated or trained on."""
    if not find_torch_task(inputs.recipe.model.task).chats or not has_chat_template(inputs.source.folder):
        return []
    return [
        f"data.{name}: plain text, and the model has a chat template: if it was trained to chat, it reads no such text "
        "in use; give conversations, a column `messages` of {role, content} (or name it: `columns: {messages: ...}`)"
        for name in ("calibration", "train")
        if name in inputs.data and "text" in inputs.data[name].columns and not are_chats(inputs.data[name].columns)
    ]


def _warn_of_memory(inputs: Inputs, expected: Forecast, work: Sequence[PlannedWork]) -> list[Note]:
    """Warn of the work, not done yet, that takes most memory, where this machine has less free."""
    done, free = {planned.name for planned in work if planned.cached}, available_bytes()
    left = [stage for stage in expected.stages if stage.name not in done]
    largest = max(left, key=lambda stage: stage.memory_bytes, default=None)
    if largest is None or largest.memory_bytes <= free:
        return []
    passes, timed = inputs.recipe.passes, find_timed_batch(inputs)
    way = "take a machine with more, or make room"
    if hasattr(dict(zip(pass_names(passes), passes, strict=True)).get(largest.name), "batch_size"):
        way = "give it shorter samples"
        way += ", or a smaller batch_size" if inputs.facts.n_bytes < MEASURED_BYTES else ""
    elif largest.name == JUDGING and timed is not None and largest.memory_bytes - timed.n_bytes <= free:
        way = f"give validate.benchmark a smaller {timed.key}"
    needed = f"{largest.name} takes about {size_text(largest.memory_bytes)} of memory"
    return [Note("warning", f"{needed}, and {size_text(free)} are free here: {way}")]


def _note_short_courses(inputs: Inputs, expected: Forecast) -> list[Note]:
    """Return what passes say whose seconds are over before their work is."""
    named, (n, _) = zip(pass_names(inputs.recipe.passes), inputs.recipe.passes, strict=True), measure_training(inputs)
    shares = {stage.name: stage.share for stage in expected.stages}
    ends = {name: (share / EITHER_WAY, min(share * EITHER_WAY, 1.0)) for name, share in shares.items() if share < 1}
    return [note for name, pass_ in named if name in ends for note in pass_.time_notes(n, ends[name])]


def explain_unsaid_sizes(run: ModelRun, units: Mapping[str, int]) -> str:
    """Return why no config.json says the sizes of the model once so many `units` of each dimension are left, by name.

    "" where one does, and where the model has none.
    """
    if run.source.kind != "huggingface" or run.source.shapes is not None or transformers_config(run.module) is None:
        return ""
    dimensions = [dimension for dimension in run.coupling.dimensions if dimension.name in units]
    module = copy_without_weights(run.module)
    built = shapes_of(module)
    remove_all(module, dimensions, [np.arange(units[dimension.name]) for dimension in dimensions], remove)
    return fit_config(getattr(module, "wrapped", module), built)


def _check_work(recipe: Recipe) -> None:
    """Import the work of passes from outside, so that the plan finds what the run would. Raises PluginError."""
    for pass_ in recipe.passes:
        if pass_.kind not in WORK and pass_.work:
            find_work(pass_.kind)
