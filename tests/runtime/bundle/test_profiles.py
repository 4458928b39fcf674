"""Shape profiles: free sizes and their ranges, which profile takes which shapes, and what is wrong with one."""

from __future__ import annotations

import pytest

from runtime.bundle.engine import InputShapes, free_dimensions, profile_for, profile_of, range_problems
from runtime.bundle.tensors import TensorSpec

DECODER = (
    TensorSpec("input_ids", "int64", ("batch", "sequence")),
    TensorSpec("attention_mask", "int64", ("batch", "past + sequence")),
    TensorSpec("past.0.key", "float32", ("batch", 4, "past", 16)),
)


def test_every_input_gets_its_shapes_and_sums_are_added() -> None:
    ranges = {"batch": (1, 2, 4), "sequence": (1, 8, 16), "past": (0, 8, 48)}
    profile = profile_of(DECODER, ranges)
    assert profile["attention_mask"] == InputShapes((1, 1), (2, 16), (4, 64))
    assert profile["past.0.key"] == InputShapes((1, 4, 0, 16), (2, 4, 8, 16), (4, 4, 48, 16))
    assert free_dimensions(DECODER) == ("batch", "sequence", "past")
    with pytest.raises(ValueError, match="past: a free size without min, opt and max"):
        profile_of(DECODER, {"batch": (1, 1, 1), "sequence": (1, 1, 1)})


def test_problems_name_the_size() -> None:
    free = ("batch", "sequence")
    assert range_problems({"batch": (1, 2, 4), "sequence": (1, 1, 1)}, free) == []
    assert range_problems({"batch": (1, 2, 4), "seq": (1, 1, 1)}, free) == [
        "seq: the model has no free size of that name; it has batch, sequence",
        "sequence: a free size without min, opt and max; give all three",
    ]
    assert range_problems({"batch": (4, 2, 8), "sequence": (1, 9, 8)}, free) == [
        "batch: [4, 2, 8] is not min <= opt <= max, from 0 on",
        "sequence: [1, 9, 8] is not min <= opt <= max, from 0 on",
    ]


def test_the_profile_whose_opt_is_nearest() -> None:
    profiles = [{"x": InputShapes((1, 3), (1, 3), (64, 3))}, {"x": InputShapes((8, 3), (32, 3), (64, 3))}]
    assert [profile_for(profiles, {"x": (n, 3)}) for n in (1, 7, 8, 32, 64)] == [0, 0, 0, 1, 1]
    assert profile_for(profiles, {"x": (65, 3)}) is None and profile_for(profiles, {"x": (4, 4)}) is None
