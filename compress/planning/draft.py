"""Draft a recipe from a model and data: everything that can be found is found, and what cannot is named by its flag."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from compress.data.columns import USUAL_NAMES, resolve_roles
from compress.data.find_sets import (
    MOST_CALIBRATED,
    DataGiven,
    check_set,
    divide_set,
    find_splits,
    fix_draws,
    read_set,
    take_calibration,
)
from compress.data.samples import n_rows, open_source
from compress.data.table import Table
from compress.errors import CompressError, PlanError, RecipeError, SourceError
from compress.formats.targets import TARGETS
from compress.models.find_task import explain_other_task, find_task_of_folder
from compress.models.meta import open_on_meta
from compress.models.preprocess import resolve_preprocess
from compress.models.source import Source, locate
from compress.planning.inputs import Inputs, read_inputs
from compress.planning.validation import class_problems
from compress.recipe.explain import explain
from compress.recipe.exports import CHECKPOINT_TARGET
from compress.recipe.places import RecipeFindings
from compress.recipe.schema import Recipe
from compress.recipe.yaml_source import IN_PYTHON, make_node
from compress.specs import HELD, MODEL_SOURCES, ModelSpec
from compress.store.paths import resolve_path
from compress.tasks import TORCH_TASKS
from compress.tasks.generic import GENERIC
from runtime.bundle.engine import COMPILED
from runtime.errors import RuntimeFailure
from runtime.tasks import find_task
from runtime.words import suggest

SETS = ("calibration", "train", "evaluation")
NO_NAMES = re.compile(r"((build|make|create|get|load)_?)?(|model|network|net|module|factory)|checkpoint|onnx|src")
"""What half of all factories, files and folders of models are called, so that it names none of them."""
ORDER = ("version", "name", "model", "preprocess", "chat", "data", "target", "export")
"""Of a drafted recipe's parts."""


@dataclass(frozen=True)
class Draft:
    """A recipe without `passes` and `validate`, as a mapping that can be written as YAML and read by `load_recipe`.

    `reasons`: dotted key -> what says its value, for comments. `inputs`: what is known of model and data; None
    without data, of which `recipe` then has none. `n_samples`: of each set.
    """

    recipe: dict[str, Any]
    reasons: dict[str, str] = field(default_factory=dict)
    inputs: Inputs | None = None
    n_samples: Mapping[str, int] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """Return the task's name."""
        return str(self.recipe["model"]["task"])

    @property
    def has_labels(self) -> bool:
        """Return whether the evaluation set has labels."""
        return (
            self.inputs is not None and "evaluation" in self.inputs.data and self.inputs.data["evaluation"].has_labels
        )

    def make_recipe(self, root: Path, **parts: Any) -> Recipe:
        """Return the typed recipe that stands in `root`, with `parts` (passes, validate, ...) on top."""
        return make_recipe({**self.recipe, **parts}, root)


