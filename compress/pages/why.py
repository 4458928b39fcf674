"""Why a model is no faster, on the page: its products under this machine's roofline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.axes import Axes

from compress.pages.charts import AFTER, BEFORE, MUTED, SERIES, clean_text, draw_chart, tip, write_plainly
from runtime.judge.why import Explanation


@dataclass(frozen=True)
class _ProductRow:
    """A product's place in the chart: operations for each byte that it reads and writes, and GFLOP/s."""

    name: str
    intensity: float
    gflops: float
    color: str


def draw_roofline(explanation: Explanation) -> Markup | str:
    """Draw each product's rate against what it computes for each byte, under the machine's peaks; "" without any.

    A product cannot be above the lines: on the slope memory is what it waits for, below the flat part arithmetic
    (roofline model, Williams et al. 2009, doi:10.1145/1498765.1498785).
    """
    products = list(_list_products(explanation))
    peaks = {numbers: rate for numbers, rate in explanation.peak_gflops.items() if rate > 0}
    bandwidth = explanation.candidate.gb_per_s
    if not products or not peaks or not bandwidth > 0:
        return ""
    ridge = max(peaks.values()) / bandwidth
    first = min([product.intensity for product in products] + [ridge]) / 2
    last = max([product.intensity for product in products] + [ridge]) * 2

    def paint(axes: Axes) -> None:
        for number, (numbers, peak) in enumerate(peaks.items()):
            corner = min(max(peak / bandwidth, first), last)
            roof = [min(peak, bandwidth * x) for x in (first, corner, last)]
            axes.plot([first, corner, last], roof, color=SERIES[number % len(SERIES)], linewidth=1)
            axes.annotate(clean_text(numbers, 20), (last, peak), ha="right", va="bottom", color=MUTED, fontsize=9)
        for product in products:
            (point,) = axes.plot(product.intensity, product.gflops, "o", markersize=5, color=product.color)
            point.set_gid(tip(f"{product.name}: {product.gflops:.3g} GFLOP/s at {product.intensity:.3g} FLOP/byte"))
        axes.set_xscale("log", subs=[2, 5])
        axes.set_yscale("log", subs=[2, 5])
        write_plainly(axes.xaxis)
        write_plainly(axes.yaxis)
        axes.set(xlabel="FLOP for each byte", ylabel="GFLOP/s")

    return draw_chart("Each product under what this machine can do", paint, full=True, height=320)


def _list_products(explanation: Explanation) -> Iterable[_ProductRow]:
    for row in explanation.layers:
        if row.twin_gflops and row.twin_flops_per_byte:
            yield _ProductRow(f"{row.layer}, before", row.twin_flops_per_byte, row.twin_gflops, BEFORE)
        if row.gflops > 0 and row.flops_per_byte > 0:
            yield _ProductRow(f"{row.layer}, after", row.flops_per_byte, row.gflops, AFTER)
