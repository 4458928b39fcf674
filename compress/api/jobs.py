"""What a program asks for: a model in a scheme, a smaller one, one that reaches a goal, what is fastest here.

Each writes what it was given into files, drafts the recipe that a person would have written, and runs it: the recipe
lies beside the bundle, and gives it again.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack, cast, get_type_hints

from compress.api.datasets import Reads, write_set
from compress.api.models import write_model
from compress.api.result import Result
from compress.commands.auto import reach_goal
from compress.commands.bench import bench_model
from compress.commands.bench_rows import BenchTable
from compress.commands.new import NewAnswers
from compress.commands.quantize import apply_passes, draft_for, name_recipe_file, quantize_further, quantize_model
from compress.data.find_sets import DataGiven
from compress.errors import CompressError, PlanError, RecipeError, SourceError
from compress.execution.run import apply_recipe
from compress.planning.draft import find_model_source, make_recipe, name_recipe
from compress.planning.make_plan import make_plan
from compress.planning.plan import Plan
from compress.planning.usual import PassMapping, choose_gates, describe_passes
from compress.recipe.load import load_recipe
from compress.recipe.schema import Recipe
from compress.search.chains import make_training
from compress.search.pursue import pursue
from compress.search.study import FOUND, Study
from compress.search.sweep import sweep as search
from compress.store.output import name_output
from compress.store.run_log import choose_log
from runtime.report.report import Report
from runtime.report.stored import StoredReport
from runtime.words import did_you_mean

HELD = ".live"
"""Behind a bundle's name: the folder of what was given as objects."""
RecipeGiven = Recipe | Mapping[str, Any] | str | Path


class Given(TypedDict, total=False):
    """What a job is given beside the model, and what the command's flags say: of every job the same."""

    calibration_dataset: Any
    train_dataset: Any
    eval_dataset: Any
    num_calibration_samples: int
    example_inputs: Any
    transform_fn: Callable[[Any], Any] | None
    processing_class: Any
    task: str | None
    class_names: Sequence[str] | None
    detections: Mapping[str, Any] | None
    preprocess: Mapping[str, Any] | None
    target: str | None
    output_dir: Path | str | None
    cache: Path | None
    quiet: bool


DEFAULTS: Given = {"num_calibration_samples": 512, "quiet": False}
"""None for all others."""
DESCRIBED = ("class_names", "detections")
"""What is said of the model itself, under its keys in a recipe."""
Job = TypeVar("Job", bound=Callable[..., Any])
ARGUMENTS = {
    "data": "calibration_dataset",
    "calibration": "calibration_dataset",
    "train": "train_dataset",
    "evaluation": "eval_dataset",
    "task": "task",
    "preprocess": "preprocess",
    "target": "target",
    "scheme": "scheme",
    "goal": "goal",
    "out": "output_dir",
    "budget": "budget_seconds",
}
"""Flag of the commands -> the argument that says the same."""
_FLAG = re.compile(rf"--({'|'.join(ARGUMENTS)})\b")


def _as_function(job: Job) -> Job:
    """Return the job with a signature that names what is given, and errors that name arguments instead of flags."""

    @wraps(job)
    def run(*args: Any, **given: Any) -> Any:
        try:
            return job(*args, **given)
        except CompressError as error:
            said = [_FLAG.sub(lambda match: ARGUMENTS[match[1]], problem) for problem in error.problems]
            if said == list(error.problems):
                raise
            raise type(error)(said) from error

    signature = inspect.signature(job)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name), annotation=hint)
        for name, hint in get_type_hints(Given).items()
    ]
    run.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    return cast(Job, run)


