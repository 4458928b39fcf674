"""Find what is wrong with a recipe before any work: its sets, the order of its passes, its exports, its gates."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from compress.blocks.device import explain_no_device
from compress.data.chat import MESSAGES
from compress.engine.compile import list_capabilities, why_not_here
from compress.engine.orders import BATCH, SEQUENCE, engine_exports, find_needed_ranges, profile_problems, ranges_of
from compress.export.executorch import OTHER_WAY
from compress.export.openvino import missing_packages, reads_texts
from compress.facts import LOWEST_OPSET, ModelFacts, Note
from compress.formats.targets import FIRST_CAPABILITY, TARGETS
from compress.graph.operators import OPERATORS
from compress.models.onnx_facts import INTEGER_PRODUCTS, PRODUCTS
from compress.passes import Pass
from compress.planning.forecast import Forecast, find_timed_batch
from compress.planning.inputs import Inputs
from compress.planning.judging import explain_not_run, is_scored_by_torch
from compress.planning.measurements import measurement_problems
from compress.planning.own_metrics import own_metric_problems
from compress.planning.sets import TEXTS
from compress.planning.timing import explain_untimed
from compress.planning.tokens import generation_of
from compress.recipe.exports import (
    CheckpointExport,
    Engine,
    ExecutorchExport,
    GgufExport,
    GraphExport,
    OnnxExport,
    OpenVinoExport,
)
from compress.recipe.schema import Recipe
from compress.tasks import TORCH_TASKS, find_torch_task
from runtime.backends import executorch
from runtime.bundle.engine import EngineOrder, free_dimensions
from runtime.bundle.manifest import fixed_batch
from runtime.bundle.tensors import TensorSpec
from runtime.errors import UsageError
from runtime.judge.gates import check_gates
from runtime.judge.slices import LABEL, SET
from runtime.measure.workload import MOST_FEED_BYTES, check_room
from runtime.metrics import MEASURED, SIZES
from runtime.tasks import find_task
from runtime.words import size_text

SEEING_WAYS = "use target: onnxruntime-cpu, or target: transformers"
STAGES = ("model", "blocks", "graph")
"""In the order in which they run."""
DECODER = (TensorSpec("", "int64", ("batch", "sequence")), TensorSpec("", "float32", ("batch", "past", "total")))
"""The free sizes of a decoder's graph, which has its cache as inputs."""


def collect_problems(inputs: Inputs, expected: Forecast, root: Path) -> list[str]:
    """Return all that is wrong, as sentences that name the place. `root`: the folder that keeps finished results."""
    recipe, facts = inputs.recipe, inputs.facts
    if facts.classless:
        known = (*classless_problems(recipe), *export_problems(recipe, facts), *limit_problems(recipe, expected, root))
        return [*known, *device_problems(recipe)]
    return [
        *data_problems(inputs),
        *class_problems(recipe.model.task, facts.outputs),
        *order_problems(recipe.passes, facts),
        *student_problems(recipe.passes),
        *state_problems(inputs),
        *timing_problems(recipe, facts),
        *export_problems(recipe, facts),
        *opset_problems(recipe, facts),
        *gate_problems(inputs),
        *slice_problems(inputs),
        *postprocess_problems(inputs),
        *own_metric_problems(recipe),
        *measurement_problems(recipe),
        *benchmark_problems(inputs),
        *judging_problems(recipe, inputs.facts),
        *engine_problems(inputs),
        *openvino_problems(inputs),
        *executorch_problems(inputs),
        *limit_problems(recipe, expected, root),
        *device_problems(recipe),
    ]