def draft_recipe(
    source: str,
    *,
    task: str | None = None,
    weights: str | None = None,
    preprocess: Mapping[str, Any] | None = None,
    data: DataGiven | None = None,
    calibration: DataGiven | None = None,
    train: DataGiven | None = None,
    evaluation: DataGiven | None = None,
    target: str | None = None,
    name: str | None = None,
    root: Path | None = None,
    most_calibrated: int | None = None,
    described: Mapping[str, Any] | None = None,
) -> Draft:
    """Draft a recipe without passes and gates for the model `source` and data, each a path, a hub id or a source.

    The recipe has: `version`, `name` (default: of the source), `model`, `preprocess` where it is given (that of a model
    with a processor or tokenizer is read from its files, also by the recipe), `data`, `target` (default: what reads
    models of its task), and `export` where the target reads something else than ONNX. Paths stay as they were given; a
    relative one is sought in the working directory, then in `root`, the folder that the recipe is to stand in.

    The task is the given one; that of the class in the model's config.json; else the first of the table `TORCH_TASKS`
    whose outputs and samples are those of this model and this data; of an ONNX file without data "generic".

    `data` is one source for all sets. Its own splits are used: train to train on, validation (else test) to evaluate
    on. Without them the set is divided by the recipe's seed into disjoint parts: a fifth, at most 5000 samples, to
    evaluate on, the rest to train on. `calibration`, `train` and `evaluation` take the place of what `data` would give.
    Calibration that is not given is the first samples of the training set: never what is evaluated on. It has at most
    `most_calibrated` (512), unless the set that is given says `samples`. Each set names its columns, by the usual names
    of the task's roles or where only one column can be meant. `described`: further keys of `model`.

    Nothing is trained or computed, and no weights are read. Raises RecipeError, SourceError and PlanError, which name
    the flag (--task, --weights, --preprocess, --data, ...) that says what could not be found.
    """
    root = Path() if root is None else root
    if task is not None and task not in TORCH_TASKS:
        raise RecipeError(f"--task {task}: unknown task{suggest(task, TORCH_TASKS)}")
    if target is not None and target not in TARGETS:
        raise RecipeError(f"--target {target}: unknown target{suggest(target, TARGETS)}")
    found = find_model_source(source, root)
    given = {"calibration": calibration, "train": train, "evaluation": evaluation}
    sets = _gather_sets(data, {name: spec for name, spec in given.items() if spec is not None}, root)
    model = {"source": found} | ({} if weights is None else {"weights": weights}) | dict(described or {})
    base: dict[str, Any] = {"version": 1, "name": name or name_recipe(found), "model": model}
    if preprocess is not None:
        base["preprocess"] = dict(preprocess)
    if target is not None:
        base["target"] = target
    made = _find_task(base, task, sets, root)
    target = target or TORCH_TASKS[made.task].starter.target
    made = replace(made, recipe={**made.recipe, "target": target, **list_exports(target)})
    return (
        made if made.inputs is None or not sets else _divide_data(made, sets, root, most_calibrated or MOST_CALIBRATED)
    )


def find_model_source(text: str, root: Path) -> str:
    """Return the source of a path, hub id or module:factory, its kind before it. SourceError."""
    kinds = [example.partition(":")[0] for example in (*MODEL_SOURCES, HELD)]
    if re.match(rf"({'|'.join(kinds)}):.", text):
        return text
    try:
        path = resolve_path(root, text)
    except SourceError as error:
        if re.fullmatch(r"[\w./-]+:\w+", text):
            return f"python:{text}"
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text) and Path(text).suffix not in (".onnx", ".gguf"):
            return f"hf:{text}"
        raise SourceError(f"{error}; a model is {', '.join(MODEL_SOURCES)}") from error
    if path.is_dir():
        graphs = sorted(path.glob("*.onnx"))
        if (path / "config.json").is_file() and (not graphs or any(path.glob("*.safetensors"))):
            return f"dir:{text}"
        if len(graphs) == 1:
            return f"onnx:{Path(text) / graphs[0].name}"
        many = f"; it has {', '.join(g.name for g in graphs)}: name one" if graphs else ""
        raise SourceError(f"{text}: holds neither config.json nor one .onnx file, so it is no model's folder{many}")
    if path.suffix in (".onnx", ".gguf"):
        return f"{path.suffix[1:]}:{text}"
    ways = {
        ".py": f"name its factory: {text}:FACTORY",
        ".pt2": "a program of torch.export has lost its modules: give the factory that it was exported from, or an "
        f"ONNX file, torch.onnx.export(torch.export.load({text!r})).save('model.onnx')",
    }
    usual = "weights alone are no model: name the factory that builds it, FILE.py:FACTORY, and give these by --weights"
    way = ways.get(path.suffix, usual)
    raise SourceError(f"{text}: a model is {', '.join(MODEL_SOURCES)}; {way}")


def name_recipe(source: str) -> str:
    """Return a recipe's name, made of a model's source: of the file, or of its folder where all are called so."""
    kind, _, rest = source.partition(":")
    if kind == "hf":
        names = [rest.rpartition("/")[2]]
    elif kind == "live":
        names = [rest.rpartition("-")[0].lower()]
    elif kind == "python":
        module, _, factory = rest.rpartition(":")
        file = Path(module if module.endswith(".py") else module.replace(".", "/")).resolve()
        names = [factory, file.stem, file.parent.name]
    else:
        path = Path(rest).resolve()
        names = [path.stem if kind in ("onnx", "gguf") else path.name, path.parent.name]
    name = next((name for name in names if not NO_NAMES.fullmatch(name.lower())), names[-1])
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "model"


