"""Pixels in the order in which a model that reads patches has them; a record that a stranger wrote is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.bundle.manifest import PixelOrder
from runtime.encode.images import order_pixels
from runtime.errors import UsageError


def test_loops_go_over_pixels_as_strides_do() -> None:
    """Two patches of 2 x 2 side by side, each twice, and what is left of the shape."""
    pixels = np.arange(8, dtype=np.float32).reshape(1, 1, 2, 4)
    order = PixelOrder((3, 8), ((2, 2), (2, 0), (2, 4), (2, 1)), rest=-1.0)
    rows = order_pixels(pixels, order)
    assert rows.dtype == np.float32
    assert rows.tolist() == [[0, 1, 4, 5] * 2, [2, 3, 6, 7] * 2, [-1.0] * 8]
    assert order_pixels(pixels, PixelOrder((4,), ((4, -1),), start=3)).tolist() == [3, 2, 1, 0]
    with pytest.raises(UsageError, match="takes 8 values of an image, and it has 4"):
        order_pixels(pixels[..., :2], order)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"shape": (0, 3), "loops": ()}, "must count from 1"),
        ({"shape": (4,), "loops": ((0, 1),)}, "must count from 1"),
        ({"shape": (2**20, 2**20), "loops": ()}, "more than"),
        ({"shape": (4,), "loops": ((5, 1),)}, "than shape"),
        ({"shape": (4,), "loops": ((4, -1),), "start": 2}, "leave the image"),
    ],
)
def test_an_order_that_no_image_has_is_refused(record: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PixelOrder(**record)