def classless_problems(recipe: Recipe) -> list[str]:
    """Report what cannot be done with a model that nothing here can run, as its class is not asked for."""
    way = "with the model's class, source: dir:, it can be"
    problems = [
        f"passes.{index}: {pass_.kind} has to run the model, or to know how it is built, and of a shards: source only "
        "weights are known; use rtn or hqq with a scheme that stores no scale of inputs, or source: dir:"
        for index, pass_ in enumerate(recipe.passes)
        if pass_.needs_forward
    ]
    problems += [
        f"export.{index}: a shards: source is written as a checkpoint alone (target: vllm or transformers), not as "
        f"{export.kind}: {way}"
        for index, export in enumerate(recipe.export)
        if not isinstance(export, CheckpointExport)
    ]
    problems += [
        f"validate.gates.{index}: {gate.metric} is measured of a model that runs, and a shards: source does not; leave "
        f"the gate out ({', '.join(sorted(SIZES))} can stay): {way}"
        for index, gate in enumerate(recipe.validate_.gates)
        if gate.metric not in SIZES
    ]
    for key in ("metrics", "slices"):
        if getattr(recipe.validate_, key):
            problems.append(f"validate.{key}: a shards: source is judged on no samples; leave it out: {way}")
    if recipe.data.declared:
        problems.append(f"data: a shards: source is run on no samples; leave data out: {way}")
    if recipe.preprocess is not None:
        problems.append("preprocess: a shards: source is run on no samples; leave it out")
    if recipe.keep_module:
        problems.append("keep_module: a shards: source has no module to be kept; leave it out")
    return problems


def quantized_problems(recipe: Recipe, facts: ModelFacts) -> list[str]:
    """Report an ONNX file whose products are quantized already, all of them, where a pass is to work on it."""
    quantized = [kind for kind in facts.operators if kind == "DequantizeLinear" or INTEGER_PRODUCTS.search(kind)]
    if not recipe.passes or not quantized or any(layer.op in PRODUCTS for layer in facts.layers):
        return []
    return [
        f"model: {recipe.model.source} is quantized already ({', '.join(quantized)}), and no product is left in float; "
        "give the float model that it was made of"
    ]


def device_problems(recipe: Recipe) -> list[str]:
    """Report a GPU that is asked for and not there."""
    why = explain_no_device(recipe.device)
    return [f"device: {why}"] if why else []


def class_problems(task: str, outputs: Sequence[TensorSpec]) -> list[str]:
    """Report a model of one class: its largest logit is always the same, and no metric of it could fall."""
    known = find_torch_task(task)
    if known.loss not in ("classes", "token classes") or known.count_classes(outputs) != 1:
        return []
    others = {t.loss: name for name, t in TORCH_TASKS.items() if t.model_task == task}
    ways = {"numbers": "for a number", "label sets": "for yes or no"}
    way = " or ".join(f"task: {others[loss]} {what}" for loss, what in ways.items() if loss in others)
    return [f"model: has one class, and {task} chooses among several; use {way or 'task: generic'}"]


def data_problems(inputs: Inputs) -> list[str]:
    """Report sets that are missing, too small for a batch, or nothing to learn from."""
    recipe, problems = inputs.recipe, []
    calibrated = [pass_.kind for pass_ in recipe.passes if pass_.needs_calibration]
    if calibrated and recipe.data.calibration is None:
        problems.append(f"data: {calibrated[0]} needs a calibration set; add data.calibration")
    problems += [
        f"export.{index}: imatrix is made of the calibration set; add data.calibration"
        for index, export in enumerate(recipe.export)
        if isinstance(export, GgufExport) and export.imatrix and recipe.data.calibration is None
    ]
    if recipe.data.evaluation is None:
        problems.append("data: there is no evaluation set to judge the result on; add data.evaluation")
    train = inputs.data.get("train")
    for index, pass_ in enumerate(recipe.passes):
        if pass_.needs_train and recipe.data.train is None:
            problems.append(f"passes.{index}: {pass_.kind} learns from a training set; add data.train")
        elif pass_.needs_train and train is not None:
            found = pass_.train_problems(recipe.model.task, train.n_samples, train.has_labels)
            problems += [f"passes.{index}: {problem}" for problem in found]
            if pass_.rewrites_texts and MESSAGES in train.columns and recipe.chat.loss_on == "assistant":
                problems.append(
                    f"passes.{index}: {pass_.kind} learns from texts that the teacher goes on with, of which nobody "
                    "knows what is the assistant's; leave sequences out, or set chat.loss_on: all"
                )
    problems += packing_problems(inputs)
    fixed, calibration = fixed_batch(inputs.facts.inputs), inputs.data.get("calibration")
    if fixed is not None and calibration is not None and calibration.n_samples < fixed:
        problems.append(
            f"data.calibration: {calibration.n_samples} samples do not fill one batch of {fixed}, which the model is "
            "bound to; give more, or export the model with a free batch"
        )
    return problems