def make_recipe(mapping: Mapping[str, Any], root: Path) -> Recipe:
    """Return the typed recipe of a mapping, standing in `root`. RecipeError."""
    try:
        recipe = Recipe.model_validate_json(json.dumps(mapping), strict=True)
    except ValidationError as error:
        findings = RecipeFindings()
        explain(error, make_node(mapping), findings)
        lines = [line.removeprefix(f"{IN_PYTHON}: ") for line in findings.lines()]
        raise RecipeError([f"--{line}" if line.startswith("preprocess") else line for line in lines]) from error
    return recipe.at_root(root.absolute())


def list_exports(target: str) -> dict[str, Any]:
    """Return the recipe's `export`, where the target gets something else than the ONNX file of every recipe."""
    reads = TARGETS[target].reads
    if reads == "checkpoint":
        return {"export": [{"kind": reads} | ({"target": target} if target != CHECKPOINT_TARGET else {})]}
    if reads == "gguf" or target in COMPILED:
        return {"export": [{"kind": reads if reads == "gguf" else target}]}
    return {}


def _gather_sets(data: DataGiven | None, given: Mapping[str, DataGiven], root: Path) -> dict[str, dict[str, Any]]:
    """Return the sets by name, "data" being one that is still to be divided. RecipeError for data without a use."""
    sets = {}
    for name, text in given.items():
        spec = read_set(text, root, f"--{name}")
        splits = find_splits(spec, root)
        wanted = ("validation", "test", "train") if name == "evaluation" else ("train", "validation", "test")
        sets[name] = next((splits[split] for split in wanted if split in splits), spec)
    if data is None:
        return sets
    if {"train", "evaluation"} <= sets.keys():
        raise RecipeError("--data is where --train and --evaluation are found; give it, or both of them")
    spec = read_set(data, root, "--data")
    splits = find_splits(spec, root)
    evaluated = splits.get("validation") or splits.get("test")
    if evaluated is not None and "train" in splits:
        return {"train": splits["train"], "evaluation": evaluated} | sets
    whole = next(iter(splits.values()), spec)
    if "evaluation" in sets:
        return {"train": whole} | sets
    return {"evaluation" if "train" in sets else "data": whole} | sets


def _find_task(base: Mapping[str, Any], task: str | None, sets: Mapping[str, dict[str, Any]], root: Path) -> Draft:
    """Return the draft with its task, and what is known of the model with it; its sets are yet to be divided."""
    found = next((sets[name] for name in ("data", "evaluation", "calibration", "train") if name in sets), None)
    spec = None if found is None else fix_draws(found)
    source, bare = base["model"]["source"], {k: v for k, v in base["model"].items() if k != "detections"}
    located = locate(make_model_spec({"model": bare}, GENERIC.name), root)
    folder = located.folder or (located.onnx.parent if located.onnx is not None else None)
    if located.kind == "shards" and task is None:
        name = next(name for name, known in TORCH_TASKS.items() if known.task.decoder_only)
        return _try_task(base, name, spec, root, "the only one whose layers names tell")
    if task is not None:
        if located.kind == "huggingface" and located.folder and (other := explain_other_task(task, located.folder)):
            raise RecipeError(f"--task {task}: config.json of {source} names {other}, which has another; leave it out")
        return _try_task(base, task, spec, root, "given")
    if folder is not None and (named := find_task_of_folder(folder)) is not None:
        return _try_task(base, named[0], spec, root, f"found in {named[1]}")
    if located.kind == "huggingface":
        raise RecipeError(
            f"{source}: its config.json names no class of a task that is known here; if its task is one all the same, "
            f"give --task; else write a function that returns the model, and give FILE.py:FUNCTION with --task "
            f"{GENERIC.name}, which takes whatever a model reads and gives"
        )
    if spec is None:
        if located.onnx is None:
            raise RecipeError(f"{source}: a factory does not say what its model reads; give --data, and --task")
        return _try_task(base, GENERIC.name, None, root, "no data that would tell another")
    return _find_fitting_task(base, spec, root)


