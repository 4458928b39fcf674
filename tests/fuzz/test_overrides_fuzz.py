"""`--set`, with any text: a recipe or a RecipeError."""

from __future__ import annotations

from fuzzing import assert_done_or_refused, fuzz
from hypothesis import given
from hypothesis import strategies as st
from places import RECIPES
from recipe_strategies import ANYTHING, TEXTS, as_text

from compress.recipe.load import load_recipe

KNOWN = ("name", "seed", "description", "model.args.x", "model.class_names", "passes", "validate.gates.0.max_drop")
WORDS = ("passes", "vars", "data", "model", "args", "include", "x", "0", "1", "-1", "²", "٣", "9" * 5000, "")
PATHS = (
    st.sampled_from(KNOWN)
    | st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(".".join)
    | st.text(max_size=20)
)
VALUES = st.text(max_size=40) | TEXTS | ANYTHING.map(as_text)


@fuzz(share=0.05, quick=40)
@given(given=st.lists(st.tuples(PATHS, VALUES), min_size=1, max_size=2))
def test_any_override_is_taken_or_refused(given: list[tuple[str, str]]) -> None:
    texts = [f"{path}={value}" for path, value in given]
    assert_done_or_refused("overrides", lambda: load_recipe(RECIPES / "quickstart.yaml", texts), allowed=(2,))