def packing_problems(inputs: Inputs) -> list[str]:
    """Report sets that are packed where nothing can be, or twice."""
    recipe, problems = inputs.recipe, []
    for name, spec in recipe.data.declared.items():
        if spec.packing and not find_torch_task(recipe.model.task).chats:
            problems.append(
                f"data.{name}: packing joins texts that go on; a {recipe.model.task} model reads each alone"
            )
        elif spec.packing and getattr(inputs.preprocess, "pack", None):
            problems.append(f"data.{name}: packing: preprocess.pack joins all texts already; give one of them")
    return problems


def order_problems(passes: Sequence[Pass], facts: ModelFacts) -> list[str]:
    """Report passes out of order: those on the torch module come first, then its blocks, then the exported graph."""
    problems, latest, kind, ended = [], 0, "", ""
    for index, pass_ in enumerate(passes):
        rank = STAGES.index(pass_.stage_on(facts))
        if ended and rank == latest:
            problems.append(f"passes.{index}: {pass_.kind} would change what {ended} rounded, and must come before it")
        if STAGES[rank] == "blocks" and facts.source == "onnx":
            problems.append(f"passes.{index}: {pass_.kind} rewrites a torch model, and an onnx: source is none")
        elif STAGES[rank] == "model" and (why := facts.explain_no_module()):
            problems.append(f"passes.{index}: {pass_.kind} rewrites a torch model, and {why}")
        elif rank < latest:
            what = ("the whole torch model", "the torch model's blocks")[rank]
            problems.append(f"passes.{index}: {pass_.kind} rewrites {what} and must come before {kind}")
        if rank > latest:
            latest, kind, ended = rank, pass_.kind, ""
        ended = pass_.kind if STAGES[rank] == "model" and pass_.formats else ended  # a later one keeps no integers
    return problems


def student_problems(passes: Sequence[Pass]) -> list[str]:
    """Report passes before a student that is built anew, which has nothing of what they did."""
    return [
        f"passes.{index}: {pass_.kind}: its student is another model, and what {passes[0].kind} did before would be "
        f"lost; put {passes[0].kind} after it"
        for index, pass_ in enumerate(passes)
        if index and (student := pass_.find_student()) is not None and student.separate
    ]


def state_problems(inputs: Inputs) -> list[str]:
    """Report what cannot be done with a model that hands states from call to call."""
    recipe, facts = inputs.recipe, inputs.facts
    if not facts.states:
        return []
    problems = [
        f"passes.{index}: {pass_.kind} works on a torch model or trains it, and knows no model.state; leave it out"
        for index, pass_ in enumerate(recipe.passes)
        if pass_.stage_on(facts) != "graph" or pass_.needs_train
    ]
    problems += [
        f"export.{index}: kind: {export.kind} has no states between calls; with model.state use kind: onnx"
        for index, export in enumerate(recipe.export)
        if not isinstance(export, OnnxExport)
    ]
    if inputs.preprocess.kind != "tensor":
        problems.append(
            f"model.state: its samples are arrays of calls, [calls, ...], and preprocess makes {inputs.preprocess.kind}"
            "; use preprocess: {kind: tensor}"
        )
    return problems


def timing_problems(recipe: Recipe, facts: ModelFacts) -> list[str]:
    """Report passes that are to keep a budget of time where nothing is timed."""
    timed = [(i, pass_) for i, pass_ in enumerate(recipe.passes) if pass_.time_budget == "graph"]
    whys = [(i, pass_, explain_untimed(recipe, pass_.stage_on(facts) == "graph")) for i, pass_ in timed]
    return [
        f"passes.{index}: {pass_.kind}: no speedup can be kept, for nothing is timed ({why}); give a budget of size"
        for index, pass_, why in whys
        if why
    ]