@_as_function
def quantize(model: Any, scheme: str = "INT8", *, ignore: Sequence[str] = (), **given: Unpack[Given]) -> Result:
    """Bring a model to a scheme by the passes that usually do, and judge it beside the model as it came.

        result = compress.quantize(net, "INT8", calibration_dataset=loader, eval_dataset=test_loader)
        result.verdict, result.bundle.predict(images)

    `model`: a `torch.nn.Module`, a transformers model (with its tokenizer or processor as `processing_class`), an
    `onnx.ModelProto`, a path or a hub id; what is given stays as it is. A `Result`, such as a pruned model: its passes
    come first (from the cache), and what comes out is judged beside the model that was given at first. `ignore`: layers
    that stay, by name, type or `re:` pattern. Of what every job is given:

    `calibration_dataset`, `train_dataset`, `eval_dataset`: a DataLoader, a data set, arrays by name, a list, a function
    that yields samples, a path or a hub id. What is not given is a part of another that shares no sample with it.
    `num_calibration_samples`: so many are read, 512. `example_inputs`: a batch of each input, where there is no data:
    what needs none is done, and judged on it. `transform_fn`: makes (inputs, label) of an item, where that
    cannot be told. `task`, `class_names`, `detections` (what a detector's outputs mean), `preprocess` (then samples are
    what it reads, such as uint8 images), `target`: as a recipe has them, where they cannot be found. `output_dir`: of
    the bundle, bundles/<name> as the command's; beside it its recipe, and what was an object, in `<name>.live`.

    Raises what `compress quantize` ends with: RecipeError, SourceError, PlanError; PlaceError for `output_dir`.
    """
    cache, quiet = given.get("cache"), given.get("quiet", False)
    if isinstance(model, Result):
        own = ("output_dir", "cache", "quiet")
        if other := [name for name, value in given.items() if value is not None and name not in own]:
            raise RecipeError(f"{other[0]}: a result that is gone on with has its own data and target; leave it out")
        out = _choose_output(given, f"{model.recipe.name}-{scheme.lower()}")
        return _make_result(quantize_further(model.recipe, scheme, out, cache, quiet, ignore), out)
    said, out = _write_given(model, given, f"-{scheme.lower()}")
    return _make_result(quantize_model(said, scheme, out, cache, quiet, ignore, keep_module=True), out)


@_as_function
def prune(
    model: Any,
    speedup: float | None = None,
    *,
    max_params: float | None = None,
    max_seconds: float = 1800.0,
    ignore: Sequence[str] = (),
    **given: Unpack[Given],
) -> Result:
    """Remove what matters least until a model is so many times faster, or so much smaller, and judge what is left.

        result = compress.prune(net, speedup=1.5, train_dataset=loader, eval_dataset=test_loader)
        smaller = result.torch()

    `speedup`: measured on the target. `max_params`: the share of the weights that may be left. With a `train_dataset`
    what is left learns from it, for at most `max_seconds`, to give what the whole model gave; without one its layers
    are fitted to calibration samples alone. All else, and errors, as of `quantize`.
    """
    if (speedup is None) == (max_params is None):
        raise RecipeError("prune: say how much goes: speedup=1.5, or max_params=0.5")
    _require_data(given, "what matters least is measured on samples")
    said, out = _write_given(model, given, "-pruned")
    draft, _ = draft_for(said, out)
    assert draft.inputs is not None
    budget = {"speedup": speedup} if max_params is None else {"max_params": max_params}
    passes: list[PassMapping] = [{"kind": "prune_channels", **budget, **({"ignore": list(ignore)} if ignore else {})}]
    passes += [make_training(draft.task, max_seconds)] if given.get("train_dataset") is not None else []
    gates = choose_gates(draft.task, draft.has_labels, n_samples=draft.n_samples.get("evaluation"))
    name, told = f"{draft.recipe['name']}-pruned", [describe_passes(passes)]
    cache, quiet = given.get("cache"), given.get("quiet", False)
    report = apply_passes(draft, passes, gates, name, told, out, cache, quiet, keep_module=True)
    return _make_result(report, out)


