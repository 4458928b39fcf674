"""An importance matrix that a recipe names: whose layers its tensors are, and whether they are this model's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from compress.blocks.experts import unstack_experts
from compress.blocks.materialise import tied_names
from compress.blocks.sizes import transformers_config
from compress.errors import SourceError
from compress.export.gguf_trial import describe_form, find_form, read_model
from compress.export.imatrix import match_imatrix, read_imatrix
from compress.facts import Note, PassPlan
from compress.models.meta import module_on_meta
from compress.passes import Pass
from compress.passes.choosing import list_some
from compress.planning.inputs import Inputs
from compress.recipe.schema import Recipe
from compress.store.paths import resolve_path


def locate_importance(recipe: Recipe, pass_: Pass) -> Path:
    """Return the file that a pass names. Raises SourceError, which names the key."""
    try:
        return resolve_path(recipe.root, pass_.importance_file)
    except SourceError as error:
        raise SourceError([f"{pass_.kind}: importance: {problem}" for problem in error.problems]) from error


def read_importance(inputs: Inputs, pass_: Pass) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return layer -> mean square of each of its inputs, by the file that a pass names, and why it is not this model's.

    Raises SourceError for a file that cannot be read, ExportError without the `gguf` package.
    """
    means = read_imatrix(locate_importance(inputs.recipe, pass_))
    if inputs.facts.classless:
        return {}, ["its names are of GGUF, which no shards: source tells; use source: dir:"]
    module, _ = module_on_meta(inputs.source)
    if transformers_config(module) is None:
        return {}, ["its names are of GGUF, which are known of transformers' models; use importance: true"]
    unstack_experts(module)
    finding = find_form(module)
    if finding.form is None:
        return {}, [f"its names are of GGUF, and {finding.problem}; or use importance: true"]
    entries, _ = describe_form(module, read_model(module), finding, set(tied_names(module)))
    importance, problems = match_imatrix(entries, means)
    return importance, [f"{problem}; give the file of this model" for problem in problems]


def check_importance(inputs: Inputs, index: int, plan: PassPlan) -> tuple[list[str], list[Note]]:
    """Return why the file that the pass of that number names is not of the model, and a note on layers it lacks."""
    pass_ = inputs.recipe.passes[index]
    if not pass_.importance_file or pass_.stage_on(inputs.facts) != "blocks":
        return [], []
    where = f"passes.{index}: {pass_.kind}: importance: {Path(pass_.importance_file).name}"
    if index:
        before = inputs.recipe.passes[0].kind
        return [f"{where} is of the model as it came, and {before} changes it before; use importance: true"], []
    importance, problems = read_importance(inputs, pass_)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return [f"{where}: {problems[0]}{more}"], []
    tables = {layer.name for layer in inputs.facts.layers if layer.role in ("table", "head", "tied")}
    missing = [layer for layer in plan.schemes if layer not in importance and layer not in tables]
    if missing and len(missing) == len(plan.schemes):
        return [f"{where} has nothing of the layers that are rounded; give the file of this model"], []
    text = f"{where} has nothing of {list_some(missing)}: all of their inputs weigh alike"
    return [], [Note("warning", text)] if missing else []