def export_problems(recipe: Recipe, facts: ModelFacts) -> list[str]:
    """Report files that cannot hold what the passes leave, second files for a target, and a target without a file."""
    reads = TARGETS[recipe.target].reads
    if reads in ("checkpoint", "gguf") and not recipe.generates and recipe.export == (OnnxExport(),):
        what = f"target: {recipe.target} serves language models from {reads} files"
        return [f"{what}, and this is a {recipe.model.task} model; use onnxruntime-cpu or openvino"]
    problems, seen = [], set()
    for index, export in enumerate(recipe.export):
        name = recipe.target_of(export)
        where, target = f"export.{index}", TARGETS[name]
        if isinstance(export, GraphExport) and export.opset != recipe.opset:
            problems.append(f"{where}: opset {export.opset}, but another has {recipe.opset}; one graph serves them all")
        form = "onnx" if isinstance(export, GraphExport) else export.kind
        if form != target.reads:
            misfit = f"kind: {export.kind} is no file for {name}, which reads {target.reads}; name its target"
            problems.append(f"{where}: {misfit}")
        if (form, name) in seen:
            problems.append(f"{where}: a second file for target {name}; give each target once")
        seen.add((form, name))
        sees = find_torch_task(recipe.model.task).perceives == "image" and isinstance(export, GraphExport)
        if sees and not name.startswith("onnxruntime"):
            problems.append(f"{where}: {name} is not given the graphs of a model that also sees; {SEEING_WAYS}")
        for number, pass_ in enumerate(recipe.passes):
            if sees and pass_.stage_on(facts) == "graph":
                problems.append(
                    f"passes.{number}: {pass_.kind} works on one exported graph, and a model that also sees has two: "
                    "round its weights (rtn, gptq, awq)"
                )
            if name != recipe.target and (text := pass_.explain_refusal(target)):
                problems.append(f"{where}: {text}")
            if isinstance(export, CheckpointExport | GgufExport) and pass_.stage_on(facts) == "graph":
                problems.append(
                    f"{where}: {pass_.kind} rewrites the ONNX graph, which kind: {export.kind} is not made from"
                )
    if recipe.target not in {name for _, name in seen}:
        missing = f"{{kind: {TARGETS[recipe.target].reads}, target: {recipe.target}}}"
        problems.append(f"export: nothing is written for the recipe's own target {recipe.target}; add {missing}")
    if not recipe.has_onnx and not recipe.generates:
        problems.append(f"export: a {recipe.model.task} model is judged as an ONNX graph; add {{kind: onnx}}")
    if recipe.keep_module and facts.source == "onnx":
        problems.append("keep_module: an onnx: source has no class that could be loaded again; leave it out")
    files = find_torch_task(recipe.model.task).files
    fits = f"a model of task {recipe.model.task} is written as {', '.join(files)}"
    way = "; use target: transformers and export: [{kind: checkpoint}]" if files == ("checkpoint",) else ""
    problems += [
        f"export.{index}: {fits}, not as {export.kind}{way}"
        for index, export in enumerate(recipe.export)
        if export.kind not in files
    ]
    for kind in dict.fromkeys(e.kind for e in recipe.export if isinstance(e, CheckpointExport | GgufExport)):
        if facts.source == "onnx":
            problems.append(f"export: kind: {kind} is made from a torch model, and an onnx: source is none")
    return problems


def opset_problems(recipe: Recipe, facts: ModelFacts) -> list[str]:
    """Report passes that need operators which the graph's opset lacks."""
    opset, mend = recipe.opset, "set it as export.0.opset"
    if facts.opset is not None:
        why = next((note for note in facts.notes if "cannot be raised" in note), "")
        opset, mend = facts.opset, f"export it anew with a later one ({why})"
    return [
        f"passes.{index}: {pass_.kind} needs a graph of opset {pass_.lowest_opset} or later; "
        f"this one has {opset}: {mend}"
        for index, pass_ in enumerate(recipe.passes)
        if opset < pass_.lowest_opset
        and (facts.opset is not None or pass_.lowest_opset > LOWEST_OPSET)
        and recipe.has_onnx
    ]


def gate_problems(inputs: Inputs) -> list[str]:
    """Report gates and metrics that could not be judged at the end."""
    recipe, evaluation = inputs.recipe, inputs.data.get("evaluation")
    if evaluation is None:
        return []
    try:
        check_gates(recipe.validate_, recipe.model.task, evaluation.has_labels, recipe.postprocess)
    except UsageError as error:
        return [f"validate: {problem}" for problem in error.problems]
    if recipe.has_onnx:
        return []
    return [
        f"validate.gates.{index}: {gate.metric} is not measured of a checkpoint, which nothing here runs; leave the "
        "gate out, or export {kind: onnx} for onnxruntime-cpu"
        for index, gate in enumerate(recipe.validate_.gates)
        if gate.metric in MEASURED and gate.metric not in SIZES
    ]


