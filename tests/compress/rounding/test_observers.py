"""Observers and ranges: streaming equals one shot, choices equal brute force, bad values are refused by name."""

from __future__ import annotations

import graphs
import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compress.graph import run
from compress.rounding.gram import gram_matrix
from compress.rounding.observers import HALF_BINS, Method, Observer, choose_range, collect_rows, observe

WITH_MASK = """<ir_version: 10, opset_import: ["" : 20]>
g (int64[b, t] input_ids, int64[b, t] attention_mask, float[64, 8] table) => (float[b, t, 8] out, float[n, 8] flat)
{
    looked_up = Gather (table, input_ids)
    shape = Constant <value_ints: ints = [-1, 8]> ()
    flat = Reshape (looked_up, shape)
    parts = Constant <value_ints: ints = [0, 0, 2, 4]> ()
    split = Reshape (looked_up, parts)
    heads = Transpose <perm: ints = [0, 2, 1, 3]> (split)
    keys = Transpose <perm: ints = [0, 2, 3, 1]> (split)
    out = Identity (looked_up)
}"""
METHODS: tuple[Method, ...] = ("minmax", "percentile", "entropy", "mse")


def seen(*batches: np.ndarray, axis: int | None = None) -> Observer:
    observer = Observer(axis)
    for values in batches:
        observer.update(values)
    return observer


