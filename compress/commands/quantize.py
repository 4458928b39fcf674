"""`compress quantize`: a scheme's usual passes in one line, with the recipe that does the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.commands.new import NewAnswers, make_draft
from compress.execution.run import apply_recipe
from compress.formats.targets import TARGETS
from compress.planning.draft import Draft
from compress.planning.make_plan import make_plan
from compress.planning.synthetic import add_synthetic_set
from compress.planning.usual import (
    PassMapping,
    choose_gates,
    choose_passes,
    describe_passes,
    drop_unused_sets,
    find_scheme,
    parse_pass,
)
from compress.recipe.load import load_recipe
from compress.recipe.pinned import pin_recipe
from compress.recipe.schema import Recipe
from compress.recipe.templates import format_draft, write_new
from compress.store.run_log import choose_log
from runtime.errors import UsageError
from runtime.report.report import Report

WRITTEN = "Written by `compress quantize`"
"""How a file begins that may be written again."""


def quantize_model(
    said: NewAnswers,
    scheme: str,
    out: Path,
    cache: Path | None = None,
    quiet: bool = False,
    ignore: Sequence[str] = (),
    keep_module: bool = False,
) -> Report | None:
    """Write the bundle of a model in a scheme to `out` and its recipe to `<out>.yaml`; return the report of judging it.

    The gates are those of the task's quality, or nearness to the float model without labels. Without data there are
    none, and only passes that need none: it is judged on random samples, which is said. `ignore`: layers that stay as
    they are, by name, type or `re:` pattern. `keep_module`: as for `apply_passes`. None in a further process of one
    launch. Errors as `draft_recipe`, `choose_passes` and `apply_recipe`; UsageError where `<out>.yaml` is a file of
    another's.
    """
    name = find_scheme(scheme, said.target or next(iter(TARGETS)))
    _refuse_foreign(name_recipe_file(out))
    draft, synthetic = draft_for(said, out)
    target = str(draft.recipe["target"])
    assert draft.inputs is not None
    facts = draft.inputs.facts
    chain = choose_passes(name, target, facts, "calibration" in draft.recipe.get("data", {}), ignore)
    told = [f"{name} by {describe_passes(chain.passes)}", *chain.notes]
    told += ["judged on synthetic inputs: its size and times count, its quality does not"] if synthetic else []
    judged = not synthetic and not facts.classless
    gates = choose_gates(draft.task, draft.has_labels, n_samples=draft.n_samples.get("evaluation")) if judged else []
    name = f"{draft.recipe['name']}-{name.lower()}"
    return apply_passes(draft, chain.passes, gates, name, told, out, cache, quiet, keep_module)


def quantize_further(
    recipe: Recipe, scheme: str, out: Path, cache: Path | None, quiet: bool, ignore: Sequence[str] = ()
) -> Report | None:
    """Write the bundle of a recipe with a scheme's usual passes behind its own; all else as `quantize_model`.

    What its own passes left comes from the cache.
    """
    name = find_scheme(scheme, recipe.target)
    file = name_recipe_file(out)
    _refuse_foreign(file)
    facts = make_plan(recipe, cache, twins=False, timed=False).after
    chain = choose_passes(name, recipe.target, facts, recipe.data.calibration is not None, ignore)
    told = "; ".join([f"{name} by {describe_passes(chain.passes)} after {recipe.name}", *chain.notes])
    passes = (*recipe.passes, *map(parse_pass, chain.passes))
    whole = recipe.model_copy(update={"passes": passes, "name": f"{recipe.name}-{name.lower()}"}).at_root(recipe.root)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_new(file, f"# {WRITTEN}: {told}.\n{pin_recipe(whole)}", replace=True)
    choose_log(quiet)(f"{told}; recipe: {file}")
    return apply_recipe(load_recipe(file), out, cache, quiet)


def draft_for(said: NewAnswers, out: Path) -> tuple[Draft, bool]:
    """Return the draft of a recipe for the bundle `out`, with data, and whether that is drawn at random."""
    draft = make_draft(said, out.parent)
    if draft.inputs is not None:
        return draft, False
    return add_synthetic_set(draft, out.with_name(f"{out.name}.synthetic"), out.parent), True


def apply_passes(
    draft: Draft,
    passes: Sequence[PassMapping],
    gates: Sequence[Mapping[str, Any]],
    name: str,
    told: Sequence[str],
    out: Path,
    cache: Path | None,
    quiet: bool,
    keep_module: bool = False,
) -> Report | None:
    """Write the drafted recipe with these passes to `<out>.yaml`, and its bundle to `out`; as `quantize_model`.

    `keep_module`: the bundle keeps the torch module, where a pass changes it.
    """
    file = name_recipe_file(out)
    _refuse_foreign(file)
    assert draft.inputs is not None
    recipe = drop_unused_sets({**draft.recipe, "name": name}, passes)
    facts = draft.inputs.facts
    if keep_module and facts.source == "torch" and any(parse_pass(p).stage_on(facts) != "graph" for p in passes):
        recipe["keep_module"] = True
    out.parent.mkdir(parents=True, exist_ok=True)
    text = format_draft(recipe, draft.reasons, passes, gates, head=[f"{WRITTEN}: {'; '.join(told)}."])
    write_new(file, text, replace=True)
    choose_log(quiet)(f"{'; '.join(told)}; recipe: {file}")
    return apply_recipe(load_recipe(file), out, cache, quiet)


def name_recipe_file(out: Path) -> Path:
    """Return where the recipe of the bundle `out` lies."""
    return out.with_name(out.name + ".yaml")


def _refuse_foreign(file: Path) -> None:
    """Raise UsageError for a file that is not one that this command wrote."""
    if file.is_file() and not file.read_text(encoding="utf-8", errors="replace").startswith(f"# {WRITTEN}"):
        raise UsageError(f"{file}: the recipe would be written there, and it is another file; give another --out")