def slice_problems(inputs: Inputs) -> list[str]:
    """Report slices that there cannot be: of named sets where none is named, of scores, of texts that are joined."""
    recipe, judged = inputs.recipe, inputs.recipe.validate_
    sets, problems = recipe.data.evaluation_names, []
    if SET in judged.slices and sets:
        problems.append("validate.slices: 'set' is the named evaluation sets', always there; leave it out")
    asked = {gate.worst or (gate.slice or "").partition("=")[0] for gate in judged.gates}
    if SET in asked and not sets and SET not in judged.slices:
        problems.append(
            "validate.gates: there are no slices by 'set': data.evaluation is one set; name several, such as "
            "evaluation: {day: {source: ...}, night: {source: ...}}"
        )
    evaluation = inputs.data.get("evaluation")
    _, dtype = evaluation.shapes.get(LABEL, ((), "int64")) if evaluation is not None else ((), "int64")
    if LABEL in judged.slices and dtype.startswith("float"):
        problems.append(f"validate.slices: label: the labels are {dtype}, no classes; slice by a column of few values")
    if (sets or judged.slices) and getattr(inputs.preprocess, "pack", False):
        what = "validate.slices" if judged.slices else "data.evaluation"
        problems.append(f"{what}: preprocess.pack joins all texts, so that none is of one slice; leave pack out")
    return problems


def postprocess_problems(inputs: Inputs) -> list[str]:
    """Report fields of `postprocess` that the task does not take, or the model's classes do not allow."""
    outputs = inputs.facts.outputs
    width = outputs[0].shape[-1] if outputs and outputs[0].shape else None
    try:
        task = find_task(inputs.recipe.model.task)
        task.check_postprocess(inputs.recipe.postprocess, width if isinstance(width, int) else None)
    except UsageError as error:
        return list(error.problems)
    return []


def benchmark_problems(inputs: Inputs) -> list[str]:
    """Report requests that a decoder has no room for, and batches that the judge refuses to make."""
    recipe, generation = inputs.recipe, generation_of(inputs)
    timed, told = find_timed_batch(inputs), recipe.validate_.benchmark.sequence_length is not None
    if timed is not None and timed.feed_bytes > MOST_FEED_BYTES and (told or inputs.preprocess.kind not in TEXTS):
        return [
            f"validate.benchmark.{timed.key}: a batch of {timed.n_samples} samples has {timed.feed_bytes >> 20} MiB of "
            f"inputs, more than the {MOST_FEED_BYTES >> 20} that are measured; give a smaller one"
        ]
    if generation is None or not recipe.has_onnx:
        return []
    try:
        check_room(recipe.validate_.benchmark, generation.context_length, inputs.preprocess)
    except UsageError as error:
        return [f"validate.{problem}" for problem in error.problems]
    return []


def judging_problems(recipe: Recipe, facts: ModelFacts) -> list[str]:
    """Report a graph that nothing on this machine runs, and torch does not score: it could not be judged."""
    why = explain_not_run(recipe)
    return [f"passes: {why}"] if why is not None and not is_scored_by_torch(recipe, facts) else []


def limit_problems(recipe: Recipe, expected: Forecast, root: Path) -> list[str]:
    """Report more memory or disk than the recipe allows, or than is free on the disk where the results are kept."""
    limits, problems = recipe.limits, []
    for name, needed, allowed in (
        ("memory_gib", expected.memory_bytes, limits.memory_gib),
        ("disk_gib", expected.disk_bytes, limits.disk_gib),
    ):
        if allowed is not None and needed > allowed * 2**30:
            problems.append(
                f"limits.{name}: about {size_text(needed)} are needed, {size_text(allowed * 2**30)} are allowed; use a "
                "smaller model, or raise the limit"
            )
    existing = next(folder for folder in (root, *root.parents) if folder.is_dir())
    free, kept = shutil.disk_usage(existing).free, expected.disk_bytes - expected.bundle_bytes
    if kept > free:
        problems.append(
            f"{existing}: about {size_text(kept)} are needed and {size_text(free)} are free; make room, or set "
            "COMPRESS_CACHE to a folder on another disk"
        )
    return problems


