"""`compress new`: write a recipe to start from, of a model that is there, of answers, of a task, or an example."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.errors import RecipeError
from compress.formats.targets import TARGETS
from compress.recipe.examples import describe_example, find_example, find_pages, list_examples
from compress.recipe.goal import FORMS, read_goals, split_goal
from compress.recipe.templates import format_draft, starter, write_with_schema
from compress.store.output import name_output
from compress.tasks import TORCH_TASKS
from runtime.metrics import SIZES
from runtime.report.terminal import align, find_width, fold

if TYPE_CHECKING:
    from compress.data.find_sets import DataGiven
    from compress.planning.draft import Draft

Ask = Callable[[str, str], str]
"""Asks a question with a default, and returns the answer."""


@dataclass(frozen=True)
class NewAnswers:
    """What a user says of a recipe: `draft_recipe`'s arguments and a goal, as flags give them; None: not said.

    Sets, and `preprocess`, may be mappings, as in a recipe. `name`: of the recipe, where the model's source has none.
    `calibration_samples`: at most so many. `described`: further keys of the recipe's `model`.
    """

    model: str | None = None
    weights: str | None = None
    task: str | None = None
    preprocess: str | Mapping[str, Any] | None = None
    data: DataGiven | None = None
    calibration: DataGiven | None = None
    train: DataGiven | None = None
    evaluation: DataGiven | None = None
    target: str | None = None
    goal: str | None = None
    name: str | None = None
    calibration_samples: int | None = None
    described: Mapping[str, Any] | None = None


def write_recipe(
    out: Path, said: NewAnswers, source: str | None = None, ask: Ask | None = None, example: str | None = None
) -> list[str]:
    """Write a recipe to `out`: of the model if one is given, else of the task; return lines for the user.

    `source`: put into the template of a task, whatever it names. `ask`: asks for what was not said, where nothing was.
    `example`: the name of a recipe that comes with the project, which is copied; "list" writes none and names all.
    Raises RecipeError, SourceError, PlanError; OutputError and UsageError where `out` cannot be written.
    """
    if example is not None:
        if said != NewAnswers() or source is not None:
            raise RecipeError("--example is copied as it stands: give no other option but --out")
        return _list_all() if example == "list" else _copy_example(example, out)
    if ask is not None and said == NewAnswers() and source is None:
        said = ask_for_answers(ask)
    if said.model is None:
        if extra := [name for name, value in asdict(said).items() if value is not None and name != "task"]:
            raise RecipeError(f"--{extra[0]} is of a model that is there: give --model, too")
        write_with_schema(out, starter(said.task, source))
        return [_tell_next(out)]
    if source is not None:
        raise RecipeError("--source is put into a template as it stands; give --model alone")
    draft = make_draft(said, out.parent)
    text, notes = format_working_recipe(draft)
    write_with_schema(out, text)
    return [*(f"note: {note}" for note in notes), _tell_next(out)]


def _list_all() -> list[str]:
    rows = [(name, describe_example(file)) for name, file in list_examples().items()]
    return [line for row in align(rows) for line in fold(row, find_width())]


def _copy_example(name: str, out: Path) -> list[str]:
    recipe = find_example(name)
    write_with_schema(out, recipe.read_text(encoding="utf-8").partition("\n")[2])  # less the line that names its schema
    return [*(f"explained in {page}" for page in find_pages(recipe)), _tell_next(out)]


def _tell_next(out: Path) -> str:
    next_commands = f"see what it says with `compress check {out}`, what it does with `compress plan {out}`"
    return f"{out}: written, and schema.json for editors; {next_commands}"


def can_ask() -> bool:
    """Return whether somebody sits at a terminal to be asked."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def ask_for_answers(ask: Ask) -> NewAnswers:
    """Ask for model, weights, data and target; the task only where nothing tells it."""
    model = ask("Model (a folder, hub id, .onnx file or module:factory; empty: a template to fill in)", "")
    if not model:
        return NewAnswers(task=ask("Task", next(iter(TORCH_TASKS))))
    said = NewAnswers(model=model)
    if ".py:" in model or model.startswith("python:"):
        said = replace(said, weights=ask("Weights (a .safetensors file)", "") or None)
    said = replace(said, data=ask("Data (a folder, file or hub id; empty: none yet)", "") or None)
    try:
        found = make_draft(said, Path()).task
    except RecipeError as error:
        if not any("--task" in problem for problem in error.problems):
            raise
        found = next(iter(TORCH_TASKS))
    task = ask("Task", found)
    target = ask(f"Target ({', '.join(TARGETS)})", next(iter(TARGETS)))
    goal = ask("Goal, as in size >= 6x, latency_p50 >= 3x (empty: the usual passes)", "") if said.data else ""
    return replace(said, task=task, target=target, goal=goal or None)


