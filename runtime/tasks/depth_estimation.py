"""Images, each pixel with its depth."""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.bundle.columns import Array
from runtime.errors import BundleError
from runtime.metrics.base import FRACTION, Columns, Metric, Outputs, ratio_of_sums, share_of_sums
from runtime.tasks.base import BatchFacts, ReadsImages, Tensors, describe_shapes

DEPTH = "depth"
CLOSE = 1.25
"""How many times as far or near a depth may be that counts as right (Eigen et al. 2014)."""


class DepthEstimation(ReadsImages):
    """Tell how far each pixel is, or how near where the model gives inverse depths.

    Outputs: {"depth": float32 [N, h, w]}, as large as the model gives it.
    """

    name = "depth-estimation"
    about = "a depth for each pixel of an image"
    outputs = "depths"
    always = (DEPTH,)

    def read_outputs(self, outputs: Tensors, batch: BatchFacts) -> dict[str, Array]:
        """Return {"depth": float32 [n, h, w]} of the only output [B, h, w] or [B, 1, h, w]. BundleError."""
        found = [o for o in outputs.values() if o.dtype.kind == "f" and (o.ndim == 3 or o.shape[1:2] == (1,))]
        if len(found) != 1 or found[0].ndim not in (3, 4):
            raise BundleError(
                f"a {self.name} model has one output [batch, height, width] of depths; this model: "
                f"{describe_shapes(outputs)}"
            )
        return {DEPTH: found[0].reshape(len(found[0]), *found[0].shape[-2:]).astype(np.float32, copy=False)}

    def metrics(self) -> tuple[Metric, ...]:
        """Return how far depths are off, relative to the labels', and which share is close."""
        return _make_metrics()


def _find_misfit(outputs: Outputs, labels: Any) -> str | None:
    depths, maps = outputs[DEPTH], np.asarray(labels)
    if maps.shape != depths.shape:
        return f"needs depth maps as large as the model's, {list(depths.shape[1:])}, and the labels' are otherwise"
    return None if (maps > 0).any() else "needs depths above 0, and the labels have none"


def _sum_errors(outputs: Outputs, labels: Any) -> Columns:
    """Return the relative errors of each image's labelled pixels, summed, and how many pixels they are: [N] each."""
    known = labels > 0
    errors = np.abs(outputs[DEPTH].astype(np.float64) - labels) / np.where(known, labels, 1)
    return (errors * known).sum(axis=(1, 2)), known.sum(axis=(1, 2))


def _count_close(outputs: Outputs, labels: Any) -> Columns:
    """Return how many of each image's labelled pixels are within CLOSE times the label, and how many there are."""
    known, depths = labels > 0, outputs[DEPTH]
    close = known & (depths < CLOSE * labels) & (labels < CLOSE * depths)
    return close.sum(axis=(1, 2)), known.sum(axis=(1, 2))


def _make_metrics() -> tuple[Metric, ...]:
    # here, for where metrics are listed, tasks are asked for theirs
    about = "of labelled pixels (above 0), of a model whose depths have the labels' unit"
    error = Metric(
        name="abs_rel",
        against="labels",
        higher_is_better=False,
        fits=("depths",),
        unit="fraction",
        range=(0.0, np.inf),
        about=f"mean error of depths relative to the label's, {about}",
        reduce=_sum_errors,
        kind="statistic",
        weights=lambda columns: columns[1].astype(np.float64),
        misfit=_find_misfit,
        on_request=True,  # most models give depths up to a scale and a shift
        **ratio_of_sums(1.0),
    )
    close = Metric(
        name="delta1",
        against="labels",
        **FRACTION,
        fits=("depths",),
        about=f"share of depths within {CLOSE} times the label's, {about}",
        reduce=_count_close,
        kind="statistic",
        misfit=_find_misfit,
        on_request=True,
        **share_of_sums(),
    )
    return error, close