def engine_problems(inputs: Inputs) -> list[str]:
    """Report profiles that the model cannot take or that the bundle is judged outside of, and GPUs that are refused."""
    recipe, generation, problems = inputs.recipe, generation_of(inputs), []
    needed = find_needed_ranges(recipe, inputs.preprocess, generation)
    specs = inputs.facts.inputs if generation is None else DECODER
    for index, export in engine_exports(recipe):
        ranges = ranges_of(export, recipe, inputs.preprocess, generation, specs)
        problems += [f"export.{index}: {text}" for text in profile_problems(ranges, specs, needed)]
        problems += [f"export.{index}: {text}" for text in _capability_problems(export, recipe)]
    return problems


def openvino_problems(inputs: Inputs) -> list[str]:
    """Report what writing OpenVINO's IR and tokenizer lacks here."""
    missing = missing_packages(reads_texts(inputs.preprocess))
    return [
        f"export.{index}: openvino needs the packages {' and '.join(missing)}, which are not installed: pip install "
        f"{' '.join(missing)}; or use {{kind: onnx, target: openvino}}"
        for index, export in enumerate(inputs.recipe.export)
        if isinstance(export, OpenVinoExport) and missing
    ]


def executorch_problems(inputs: Inputs) -> list[str]:
    """Report what keeps a model from ExecuTorch's .pte: the package, operators, states, sizes that have no bounds."""
    facts, problems = inputs.facts, list[str]()
    if executorch.why_unavailable() is not None:
        problems.append(f"needs the package executorch, which is not installed: pip install executorch; or {OTHER_WAY}")
    unknown = [kind for kind in facts.operators if facts.source == "onnx" and kind not in OPERATORS]
    if unknown:
        problems.append(f"the file has operators that have no form in torch here: {', '.join(unknown)}; {OTHER_WAY}")
    if facts.states:
        problems.append(f"the model hands states from call to call, which a .pte is not written with; {OTHER_WAY}")
    unbound = [name for name in free_dimensions(facts.inputs) if name not in (BATCH, SEQUENCE)]
    if unbound:
        problems.append(f"the inputs have free sizes ({', '.join(unbound)}), and a .pte is for known ones; fix them")
    return [
        f"export.{index}: executorch: {problem}"
        for index, export in enumerate(inputs.recipe.export)
        if isinstance(export, ExecutorchExport)
        for problem in problems
    ]


def engine_notes(inputs: Inputs) -> list[Note]:
    """Say which engines can be compiled on this machine, and which are left for another."""
    return [_make_note(export) for _, export in engine_exports(inputs.recipe)]


def _capability_problems(export: Engine, recipe: Recipe) -> list[str]:
    """Report GPUs that cannot compute what a pass leaves, or that the installed compiler, if any, does not know."""
    wanted = getattr(export, "compute_capabilities", ())
    for name in (name for pass_ in recipe.passes for name in pass_.formats if name in FIRST_CAPABILITY):
        first = FIRST_CAPABILITY[name]
        if old := [capability for capability in wanted if float(capability) < first]:
            number, way = ("float8", ", or use kind: int8") if name == "fp8-static" else (name, "")
            text = f"{', '.join(old)} cannot compute in {number}, which begins with {first:g}; leave them out{way}"
            return [f"compute_capabilities: {text}"]
    known = list_capabilities(export.kind)
    unknown = [capability for capability in wanted if known and capability not in known]
    if not unknown:
        return []
    return [
        f"compute_capabilities: {export.kind} does not compile for {', '.join(unknown)}; known: {', '.join(known)}; "
        "for others use kind: tensorrt on the machine that has the GPU"
    ]


def _make_note(export: Engine) -> Note:
    order = EngineOrder("", export.kind, "", (), export.model_dump(mode="json"))
    text = why_not_here(order)
    if not text:
        return Note("info", f"export: the engine for {export.kind} is compiled here")
    return Note(
        "warning",
        f"export: {text}; the bundle gets the ONNX file for {export.kind}, and `compress compile BUNDLE` finishes it "
        "on the target machine",
    )