def choose_output(said: NewAnswers, ending: str = "") -> Path:
    """Return where the bundle of a model goes where nobody said, its name with `ending` behind it. SourceError."""
    from compress.planning.draft import find_model_source, name_recipe

    assert said.model is not None
    return name_output(name_recipe(find_model_source(said.model, Path())) + ending)


def make_draft(said: NewAnswers, root: Path) -> Draft:
    """Draft the recipe of what was said, to stand in `root`. Errors as `draft_recipe`."""
    from compress.data.find_sets import parse_mapping  # with torch, which a template does without
    from compress.planning.draft import draft_recipe

    assert said.model is not None
    goal = _read_goal(said.goal)
    draft = draft_recipe(
        said.model,
        task=said.task,
        weights=said.weights,
        preprocess=parse_mapping(shaped, "--preprocess") if isinstance(shaped := said.preprocess, str) else shaped,
        data=said.data,
        calibration=said.calibration,
        train=said.train,
        evaluation=said.evaluation,
        target=said.target,
        name=said.name,
        root=root,
        most_calibrated=said.calibration_samples,
        described=said.described,
    )
    return replace(draft, recipe=draft.recipe | {"goal": goal}) if goal else draft


def _read_goal(text: str | None) -> list[str]:
    """Return the terms of a goal. RecipeError for one that says none."""
    if text is None:
        return []
    try:
        read_goals(terms := split_goal(text))
    except ValueError as error:
        raise RecipeError(f"--goal: {error}") from error
    if not terms:
        raise RecipeError(f"--goal '{text}': write what is to be reached, as in {FORMS}")
    return terms


def format_working_recipe(draft: Draft) -> tuple[str, list[str]]:
    """Return a drafted recipe as YAML, with its goal or the usual passes and gates, and notes for the user."""
    from compress.planning.usual import UsualPasses, choose_gates, choose_passes, drop_unused_sets, usual_scheme

    if "goal" in draft.recipe:
        missing = [] if draft.inputs is not None else ["no --data: the recipe has no sets yet, and a goal needs them"]
        return format_draft(draft.recipe, draft.reasons), missing
    target = str(draft.recipe["target"])
    scheme = usual_scheme(target, draft.task)
    if draft.inputs is None:
        notes = ["no --data: the recipe has no sets yet; add data.evaluation, and data.calibration for its passes"]
        on_graph = TARGETS[target].reads == "onnx" and scheme == "INT8"
        chain = UsualPasses(({"kind": "int8"} if on_graph else {"kind": "gptq", "scheme": scheme},))
    else:
        notes = []
        has_data = "calibration" in draft.recipe.get("data", {})
        chain = choose_passes(scheme, target, draft.inputs.facts, has_data)
    n_samples, graph = draft.n_samples.get("evaluation"), "export" not in draft.recipe
    gates = choose_gates(draft.task, draft.inputs is None or draft.has_labels, speed=graph, n_samples=n_samples)
    if draft.inputs is not None and draft.inputs.facts.classless:
        gates = [gate for gate in gates if gate["metric"] in SIZES]
    recipe = drop_unused_sets(draft.recipe, chain.passes)
    return format_draft(recipe, draft.reasons, chain.passes, gates), [*notes, *chain.notes]