def _find_fitting_task(base: Mapping[str, Any], spec: Mapping[str, Any], root: Path) -> Draft:
    """Return the draft of the first task whose samples and outputs are these. RecipeError where none is."""
    source, failures = base["model"]["source"], list[tuple[str, str]]()
    for name, candidate in TORCH_TASKS.items():
        if candidate.task.generates or not candidate.task.columns:
            continue  # made from Hugging Face folders alone, or tried last
        if not _has_samples(name, spec, root):
            continue
        try:
            made = _try_task(base, name, spec, root, "the first whose samples and outputs these are")
        except (CompressError, RuntimeFailure) as error:
            if any(problem.startswith("--preprocess") for problem in error.problems):
                raise
            failures.append((name, error.problems[0]))
            continue
        assert made.inputs is not None
        if problems := class_problems(name, made.inputs.facts.outputs):
            failures.append((name, problems[0]))
        elif (candidate.any_outputs or not all(candidate.outputs.values())) and not made.has_labels:
            failures.append((name, "any outputs fit it, and there are no labels that would tell"))
        else:
            return made
    try:
        return _try_task(base, GENERIC.name, spec, root, "inputs by their names")
    except (CompressError, RuntimeFailure) as error:
        failures.append((GENERIC.name, error.problems[0]))
    causes = {problem for _, problem in failures}
    if len(failures) > 1 and len(causes) == 1:  # whatever the task is
        raise RecipeError(causes.pop())
    told = [f"{name}: {problem}" for name, problem in failures]
    raise RecipeError([f"{source}: its task cannot be told from the model and the data; give --task", *told])


def _has_samples(task: str, spec: Mapping[str, Any], root: Path) -> bool:
    try:
        table = open_source(check_set(spec, "--data"), root, task)
        named = _name_columns(spec, table, task)
        labelled = "label" in named.get("columns", ())  # else a column of any name would be any task's
        return bool(resolve_roles(check_set(named if labelled else spec, "--data"), table, task, ()))
    except SourceError:
        return False


def make_model_spec(base: Mapping[str, Any], task: str) -> ModelSpec:
    """Return where the model comes from. RecipeError."""
    try:
        return ModelSpec.model_validate({**base["model"], "task": task}, strict=False)
    except ValidationError as error:
        raise RecipeError([f"model: {e['msg']}" for e in error.errors()]) from error


def _try_task(base: Mapping[str, Any], task: str, spec: Mapping[str, Any] | None, root: Path, reason: str) -> Draft:
    """Return the draft with this task, checked against the model's files and the set. Errors as `draft_recipe`."""
    source = locate(make_model_spec(base, task), root)
    recipe = {**base, "model": {**base["model"], "task": task}}
    recipe = {key: recipe[key] for key in ("version", "name", "model", "preprocess") if key in recipe}
    reasons = {"model.task": reason}
    if source.kind == "shards":
        if spec is not None:
            raise RecipeError(f"--data: {source.name} is run on no samples; leave it out")
        return Draft(recipe, reasons, read_inputs(make_recipe(recipe, root)))
    if spec is None:
        declared = make_recipe(recipe, root).preprocess
        resolve_preprocess(source, declared)
        return Draft(recipe, reasons)
    typed = check_set(spec, "--data")
    table = open_source(typed, root, task)
    spec = _name_columns(spec, table, task)
    if "preprocess" not in base and source.folder is None and find_task(task).preprocess is not None:
        spec = _take_ready_inputs(source, spec, table, task)
        recipe["preprocess"] = {"kind": "tensor"}
        reasons["preprocess"] = "the data holds the model's inputs ready"
    target = base.get("target", TORCH_TASKS[task].starter.target)
    parts = {"data": {"evaluation": spec}, "target": target, **list_exports(target)}
    inputs = read_inputs(make_recipe({**recipe, **parts}, root))
    if inputs.image_size is not None:
        recipe["chat"] = {"image_size": list(inputs.image_size)}
        reasons["chat.image_size"] = "a graph's images are of one size, its processor's of any; more is more tokens"
        inputs = read_inputs(make_recipe({**recipe, **parts}, root))
    if inputs.problems:
        raise PlanError(inputs.problems)
    order = table.label_names.get(str(inputs.recipe.data.declared["evaluation"].columns.get("label", "label")), ())
    known = TORCH_TASKS[task]
    if known.uses_class_names and not inputs.class_names and len(order) == known.count_classes(inputs.facts.outputs):
        recipe["model"]["class_names"] = list(order)
        reasons["model.class_names"] = "the data's order; write that of the model's outputs"
    if "preprocess" not in recipe and inputs.preprocess.kind != "tensor":
        reasons["preprocess"] = f"kind: {inputs.preprocess.kind}, read from the model's own files"
    return Draft(recipe, reasons, inputs)


