"""`search:` in a recipe: what stands there is tried first, points are explicit recipes, what is wrong is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from studies import SEARCHED, searched_space, write_searched

from compress.errors import RecipeError
from compress.recipe.load import load_recipe, recipe_to_yaml
from compress.recipe.points import open_space

CHAINS: dict[str, Any] = {
    "passes": {"choice": {"pruned": [{"kind": "prune_channels"}, {"kind": "int8"}], "plain": [{"kind": "int8"}]}},
    "passes.pruned.0.ratio": {"range": [0.2, 0.4]},
    "passes.plain.0.calibration": {"choice": ["mse", "minmax"]},
}


def refusal(folder: Path, **search: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write_searched(folder, **search))
    return str(caught.value)


def test_a_place_that_says_nothing_starts_in_the_middle_of_its_range(tmp_path: Path) -> None:
    space = searched_space(tmp_path)
    assert space.start() == {"passes.0.ratio": 0.35, "passes.1.calibration": "mse"}


def test_what_the_recipe_means_as_it_stands_is_tried_first(tmp_path: Path) -> None:
    """What it says, and of a place that it does not mention the default."""
    spaces = {"passes.1.percentile": {"range": [99.0, 100.0]}, "passes.0.ratio": {"range": [0.1, 0.6]}}
    assert searched_space(tmp_path, space=spaces).start()["passes.1.percentile"] == 99.99


def test_a_point_is_an_explicit_recipe_with_the_constraints_among_its_gates(tmp_path: Path) -> None:
    recipe = searched_space(tmp_path).recipe_at({"passes.0.ratio": 0.5, "passes.1.calibration": "minmax"})
    assert recipe.search is None
    assert [gate.metric for gate in recipe.validate_.gates] == ["top1"]
    (tmp_path / "explicit.yaml").write_text(recipe_to_yaml(recipe))
    assert load_recipe(tmp_path / "explicit.yaml") == recipe
    assert recipe.passes[0].model_dump()["ratio"] == 0.5
    assert recipe.passes[1].model_dump()["calibration"] == "minmax"


def test_chains_compete_each_with_its_own_places(tmp_path: Path) -> None:
    file = write_searched(tmp_path, {"passes": []}, space=CHAINS)
    space = open_space(load_recipe(file))
    assert space.start() == {"passes": "pruned", "passes.pruned.0.ratio": 0.3}
    assert space.start({"passes": "plain"}) == {"passes": "plain", "passes.plain.0.calibration": "mse"}
    kinds = [
        pass_.kind for pass_ in space.recipe_at({"passes": "plain", "passes.plain.0.calibration": "minmax"}).passes
    ]
    assert kinds == ["int8"]


def test_a_choice_inside_of_a_choice(tmp_path: Path) -> None:
    spaces = {
        "passes": {"choice": {"two": [None, {"kind": "int8"}], "one": [{"kind": "int8"}]}},
        "passes.two.0": {"choice": {"cut": {"kind": "prune_channels"}, "even": {"kind": "equalize"}}},
        "passes.two.0.cut.ratio": {"range": [0.2, 0.4]},
    }
    file = write_searched(tmp_path, {"passes": []}, space=spaces)
    space = open_space(load_recipe(file))
    assert space.start() == {"passes": "two", "passes.two.0": "cut", "passes.two.0.cut.ratio": 0.3}
    assert space.recipe_at({"passes": "two", "passes.two.0": "even"}).passes[0].kind == "equalize"


def test_a_searched_recipe_that_is_written_out_means_the_same(tmp_path: Path) -> None:
    recipe = load_recipe(write_searched(tmp_path))
    (tmp_path / "written.yaml").write_text(recipe_to_yaml(recipe))
    assert load_recipe(tmp_path / "written.yaml") == recipe


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({"space": {}}, "space is empty: name what may be another"),
        ({"space": {"passes.1.calibration": {"choice": []}}}, "choice is empty: name the values"),
        ({"space": {"passes.0.ratio": {"range": [0.6, 0.1]}}}, "range is [0.6, 0.1], which is empty"),
        ({"space": {"passes.0.ratio": {"range": [0, 0.5], "log": True}}}, "log: true needs numbers above 0"),
        (
            {"space": {"passes.0.ratio": {"choice": [0.1, 0.2], "range": [0.1, 0.2]}}},
            "give exactly one of choice, range",
        ),
        (
            {"space": {"passes.0.ratoi": {"range": [0.1, 0.6]}}},
            "unknown key 'ratoi' in passes.0; did you mean 'ratio'?",
        ),
        ({"space": {"passes.4.ratio": {"range": [0.1, 0.6]}}}, "passes has no item 4"),
        (
            {"space": {"passes.0.ratio": {"range": [0.1, 1.5]}}},
            "range.1: expected a number of more than 0 and less than 1",
        ),
        (
            {"space": {"passes.0.ratio": {"range": [0.1, 0.6]}, "passes.1.calibration": {"range": [1, 2]}}},
            "a range is of numbers, and passes.1.calibration is one of",
        ),
        (
            {"space": {"passes.0.ratio": {"choice": [0.2]}, "passes.1.calibration": {"choice": ["mse", "mes"]}}},
            "choice.1: expected one of 'minmax', 'percentile', 'entropy', 'mse', found text 'mes'; did you mean 'mse'?",
        ),
        ({"space": {"passes.0.ratio": {"choice": [0.2]}, "name": {"choice": ["a b"]}}}, "'searched' stands there"),
        ({"goals": ["smaller size"]}, "'smaller size': write minimize or maximize and a metric"),
        ({"goals": ["minimize top1"]}, "higher top1 is better: write maximize top1"),
        ({"goals": ["minimize nll"]}, "metric 'nll' does not fit task image-classification"),
        ({"goals": ["maximize top11"]}, "unknown metric 'top11'; did you mean 'top1'?"),
        ({"constraints": [{"metric": "nll", "max_drop": 0.1}]}, "metric 'nll' does not fit task"),
        (
            {"constraints": [{"metric": "top1", "min": 0.9}, {"metric": "top1", "max": 0.8}]},
            "top1 is to be at least 0.9 and at most 0.8, which nothing is",
        ),
    ],
)
def test_what_is_wrong_is_said_at_once(search: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refusal(tmp_path, **search)


def test_apply_takes_the_values_as_they_stand_and_says_so(tmp_path: Path) -> None:
    from makers import changed, image_recipe, plan

    recipe = changed(image_recipe(tmp_path), search={**SEARCHED["search"], "space": {"seed": {"choice": [0, 1]}}})
    made = plan(recipe, tmp_path, tmp_path / "cache")
    assert made.recipe.search is None
    assert any("`compress sweep` tries the others" in note.text for note in made.notes)
