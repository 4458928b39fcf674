"""The keys of a recipe's results: what each one depends on, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from compress.data.chat import are_chats
from compress.passes import Pass
from compress.planning.importance import locate_importance
from compress.planning.in_files import stays_in_files
from compress.planning.inputs import Inputs
from compress.planning.own_metrics import digest_own_metrics
from compress.planning.timing import describe_call, explain_untimed
from compress.recipe.schema import Recipe
from compress.store.cache import cache_key
from runtime.bundle.detections import Detections
from runtime.bundle.files import sha256_of
from runtime.bundle.format import Benchmark, Judgement
from runtime.bundle.manifest import fixed_batch
from runtime.bundle.records import to_json
from runtime.encode.language import LanguagePreprocess
from runtime.encode.preprocess import ImageTextPreprocess, Seq2SeqPreprocess, TextPreprocess
from runtime.measure.benchmark import graph_backend
from runtime.plugins import BACKEND_GROUP, METRIC_GROUP, PASS_GROUP, TASK_GROUP, TORCH_TASK_GROUP, find_plugin
from runtime.tasks import find_task
from runtime.tasks.metrics import METRICS, is_own


@dataclass(frozen=True)
class CacheKeys:
    """`float_graph`: the exported float graph; `passes`: the state after each pass; `baseline`: the float outputs.

    `passed_graph`: the graph exported after the passes over the torch model, on which the graph passes work; the float
    graph if there are none. `torch_outputs`: those of a model of which no graph is written, before and after; `beside`:
    those of one whose graphs are run once, side by side.
    `exports`: the graph exported after each pass that is not over the graph; `outputs`: those of what each pass left.
    `made_of`: key of an exported graph -> that of all that it is made of but for the sizes of its example, which
    `compress.execution.cached` adds. The graph's own key also holds the samples on which it is compared with torch.
    """

    float_graph: str
    passes: tuple[str, ...]
    passed_graph: str
    baseline: str
    torch_outputs: str
    beside: str
    exports: tuple[str, ...]
    outputs: tuple[str, ...]
    made_of: Mapping[str, str]


def cache_keys(inputs: Inputs) -> CacheKeys:
    """Return the keys of all results of a recipe, chained: each holds that of the one before it."""
    recipe = inputs.recipe
    data = {name: _describe_set(inputs, name) for name in inputs.data}
    example = data.get("calibration") or data.get("evaluation")
    form = [inputs.feeds, recipe.opset]
    form += ["one sample at a time"] if fixed_batch(inputs.facts.inputs) == 1 else []
    form += ["weights in files"] if stays_in_files(recipe, inputs.facts) else []
    if inputs.sight is not None and inputs.chats is not None:
        form += [to_json(inputs.sight.images), inputs.chats.digest]
    compared = [_describe_preprocess(inputs), list(inputs.class_names), example]
    made_of: dict[str, str] = {}

    def graph_key(model: str) -> str:
        made = cache_key("graph", model, form)
        key = cache_key("export", made, compared)
        made_of[key] = made
        return key

    plugins = list_plugins(recipe)
    source = cache_key("plugins", inputs.digest, plugins) if plugins else inputs.digest
    float_graph = graph_key(source)
    keys, previous = [], source
    staged = [(pass_, pass_.stage_on(inputs.facts)) for pass_ in recipe.passes]
    for pass_, stage in ((pass_, stage) for pass_, stage in staged if stage != "graph"):
        uses = [*_list_dependencies(pass_, inputs, data), *_digest_student(pass_, inputs)]
        previous = cache_key(f"{stage} pass", previous, uses, _describe_preprocess(inputs))
        keys.append(previous)
    exports = [graph_key(key) for key in keys]
    previous = passed_graph = exports[-1] if exports else float_graph
    for pass_ in (pass_ for pass_, stage in staged if stage == "graph"):
        previous = cache_key("pass", previous, _list_dependencies(pass_, inputs, data))
        keys.append(previous)
    judged = recipe.validate_
    how = ["exact", recipe.target, judged.batch_size, judged.benchmark.threads, to_json(recipe.postprocess)]
    how += _describe_detections(inputs)
    # not the samples that the graph was compared on, where they decide no size of the export's example
    free = any(isinstance(size, str) for spec in inputs.facts.inputs for size in spec.shape[1:])
    sized = example if free and find_task(recipe.model.task).unit == "call" else None
    read = [_describe_preprocess(inputs), list(inputs.class_names), data.get("evaluation")]
    baseline = cache_key("baseline", made_of[float_graph], sized, read, how)
    torch_outputs = cache_key("torch outputs", source, keys, data.get("evaluation"), _describe_preprocess(inputs))
    beside = cache_key("beside", torch_outputs, graph_backend(recipe), how)
    left = [*exports, *keys[len(exports) :]]
    outputs = [cache_key("pass outputs", key, baseline) for key in left]
    return CacheKeys(
        float_graph,
        tuple(keys),
        passed_graph,
        baseline,
        torch_outputs,
        beside,
        tuple(exports),
        tuple(outputs),
        made_of,
    )


def _list_dependencies(pass_: Pass, inputs: Inputs, data: Mapping[str, list[Any]]) -> list[Any]:
    """List what a pass's result depends on, beside the pass before it."""
    recipe = inputs.recipe
    uses: list[Any] = [pass_.model_dump(mode="json"), recipe.target, recipe.seed]
    if pass_.needs_calibration:
        uses.append(data.get("calibration"))
    if pass_.importance_file:
        uses.append(sha256_of(locate_importance(recipe, pass_)))
    if pass_.needs_train:
        uses += [data.get("train"), *_describe_detections(inputs, of_head=True)]
    if pass_.chooses_by_time or pass_.time_budget == "graph":
        layers = pass_.stage_on(inputs.facts) == "graph"
        uses.append(describe_call(recipe) if explain_untimed(recipe, layers) is None else "not timed")
    if pass_.uses_gates:
        uses += [to_json(quality_gates(recipe.validate_)), data.get("evaluation"), *_describe_detections(inputs)]
        uses += [list(recipe.data.evaluation_names), to_json(recipe.postprocess), digest_own_metrics(recipe)]
    return uses