@_as_function
def auto(model: Any, goal: str, *, budget_seconds: float | None = None, **given: Unpack[Given]) -> Result:
    """Find the passes with which a model reaches a goal, and give the best bundle that was found.

        result = compress.auto(net, "size >= 4x, top1 drop <= 0.01", train_dataset=loader, eval_dataset=test_loader)
        result.verdict, result.study

    `goal`: as `compress auto` reads it. `budget_seconds`: when to end; default: an hour. All else as of `quantize`.
    """
    _require_data(given, "a goal is judged on samples")
    said, out = _write_given(model, given, "-auto")
    cache, quiet = given.get("cache"), given.get("quiet", False)
    study = reach_goal(replace(said, goal=goal), out, budget_seconds, cache, quiet, keep_module=True)
    if study.nearest is None or study.bundle is None:
        raise PlanError(f"{study.folder}: nothing was built: {study.ended}")
    return Result(study.read_report(study.nearest), study.bundle, load_recipe(study.folder / FOUND), study)


@_as_function
def bench(model: Any, *, budget_seconds: float | None = None, **given: Unpack[Given]) -> BenchTable:
    """Measure every format on every backend that this machine has, in one table, and write the best one's recipe.

    `budget_seconds`: when to end; default: five minutes. All else as of `quantize`.
    """
    said, out = _write_given(model, given, "-bench")
    return bench_model(said, out, budget_seconds, given.get("cache"), choose_log(given.get("quiet", False)))


def plan(
    recipe: RecipeGiven,
    cache: Path | None = None,
    *,
    verify: bool = False,
    model: Any = None,
    processing_class: Any = None,
) -> Plan:
    """Say what a recipe would do, layer by layer, and whether it can work; all arguments as for `apply`."""
    typed = _read_recipe(recipe)
    return make_plan(_put_model(typed, model, processing_class, name_output(typed.name)), cache, verify=verify)


def apply(
    recipe: RecipeGiven,
    out: Path | str | None = None,
    cache: Path | None = None,
    quiet: bool = False,
    verify: bool = False,
    earlier: StoredReport | None = None,
    *,
    model: Any = None,
    processing_class: Any = None,
) -> Result:
    """Do what a recipe says, judge the bundle and write it to `out` (default: bundles/<name>).

        result = compress.apply("recipe.yaml", model=net)

    `recipe`: a file, a `Recipe`, or a mapping as the file has it. `model`: as for `quantize`; it takes the place of the
    recipe's. `verify`: digests of weight files are read again. `earlier`: a report that the verdict is held against.
    None in a further process of one launch, which has done its share. Raises CompressError and runtime failures.
    """
    typed = _read_recipe(recipe)
    folder = Path(out) if out is not None else name_output(typed.name)
    typed = _put_model(typed, model, processing_class, folder)
    return _make_result(apply_recipe(typed, folder, cache, quiet, verify, earlier), folder, typed)


def sweep(
    recipe: RecipeGiven, out: Path | str | None = None, cache: Path | None = None, *, model: Any = None, **options: Any
) -> Study:
    """Try the points of a recipe's `search:`, or pursue its `goal`; `options` as of `compress.search.sweep.sweep`.

    `model`: as for `apply`.
    """
    typed = _read_recipe(recipe)
    folder = Path(out) if out is not None else name_output(typed.name)
    typed = _put_model(typed, model, options.pop("processing_class", None), folder)
    return (pursue if typed.goal else search)(typed, folder, cache, **options)


def _read_recipe(recipe: RecipeGiven) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    return make_recipe(recipe, Path()) if isinstance(recipe, Mapping) else load_recipe(Path(recipe))


def _put_model(recipe: Recipe, model: Any, processing_class: Any, out: Path) -> Recipe:
    """Return the recipe with another model in the place of its own."""
    if model is None:
        return recipe
    given = write_model(model, _name_folder(out), processing_class)
    source = find_model_source(given.source, Path())
    changes: dict[str, Any] = {"source": source, "weights": given.weights, "args": {}, "revision": None}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=changes)})


