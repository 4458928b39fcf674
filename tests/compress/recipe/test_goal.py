"""`goal:`, what a recipe is to reach in words, becomes gates; what is no goal says what one is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from makers import changed, image_recipe, write_recipe

from compress.errors import RecipeError
from compress.recipe.goal import list_directions, read_goals, read_term, split_goal
from compress.recipe.load import load_recipe
from runtime.bundle.format import Gate


@pytest.mark.parametrize(
    ("term", "gate"),
    [
        ("size >= 6x", Gate("size_ratio", min=6)),
        ("size<=2MB", Gate("size", max=2e6)),
        ("latency_p50 >= 3.5x", Gate("latency_p50", min_speedup=3.5)),
        ("latency_p95 <= 2 ms", Gate("latency_p95", max=2)),
        ("throughput >= 2x", Gate("throughput", min_speedup=2)),
        ("peak_memory >= 2x", Gate("peak_memory", min_retained=2)),
        ("top1 drop <= 0.013", Gate("top1", max_drop=0.013)),
        ("nll rise <= 0.05", Gate("nll", max_drop=0.05)),
        ("top1 retained >= 0.99", Gate("top1", min_retained=0.99)),
        ("top1 >= 0.9", Gate("top1", min=0.9)),
        ("python:own.py:score >= 1", Gate("python:own.py:score", min=1)),
    ],
)
def test_a_term_is_a_gate(term: str, gate: Gate) -> None:
    assert read_term(term) == gate


@pytest.mark.parametrize(
    ("term", "rule"),
    [
        ("small and fast", "is no goal; write a metric"),
        ("latency >= 2x", "there is no metric 'latency'; did you mean 'latency_p50'"),
        ("top1 <= 0.4", "higher top1 is better; write top1 >= 0.4"),
        ("size >= 6", "lower size is better; write size <= 6, or size >= 6x"),
        ("top1 rise <= 0.1", "write top1 drop <= 0.1"),
        ("top1 >= 2x", "x is how many times better a time, size or memory is; write top1 retained"),
        ("latency_p50 <= 2 MB", "latency_p50 has no unit 'MB'; its own: ms"),
        ("top1 drop <= 1%", "a number in the metric's own unit stands here"),
        ("size >= 6..0x", "'6..0' is no number"),
    ],
)
def test_what_is_no_goal_says_what_to_write(term: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule.replace("[", r"\[").replace(".", r"\.")):
        read_term(term)


def test_a_goal_is_split_and_says_what_a_search_looks_for() -> None:
    terms = split_goal("size >= 6x, latency_p50 >= 3x and top1 drop <= 0.01")
    assert list_directions(read_goals(terms)) == ("minimize size", "minimize latency_p50", "maximize top1")
    with pytest.raises(ValueError, match="'size_ratio' is bounded twice"):
        read_goals(("size >= 6x", "size >= 5x"))


@pytest.mark.parametrize(
    ("parts", "rule"),
    [
        ({"goal": "size >= 4x, sze >= 2x"}, "goal: 'sze >= 2x': there is no metric 'sze'"),
        ({"goal": ["size >= 4x", "map drop <= 0.1"]}, "goal.1: metric 'map' does not fit task image-classification"),
        (
            {"goal": "size >= 4x", "search": {"space": {"seed": {"choice": [0, 1]}}, "goals": ["minimize size"]}},
            "goal makes a search of its own",
        ),
    ],
)
def test_a_recipe_with_a_wrong_goal_is_refused_when_it_is_read(
    tmp_path: Path, parts: dict[str, Any], rule: str
) -> None:
    with pytest.raises(RecipeError, match=rule):
        load_recipe(write_recipe(tmp_path / "recipe.yaml", changed(image_recipe(tmp_path), **parts)))