def heavy_tailed(n: int = 20000, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(3, n).astype(np.float32)


def rounding_error(values: np.ndarray, low: float, high: float) -> float:
    """Mean squared error of 256 levels over [low, high], computed on the values themselves."""
    scale = (high - low) / 255
    quantized = np.clip(np.round((values - low) / scale), 0, 255)
    return float(np.mean((quantized * scale + low - values) ** 2))


SEEDS = st.integers(0, 2**32 - 1)


@given(
    st.sampled_from([1, 2, -1, -2]),
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0.0, 1e-6, 0.1, 1.0, 30.0, 1e9])), min_size=1, max_size=5),
    SEEDS,
)
@example(axis=1, sizes=[(2, 1.0), (5, 30.0), (1, 0.1)], seed=0)
def test_streaming_is_one_shot_over_all_data(axis: int, sizes: list[tuple[int, float]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    batches = [(rng.normal(size=(n, 3, 5)) * scale).astype(np.float32) for n, scale in sizes]
    whole = np.concatenate(batches)
    streamed, once = seen(*batches, axis=axis), seen(whole, axis=axis)
    other = tuple(i for i in range(3) if i != axis % 3)
    assert (streamed.low, streamed.high) == (whole.min(), whole.max()) == (once.low, once.high)
    mean = whole.mean(axis=other, dtype=np.float64)
    np.testing.assert_allclose(streamed.channel_mean, mean, atol=1e-6 * max(1.0, np.abs(whole).max()))
    np.testing.assert_array_equal(streamed.channel_peak, np.abs(whole).max(axis=other))
    assert streamed.bound == once.bound and streamed.counts.sum() == whole.size
    places = whole.astype(np.float64) * (HALF_BINS / (once.bound or 1))
    on_an_edge = np.sum(np.abs(places - np.round(places)) < 1e-3)  # float32 may put these into the bin beside
    assert np.abs(streamed.counts - once.counts).sum() <= 2 * on_an_edge


def test_the_histogram_keeps_every_value_when_it_widens() -> None:
    batches = [np.full(10, scale, np.float32) for scale in (0.0, 0.01, 1.0, -700.0)]
    observer = seen(*batches)
    assert observer.counts.sum() == observer.n_values == 40
    assert observer.bound == 1024
    assert observer.counts[HALF_BINS] == 20  # zeros, and 0.01 which is now within the first bin


def test_bins_hold_what_they_say() -> None:
    values = heavy_tailed()
    observer = seen(values)
    edges = np.linspace(-observer.bound, observer.bound, 2 * HALF_BINS + 1)
    difference = np.abs(observer.counts - np.histogram(values, edges)[0]).sum()
    assert difference <= len(values) / 1000  # values on an edge, to float32
    assert observer.quantile(0.9) == pytest.approx(np.quantile(values, 0.9), abs=observer.bound / HALF_BINS)
    assert observer.absolute_median() == pytest.approx(np.median(np.abs(values)), abs=observer.bound / HALF_BINS)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_or_empty_has_no_range_and_says_so(value: float) -> None:
    assert seen(np.array([0, value, 1], np.float32)).trouble == "NaN or Inf on the calibration data"
    assert seen(np.zeros((0, 3), np.float32)).trouble == "no values on the calibration data"
    both = seen(np.array([0, 1], np.float32))
    both.update(np.zeros((0, 3), np.float32))
    assert not both.trouble


@settings(max_examples=30)
@given(
    st.sampled_from(METHODS),
    st.booleans(),
    st.sampled_from([1e-42, 1e-30, 1e-3, 1.0, 1e30]),
    st.sampled_from([-50.0, 0.0, 50.0]),
    st.integers(1, 2000),
    SEEDS,
)
@example("percentile", False, 1e-42, -50.0, 1, 0)
def test_ranges_hold_zero_and_stay_within_what_was_seen(
    method: Method, symmetric: bool, size: float, shift: float, n: int, seed: int
) -> None:
    values = ((heavy_tailed(n, seed).astype(np.float64) + shift) * size).astype(np.float32)
    observer = seen(values)
    assert observer.counts.sum() == n
    low, high = choose_range(observer, method, symmetric=symmetric)
    peak = float(np.abs(values).max())
    assert -peak <= low <= 0 <= high <= peak
    assert low < high or not peak
    assert not symmetric or low == -high


def test_minmax_is_all_and_percentile_its_quantiles() -> None:
    values = heavy_tailed()
    observer = seen(values)
    assert choose_range(observer, "minmax") == (float(values.min()), float(values.max()))
    low, high = choose_range(observer, "percentile", 98)
    step = observer.bound / HALF_BINS
    np.testing.assert_allclose([low, high], np.quantile(values, [0.01, 0.99]), atol=2 * step)


@settings(max_examples=5)
@given(st.integers(0, 999))
def test_mse_is_as_good_as_a_search_over_the_values(seed: int) -> None:
    values = heavy_tailed(seed=seed)
    observer = seen(values)
    low, high = float(values.min()), float(values.max())
    best = min(rounding_error(values, low * g, high * g) for g in np.linspace(0.005, 1, 400))
    chosen = rounding_error(values, *choose_range(observer, "mse"))
    assert chosen <= 1.03 * best
    assert chosen <= rounding_error(values, low, high)


def test_clipping_methods_cut_an_outlier_and_minmax_does_not() -> None:
    values = np.append(np.random.default_rng(0).normal(size=50000), 30).astype(np.float32)
    observer = seen(values)
    assert choose_range(observer, "minmax")[1] == 30
    for method in ("percentile", "entropy"):
        assert choose_range(observer, method)[1] < 10
    assert choose_range(observer, "mse")[1] < 30


@pytest.mark.parametrize("method", ["mse", "entropy"])
def test_an_outlier_on_one_side_does_not_cost_the_other(method: Method) -> None:
    """Half of the values within [-1, 0], a few far above."""
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.uniform(-1, 1, 40000), rng.exponential(2, 40)]).astype(np.float32)
    low, high = choose_range(seen(values), method)
    assert low < -0.9
    assert high < 0.95 * values.max()


def test_observing_a_graph_is_observing_its_tensors() -> None:
    model, feeds = graphs.one_layer(6, 4), graphs.vectors(6)
    found = observe(model, {"x": -1, "y": None}, feeds, threads=1)
    outputs = np.concatenate(graphs.run(model, feeds))
    assert (found["y"].low, found["y"].high) == (outputs.min(), outputs.max())
    assert found["y"].channel_peak is None
    whole = np.concatenate([f["x"] for f in feeds])
    np.testing.assert_allclose(found["x"].channel_mean, whole.mean(axis=0), atol=1e-6)