def _write_given(model: Any, given: Given, ending: str) -> tuple[NewAnswers, Path]:
    """Write model and data as far as they are objects; return what a command's flags would say, and the bundle."""
    known = Given.__annotations__
    if unknown := [name for name in given if name not in known]:
        raise TypeError(f"there is no argument '{unknown[0]}'{did_you_mean(unknown[0], list(known))}")
    name = _name_model(model)
    out = _choose_output(given, name + ending)
    folder = _name_folder(out)
    written = write_model(model, folder, given.get("processing_class"))
    made = given.get("preprocess") is not None  # inputs are made of samples: the model cannot be called with these
    sets: dict[str, Any] = _write_sets(given, folder, replace(written.reads, call=None) if made else written.reads)
    described = {name: given[name] for name in DESCRIBED if given.get(name) is not None}  # type: ignore[literal-required]
    said = NewAnswers(
        model=written.source,
        weights=written.weights,
        task=given.get("task"),
        preprocess=given.get("preprocess"),
        target=given.get("target"),
        name=name,
        calibration_samples=given.get("num_calibration_samples"),
        described=described,
        **sets,
    )
    return said, out


def _choose_output(given: Given, name: str) -> Path:
    output_dir = given.get("output_dir")
    return Path(output_dir) if output_dir is not None else name_output(name)


def _require_data(given: Given, why: str) -> None:
    if all(given.get(name) is None for name in ("calibration_dataset", "train_dataset", "eval_dataset")):
        raise RecipeError(f"{why}: give data, as train_dataset and eval_dataset, or as calibration_dataset alone")


def _write_sets(given: Given, folder: Path, reads: Reads) -> dict[str, DataGiven]:
    """Write the sets that are objects; return them by the flags that they stand for."""
    n = given.get("num_calibration_samples", DEFAULTS["num_calibration_samples"])
    sets = {name: given.get(f"{name}_dataset") for name in ("calibration", "train", "eval")}
    there = [name for name, dataset in sets.items() if dataset is not None]
    examples = given.get("example_inputs")
    if not there and examples is not None:
        columns = _name_examples(examples, reads)
        return {"evaluation": write_set(columns, folder / "evaluation", "example_inputs", reads)}
    flags, most = {"calibration": "calibration", "train": "train", "eval": "evaluation"}, {"calibration": n}
    if there and ("eval" not in there or len(there) == 1):
        flags[there[-1]] = "data"  # divided: into samples to judge on, and others to learn from or to calibrate with
        most = {"calibration": 2 * n if there == ["calibration"] else n}
    transform_fn = given.get("transform_fn")
    return {
        flags[name]: write_set(
            sets[name], folder / flags[name], f"{name}_dataset", reads, transform_fn, most.get(name), name == "train"
        )
        for name in there
    }


def _name_examples(examples: Any, reads: Reads) -> Mapping[str, Any]:
    """Return a batch of each input by the names that the model has for them."""
    if isinstance(examples, Mapping):
        return examples
    values = examples if isinstance(examples, tuple | list) else (examples,)
    if len(values) != len(reads.names):
        raise SourceError(
            f"example_inputs: {len(values)}, and the model reads {', '.join(reads.names)}; give one of each"
        )
    return dict(zip(reads.names, values, strict=True))


def _name_folder(out: Path) -> Path:
    return out.with_name(out.name + HELD).absolute()


def _name_model(model: Any) -> str:
    """Return what a recipe of the model is called."""
    if isinstance(model, str | Path):
        return name_recipe(find_model_source(str(model), Path()))
    named = getattr(getattr(model, "config", None), "_name_or_path", "") or getattr(
        getattr(model, "graph", None), "name", ""
    )
    text = str(named).rpartition("/")[2] or type(model).__name__.lower()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._") or "model"


def _make_result(report: Report | None, out: Path, recipe: Recipe | None = None) -> Result:
    """Return the result; None, for all its type says, in a further process of one launch, which has done its share.

    `recipe`: what made the bundle; None: the file beside it.
    """
    if report is None:
        return cast(Result, None)
    return Result(report, out, load_recipe(name_recipe_file(out)) if recipe is None else recipe)