def _describe_detections(inputs: Inputs, of_head: bool = False) -> list[Any]:
    """Describe what a detector's outputs mean, in a list; `of_head`: without the bounds of what is kept."""
    known = inputs.facts.detections
    if known is None:
        return []
    if of_head:
        usual = Detections()
        bounds = ("score_threshold", "iou_threshold", "most", "suppress", "multi_label")
        known = replace(known, **{name: getattr(usual, name) for name in bounds})
    return [to_json(known)]


def _digest_student(pass_: Pass, inputs: Inputs) -> list[str]:
    """Return the digest of the model that the pass puts in the given one's place, in a list; empty if it puts none."""
    student = pass_.find_student()
    return [] if student is None or not student.separate else [inputs.students.get(student.key, "")]


def quality_gates(judgement: Judgement) -> Judgement:
    """Return the judgement with only the gates that speak of outputs, without speed, size and what passes left."""
    gates = tuple(gate for gate in judgement.gates if gate.metric in METRICS or is_own(gate.metric))
    return replace(judgement, gates=gates, benchmark=Benchmark(), steps="auto")


def _describe_preprocess(inputs: Inputs) -> list[Any]:
    """Describe preprocessing for a key: its record, and the tokenizer's digest where it has one."""
    preprocess = inputs.preprocess
    if isinstance(preprocess, Seq2SeqPreprocess) and inputs.tokenizer is not None:
        names = {preprocess.target.tokenizer, getattr(preprocess.source, "tokenizer", preprocess.target.tokenizer)}
        return [to_json(preprocess), *(sha256_of(inputs.tokenizer / name) for name in sorted(names))]
    if (
        not isinstance(preprocess, TextPreprocess | LanguagePreprocess | ImageTextPreprocess)
        or inputs.tokenizer is None
    ):
        return [to_json(preprocess)]
    return [to_json(preprocess), sha256_of(inputs.tokenizer / preprocess.tokenizer)]


def _describe_set(inputs: Inputs, name: str) -> list[Any]:
    spec = inputs.recipe.data.declared[name]
    chosen = [part.model_dump(mode="json", exclude={"source", "also"}) for part in spec.parts]
    rendered = [inputs.chats.digest] if inputs.chats is not None and are_chats(inputs.data[name].columns) else []
    return [inputs.data[name].digest, chosen, inputs.recipe.seed, list(inputs.class_names), *rendered]


def list_plugins(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Return "group: name" -> distribution, version and digest of the code of each plug-in that the recipe names."""
    judged = recipe.validate_
    names = [
        *((PASS_GROUP, pass_.kind) for pass_ in recipe.passes),
        *((METRIC_GROUP, name) for name in (*judged.metrics, *(gate.metric for gate in judged.gates))),
        *((group, recipe.model.task) for group in (TASK_GROUP, TORCH_TASK_GROUP)),
        *((BACKEND_GROUP, name) for name in (recipe.target, *map(recipe.target_of, recipe.export))),
    ]
    named = {f"{group}: {name}": find_plugin(group, name) for group, name in names}
    return {name: plugin.to_record() for name, plugin in sorted(named.items()) if plugin is not None}
