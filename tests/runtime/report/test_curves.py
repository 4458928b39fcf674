"""Training curves: found in layers.json, drawn as a line of text and as a picture."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from runtime.report.curves import BARS, WIDTH, Curve, curve_line, curves_svg, find_curves, sparkline


def row(name: str, **numbers: Any) -> dict[str, Any]:
    return {"layer": name, "type": "measured", "action": "measured", "pass": name.partition(":")[0], **numbers}


FALLING = Curve("distill", "training loss", tuple((10 * i + 1, 2.0 / (i + 1)) for i in range(100)))


def test_curves_are_read_in_the_order_of_steps() -> None:
    (curve,) = find_curves([row("distill: training loss", **{"100": 0.5, "9": 2, "10": 1.5})])
    assert curve == Curve("distill", "training loss", ((9, 2.0), (10, 1.5), (100, 0.5)))


@pytest.mark.parametrize(
    "other",
    [
        row("distill", steps=90.0, loss_after=0.1),
        row("distill: training loss"),
        row("distill: training loss", **{"1": 0.5, "least": 0.5}),
        row("distill: training loss", **{"1": None}),
        row("distill: training loss", **{"1": float("inf")}),
        {**row("distill: training loss", **{"1": 0.5}), "type": "note"},
        "a bundle of another kind",
    ],
)
def test_what_is_no_curve_is_passed_over(other: Any) -> None:
    assert find_curves([other]) == []


def test_a_falling_loss_is_a_falling_line_of_bars() -> None:
    line = sparkline(FALLING)
    assert len(line) == WIDTH and line[-1] == BARS[0]
    assert line[0] == BARS[6], "three points at 1, 0.85 and 0.76 of the height, of eight bars"
    levels = [BARS.index(bar) for bar in line]
    assert levels == sorted(levels, reverse=True)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1.0, 10.0, 100.0), "▁▅█"),  # by logarithms
        ((-1.0, 0.0, 1.0), "▁▅█"),
        ((0.3, 0.3, 0.3), "▅▅▅"),
        ((5.0,), "▅"),
    ],
)
def test_heights(values: tuple[float, ...], expected: str) -> None:
    assert sparkline(Curve("a", "b", tuple(enumerate(values)))) == expected


def test_bars_stand_at_even_distances_of_steps() -> None:
    """Three points close together and one far away: the stretch between holds what was known."""
    assert sparkline(Curve("a", "b", ((0, 4.0), (1, 4.0), (2, 4.0), (100, 1.0)))) == "███▁"


def test_a_line_says_between_which_values_and_steps() -> None:
    assert curve_line(FALLING).endswith("2 to 0.02; steps 1 to 991")
    up = Curve("distill", "loss held out", ((0, 0.5), (4, 0.25), (8, 0.75)))
    assert curve_line(up).endswith("0.5 to 0.75, least 0.25; steps 0 to 8")


def test_the_picture_holds_every_point_inside_its_frame() -> None:
    held_out = Curve("distill", "loss <held> out", ((0, 3.0), (500, 0.5), (991, 0.4)))
    picture = ElementTree.fromstring(curves_svg([FALLING, held_out], width=400, height=150))
    lines = [one for one in picture.iter() if one.tag.endswith("polyline")]
    places = [[tuple(map(float, pair.split(","))) for pair in one.attrib["points"].split()] for one in lines]
    assert [len(own) for own in places] == [100, 3]
    assert all(0 <= x <= 400 and 0 <= y <= 150 for own in places for x, y in own)
    assert places[1][0][1] == min(y for own in places for _, y in own), "3.0 is the highest of both"
    texts = [one.text for one in picture.iter() if one.tag.endswith("text")]
    assert {"distill: training loss", "distill: loss <held> out", "3", "0.02", "step 0", "step 991"} == set(texts)
    assert not re.search("<(script|style)", curves_svg([FALLING]))