def _name_columns(spec: Mapping[str, Any], table: Table, task: str) -> Mapping[str, Any]:
    """Return the set with a column for what the task reads, where the usual names have none and one alone can be it."""
    known = find_task(task)
    if spec.get("columns") or not known.columns:
        return spec
    role = known.columns[0]
    usual = {
        name: USUAL_NAMES.get(name, (name,)) + TORCH_TASKS[task].usual_names.get(name, ()) for name in (role, "label")
    }
    if any(name in table.lengths for name in (*usual[role], *USUAL_NAMES["messages"])):
        return spec
    labels = [name for name in table.names if name in usual["label"]] or list(table.label_names)
    others = [name for name in table.names if name not in labels]
    if len(others) != 1:
        return spec  # the error of resolve_roles lists the columns and says how to name one
    return {**spec, "columns": {role: others[0], **({"label": labels[0]} if len(labels) == 1 else {})}}


def _take_ready_inputs(source: Source, spec: Mapping[str, Any], table: Table, task: str) -> Mapping[str, Any]:
    """Return the set with its array of floats as the model's one input. RecipeError where it holds no such array."""
    import numpy as np

    from compress.models.feeds import model_inputs

    kind = find_task(task).preprocess
    roles = resolve_roles(check_set(spec, "--data"), table, task, ())
    role = next(name for name in roles if name != "label")
    first = table.read(roles[role], np.array([0]))
    names = model_inputs(open_on_meta(source))
    if not isinstance(first, np.ndarray) or first.dtype.kind != "f" or len(names) != 1:
        raise RecipeError(
            f"--preprocess: {source.name} does not say how its inputs are made of samples; give it as in the model's "
            f"training, such as --preprocess '{{kind: {kind}, ...}}'"
        )
    columns = {names[0]: roles[role]} | {name: column for name, column in roles.items() if name == "label"}
    return {**spec, "columns": columns}


def _divide_data(draft: Draft, sets: Mapping[str, dict[str, Any]], root: Path, most: int) -> Draft:
    """Return the draft with its sets, and with what is known of the evaluation set."""
    assert draft.inputs is not None
    known, task = draft.inputs, draft.task
    images = known.preprocess.kind == "image"
    columns = known.recipe.data.declared["evaluation"].columns
    named = {name: {**spec, "columns": {**columns, **spec.get("columns", {})}} for name, spec in sets.items()}
    counts: dict[str, int] = {}

    def complete(name: str, spec: dict[str, Any]) -> dict[str, Any]:
        """Name the columns of a set, and count its samples."""
        typed = check_set({key: value for key, value in spec.items() if key != "columns" or value}, f"--{name}")
        table = open_source(typed, root, task)
        roles = resolve_roles(typed, table, task, known.names, images)
        n = n_rows(table, roles) - typed.skip
        counts[name] = n if typed.samples is None else min(n, typed.samples)
        by_index = any(isinstance(column, int) for column in typed.columns.values())
        return {**spec, "columns": dict(typed.columns) if by_index else roles}

    full = {name: complete(name, spec) for name, spec in named.items()}
    if "data" in full:
        for name, spec in divide_set(full.pop("data"), counts.pop("data")).items():
            full[name], counts[name] = spec, spec["samples"]
            draft.reasons[f"data.{name}"] = "a part of one set, none of whose rows is in the other"
    if "calibration" not in full and "train" in full:
        full["calibration"] = take_calibration(full["train"], counts["train"], most)
        counts["calibration"] = full["calibration"]["samples"]
        draft.reasons["data.calibration"] = "of the training set"
    elif counts.get("calibration", 0) > most and "samples" not in full["calibration"]:
        draft.reasons["data.calibration"] = f"of {counts['calibration']}; more: write another `samples`"
        full["calibration"] = take_calibration(full["calibration"], counts["calibration"], most)
        counts["calibration"] = full["calibration"]["samples"]
    data = {name: full[name] for name in SETS if name in full}
    recipe = {**draft.recipe, "data": data}
    recipe = {key: recipe[key] for key in ORDER if key in recipe}
    inputs = read_inputs(make_recipe(recipe, root))
    if inputs.problems:
        raise PlanError(inputs.problems)
    return replace(draft, recipe=recipe, inputs=inputs, n_samples=counts)
