"""What a recipe is put together from: included files, variables, overrides, paths."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_strategies import ANYTHING, TEXTS, as_text, values
from recipe_texts import GOOD, RECORDS, load, only, problems, write

from compress.errors import RecipeError, SourceError
from compress.store.paths import resolve_path

# --- include ----------------------------------------------------------------------------------------------------------


def test_include_merges_mappings_replaces_lists_and_is_relative_to_its_file() -> None:
    write(
        "validate: {confidence: 0.9, gates: [{metric: top5, min: 0.1}]}\nmodel: {class_names: [a, b]}\n",
        "deep/er/c.yaml",
    )
    write("include: er/c.yaml\nname: base\nseed: 3\nmodel: {weights: w, trust_remote_code: true}\n", "deep/b.yaml")
    recipe = load("include: [deep/b.yaml]\n" + GOOD)
    assert (recipe.name, recipe.seed, recipe.validate_.confidence) == ("tiny", 3, 0.9)
    assert (recipe.model.weights, recipe.model.class_names) == ("w", ("a", "b"))
    assert [gate.metric for gate in recipe.validate_.gates] == ["top1"]


def test_of_several_includes_the_later_one_wins() -> None:
    write("seed: 1\ndescription: one\n", "one.yaml")
    write("seed: 2\n", "two.yaml")
    recipe = load("include: [one.yaml, two.yaml]\n" + GOOD)
    assert (recipe.seed, recipe.description) == (2, "one")


def test_a_problem_of_an_included_file_is_placed_there() -> None:
    write("\nlimits:\n  memory: 3\n", "sub/base.yaml")
    assert only("include: sub/base.yaml\n" + GOOD).startswith(
        "sub/base.yaml:3:3: limits.memory: unknown key; did you mean 'memory_gib'"
    )


def test_include_refusals() -> None:
    write("include: a.yaml\n", "b.yaml")
    assert only("include: b.yaml\n" + GOOD) == (
        "b.yaml:1:10: include: a.yaml: files include each other in a circle: a.yaml -> b.yaml -> a.yaml"
    )
    assert (
        only("include: c.yaml\n" + GOOD) == "a.yaml:1:10: include: c.yaml: no such file: c.yaml; did you mean 'b.yaml'?"
    )
    assert only("include: c.yaml\n").startswith("a.yaml:1:10: include: c.yaml: no such file")  # not: missing key 'name'
    assert only("include: [3]\n" + GOOD).startswith("a.yaml:1:11: include.0: expected the path of a recipe file")
    assert only("include: ${x}\n" + GOOD).startswith(
        "a.yaml:1:10: include: expected the path of a recipe file, without variables"
    )
    write("a: [", "broken.yaml")
    assert only("include: broken.yaml\n" + GOOD).startswith("broken.yaml:1:5: not YAML: ")
    write("", "empty.yaml")
    assert only("include: empty.yaml\n" + GOOD).startswith("empty.yaml:1:1: the file is empty")


# --- variables --------------------------------------------------------------------------------------------------------


def with_vars(variables: str, description: str) -> str:
    return f"vars: {variables}\n{GOOD}description: {description}\n"


def test_a_whole_value_keeps_its_type_and_a_part_becomes_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITS", "4")
    monkeypatch.setenv("WHERE", "here")
    text = GOOD.replace("bits: 8", 'bits: "${env:BITS}", ignore: "${skip}", symmetric: "${yes}"')
    text = text.replace("max_drop: 0.01", 'max_drop: "${env:DROP:-0.5}"')
    variables = "{skip: [a, '${env:WHERE}'], yes: true, n: 3, bench: '${env:WHERE}/${n}'}"
    recipe = load(f"vars: {variables}\n{text}description: 'at ${{bench}}, ${{yes}}, $${{n}}, ${{env:WHERE}}'\n")
    rtn: Any = recipe.passes[0]
    assert (rtn.bits, rtn.ignore, rtn.symmetric) == (4, ("a", "here"), True)
    assert recipe.validate_.gates[0].max_drop == 0.5
    assert recipe.description == "at here/3, true, ${n}, here"


def test_package_folder_is_found_without_importing_it() -> None:
    Path("pkg_not_imported").mkdir()
    Path("pkg_not_imported/__init__.py").write_text("raise RuntimeError('imported')")
    import sys

    sys.path.insert(0, os.getcwd())
    try:
        assert (
            load(GOOD + "description: '${package:pkg_not_imported}/x'\n").description
            == f"{Path.cwd()}/pkg_not_imported/x"
        )
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize(
    ("variables", "description", "message"),
    [
        ("{bench: x}", "${bnech}", "a.yaml:12:14: description: unknown variable 'bnech'; did you mean 'bench'?"),
        ("{}", "${bench}", "unknown variable 'bench'; define it under 'vars:'"),
        ("{a: '${b}', b: 'x${a}'}", "x", "vars.b: variables that stand for each other: a -> b -> a"),
        ("{a: '${a}'}", "x", "a.yaml:1:11: vars.a: variables that stand for each other: a -> a"),
        ("{a: [1]}", "x ${a}", "description: ${a} is a list, which cannot stand inside a text"),
        (
            "{}",
            "${env:SURELY_NOT_SET}",
            "environment variable 'SURELY_NOT_SET' is not set; set it, or write ${env:SURELY_NOT_SET:-default}",
        ),
        ("{}", "${evn:HOME}", "${evn:HOME}: unknown source 'evn:'; did you mean 'env'?"),
        (
            "{}",
            "${package:surely_not_here}",
            "package 'surely_not_here' is not installed here: pip install surely-not-here",
        ),
        ("{}", "${package:a.b}", "${package:a.b}: write the import name of a top-level package"),
        ("{}", "${package:textwrap}", "'textwrap' is a single module, not a package with a folder"),
        ("{}", "'${env:A:-${b}}'", "or a reference inside a reference; write '$${' for a plain '${'"),
        ("{}", "'${open'", "'${' without its '}'"),
        ("[1]", "x", "a.yaml:1:7: vars: expected a mapping of names to values"),
        ("{a b: 1}", "x", "a.yaml:1:8: vars.a b: a name is letters, digits, _ and -, with a letter or _ first"),
    ],
)
def test_references_to_nothing(variables: str, description: str, message: str) -> None:
    assert message in only(with_vars(variables, description))


def test_a_broken_variable_is_said_once_where_it_is_defined() -> None:
    text = "vars: {n: '${env:SURELY_NOT_SET}'}\n" + GOOD.replace("bits: 8", "bits: '${n}'")
    assert only(text).startswith("a.yaml:1:11: vars.n: environment variable 'SURELY_NOT_SET' is not set")


def test_a_wrong_value_names_the_variable_that_it_came_from() -> None:
    text = "vars: {n: 9}\n" + GOOD.replace("bits: 8", "bits: '${n}'")
    expected = "expected a whole number of at least 2 and at most 8 or a mapping, found 9 (from ${n})"
    assert only(text) == f"a.yaml:6:23: passes.0.bits: {expected}"


# --- --set ------------------------------------------------------------------------------------------------------------


def test_overrides() -> None:
    text = "vars: {n: 8}\n" + GOOD.replace("bits: 8", "bits: '${n}'")
    overrides = (
        "vars.n=4",
        "model.weights=w.pt",
        "data.train.source=npz:x",
        "data.train.samples=5",
        "model.args.a.b=[1]",
    )
    recipe = load(
        text, *overrides, "passes.1={kind: fold_batchnorm}", "validate.gates.0.max_drop=0.5", "seed=1", "seed=2"
    )
    assert recipe.passes[0].bits == 4  # type: ignore[attr-defined]
    assert (recipe.model.weights, recipe.model.args, recipe.seed) == ("w.pt", {"a": {"b": [1]}}, 2)
    assert recipe.data.train is not None and recipe.data.train.samples == 5
    assert recipe.passes[1].kind == "fold_batchnorm"
    assert recipe.validate_.gates[0].max_drop == 0.5


SETTINGS: list[tuple[tuple[str | int, ...], st.SearchStrategy[Any]]] = [
    (("seed",), values(RECORDS["seed"]) | ANYTHING),
    (("description",), TEXTS | ANYTHING),
    (("model", "args", "x"), ANYTHING),
    (("model", "args"), st.dictionaries(TEXTS, ANYTHING, max_size=3)),
    (("preprocess",), values(RECORDS["preprocess"])),
    (("data",), values(RECORDS["data"])),
    (("passes", 0), values(RECORDS["passes"]["items"])),
    (("passes", 0, "bits"), st.integers(0, 10)),
    (("passes", 1, "ignore"), st.lists(TEXTS, max_size=3)),
    (("validate", "gates", 0, "max_drop"), st.floats(-1, 1)),
    (("validate", "confidence"), st.floats(0, 1)),
]
"""Where something is set, and what."""


@settings(max_examples=40)
@given(st.sampled_from(SETTINGS).flatmap(lambda setting: st.tuples(st.just(setting[0]), setting[1])))
def test_an_override_gives_the_recipe_edited_by_hand(setting: tuple[tuple[str | int, ...], Any]) -> None:
    """Or both are refused."""
    path, value = setting
    edited = yaml.safe_load(GOOD)
    inner = edited
    for key in path[:-1]:
        inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner[key]
    inner[path[-1]] = value
    recipes = []
    for text, *overrides in ((as_text(edited),), (GOOD, f"{'.'.join(map(str, path))}={as_text(value)}")):
        try:
            recipes.append(repr(load(text, *overrides).model_dump()))
        except RecipeError:
            recipes.append("refused")
    assert recipes[0] == recipes[1]


def test_a_variable_that_is_only_used_may_be_set() -> None:
    assert load(GOOD + "description: '${where}'\n", "vars.where=there").description == "there"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "passes.0.bits=9",
            "--set passes.0.bits: expected a whole number of at least 2 and at most 8 or a mapping, found 9",
        ),
        ("passes.0.bitz=4", "--set passes.0.bitz: unknown key 'bitz' in passes.0; did you mean 'bits'?"),
        ("pases.0.bits=4", "--set pases.0.bits: unknown key 'pases'; did you mean 'passes'?"),
        ("passes.9.bits=4", "--set passes.9.bits: passes has no item 9; it has 2 (0 to 1)"),
        ("passes.x.bits=4", "--set passes.x.bits: passes is a list: expected a number, found 'x'"),
        ("export.0.opset=20", "--set export.0.opset: export is not in the recipe: set the whole list"),
        ("seed.x=4", "--set seed.x: seed has no keys: expected a whole number"),
        ("name", "--set name: write PATH=VALUE, for example passes.0.bits=4"),
        ("name=[1", "--set name: not YAML: "),
        ("vars.n=4", "--set vars.n: the recipe has no variable 'n'"),
        ("include=b.yaml", "--set include: unknown key 'include'"),
        ("passes.0={kind: rtn, bitz: 4}", "--set passes.0: passes.0.bitz: unknown key; did you mean 'bits'?"),
        ("passes.0.kind=in8", "--set passes.0.kind: unknown pass 'in8'; did you mean 'int8'?"),
        ("data.train.samples=4", "--set data.train.samples: data.train: missing key 'source' (text such as npz:<file>"),
        ("name=${nope}", "--set name: unknown variable 'nope'; define it under 'vars:'"),
    ],
)
def test_override_refusals(override: str, message: str) -> None:
    assert any(line.startswith(message) for line in problems(GOOD, override))


def test_setting_inside_a_variable_says_to_set_the_variable() -> None:
    text = "vars: {m: {source: 'npz:x'}}\ndata: {train: '${m}'}\n" + GOOD
    assert only(text, "data.train.samples=3") == (
        "--set data.train.samples: data.train is ${m} in the recipe; set the variable instead"
    )
    assert load(text, "vars.m.samples=3").data.train.samples == 3  # type: ignore[union-attr]


# --- paths ------------------------------------------------------------------------------------------------------------


def test_resolve_path_looks_in_the_working_directory_then_in_the_recipes_folder(tmp_path: Path) -> None:
    root = tmp_path / "recipes"
    root.mkdir()
    (root / "x").touch()
    assert resolve_path(root, "x") == root / "x"
    Path("x").touch()
    assert resolve_path(root, "x") == tmp_path / "x"
    assert resolve_path(root, str(root / "x")) == root / "x"
    with pytest.raises(SourceError) as caught:
        resolve_path(root, "y")
    assert str(caught.value) == f"y: no such file or folder; looked for {tmp_path / 'y'} and {root / 'y'}"


def test_the_resolved_recipe_keeps_paths_as_written() -> None:
    recipe = load(GOOD, "model.weights=../w.safetensors")
    assert recipe.model.weights == "../w.safetensors"
    assert "root" not in json.loads(recipe.model_dump_json())