def test_pieces_of_a_batch_give_what_the_batch_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    model, feeds = graphs.one_layer(6, 4), graphs.vectors(6)
    whole = observe(model, {"x": -1, "y": None}, feeds, threads=1)
    cut = list(run.cut_batches(run.open_session(run.tap(model, ["x", "y"]), 1), feeds))
    assert [len(f["x"]) for f in cut] == [len(f["x"]) for f in feeds], "all fits"
    monkeypatch.setattr(run, "OUTPUT_BYTES", 3 * 4 * (6 + 4))
    cut = list(run.cut_batches(run.open_session(run.tap(model, ["x", "y"]), 1), feeds))
    assert max(len(f["x"]) for f in cut) == 3 and sum(len(f["x"]) for f in cut) == sum(len(f["x"]) for f in feeds)
    pieces = observe(model, {"x": -1, "y": None}, feeds, threads=1)
    for name in ("x", "y"):
        assert (pieces[name].low, pieces[name].high) == (whole[name].low, whole[name].high)
        assert np.array_equal(pieces[name].counts, whole[name].counts)


def test_bad_calibration_data_is_told_of_its_tensor_and_none_is_an_error() -> None:
    model, feeds = graphs.one_layer(6, 4), graphs.vectors(6)
    feeds[1]["x"][0, 0] = np.nan
    assert observe(model, {"x": None}, feeds)["x"].trouble
    with pytest.raises(ValueError, match="no calibration data"):
        observe(model, {"x": None}, [])
    assert observe(model, {}, feeds) == {}


@pytest.mark.parametrize("n_rows", [3, 20, 1000])
def test_rows_are_a_sample_of_every_batch(n_rows: int) -> None:
    model, feeds = graphs.one_layer(6, 4), graphs.vectors(6, n_batches=4)
    rows = collect_rows(model, ["x"], feeds, n_rows, seed=0)["x"]
    whole = np.concatenate([f["x"] for f in feeds])
    assert rows.shape == (min(n_rows, 64), 6)
    places = [int(np.flatnonzero((whole == row).all(axis=1))[0]) for row in rows]
    assert len(set(places)) == len(places)
    assert n_rows < 20 or {place // 16 for place in places} == {0, 1, 2, 3}
    np.testing.assert_array_equal(rows, collect_rows(model, ["x"], feeds, n_rows, seed=0)["x"])


def test_padding_counts_in_no_statistic() -> None:
    """Padded texts are seen as the same texts without padding, in whatever shape a tensor holds their tokens."""
    table = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    table[63] = 1000.0  # the token of padding
    model = ir.from_onnx_text(WITH_MASK)
    model.graph.initializers["table"] = model.graph.inputs.pop()
    model.graph.initializers["table"].const_value = ir.tensor(table)
    ids = np.array([[3, 9, 27, 63, 63], [5, 6, 7, 8, 63]])
    mask = (ids != 63).astype(np.int64)
    alone = [
        {"input_ids": row[None, kept == 1], "attention_mask": kept[None, kept == 1]}
        for row, kept in zip(ids, mask, strict=True)
    ]
    axes = {"out": 2, "flat": -1, "heads": 1, "keys": 1}
    found, wanted = (observe(model, axes, batches) for batches in ([{"input_ids": ids, "attention_mask": mask}], alone))
    for name, want in wanted.items():
        assert (found[name].low, found[name].high, found[name].n_values) == (want.low, want.high, want.n_values), name
        np.testing.assert_allclose(found[name].channel_mean, want.channel_mean, rtol=1e-6, err_msg=name)
    padded = [{"input_ids": ids, "attention_mask": mask}]
    torch.testing.assert_close(gram_matrix(model, "out", padded)[0], gram_matrix(model, "out", alone)[0])
    assert collect_rows(model, ["out", "flat"], padded, 100, seed=0)["out"].max() < 1000
