"""Observers and ranges: streaming equals one shot, choices equal brute force, bad values are refused by name."""

from __future__ import annotations

import graphs
import numpy as np
import pytest

from compress.quantize.observers import HALF_BINS, Method, Observer, choose_range, collect_rows, observe

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
    levels = np.clip(np.round((values - low) / scale), 0, 255)
    return float(np.mean((levels * scale + low - values) ** 2))


@pytest.mark.parametrize("axis", [1, -1])
def test_streaming_is_one_shot_over_all_data(axis: int) -> None:
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(n, 3, 5)) * scale).astype(np.float32) for n, scale in ((2, 1), (5, 30), (1, 0.1))]
    whole = np.concatenate(batches)
    streamed, once = seen(*batches, axis=axis), seen(whole, axis=axis)
    other = tuple(i for i in range(3) if i != axis % 3)
    assert (streamed.low, streamed.high) == (whole.min(), whole.max()) == (once.low, once.high)
    np.testing.assert_allclose(streamed.channel_mean, whole.mean(axis=other, dtype=np.float64), atol=1e-6)
    np.testing.assert_array_equal(streamed.channel_peak, np.abs(whole).max(axis=other))
    np.testing.assert_array_equal(streamed.counts, once.counts)
    assert streamed.bound == once.bound


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
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="NaN or Inf"):
        seen(np.array([0, value, 1], np.float32))
    with pytest.raises(ValueError, match="no values"):
        seen(np.zeros((0, 3), np.float32))


@pytest.mark.parametrize("peak", [1e-42, 1e-30, 1e30])
def test_extreme_magnitudes_are_counted(peak: float) -> None:
    observer = seen(np.linspace(-peak, peak, 100, dtype=np.float32))
    assert observer.counts.sum() == 100
    low, high = choose_range(observer, "mse")
    assert low < high


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_ranges_hold_zero_and_stay_within_what_was_seen(method: Method, symmetric: bool) -> None:
    for values in (heavy_tailed(), np.abs(heavy_tailed()), heavy_tailed() - 50):
        low, high = choose_range(seen(values), method, symmetric=symmetric)
        assert low <= 0 <= high
        assert low < high
        peak = float(np.abs(values).max())
        assert -peak <= low
        assert high <= peak
        assert not symmetric or low == -high


@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_of_zeros_has_a_range(method: Method) -> None:
    low, high = choose_range(seen(np.zeros(8, np.float32)), method)
    assert low == 0 < high


def test_minmax_is_all_and_percentile_its_quantiles() -> None:
    values = heavy_tailed()
    observer = seen(values)
    assert choose_range(observer, "minmax") == (float(values.min()), float(values.max()))
    low, high = choose_range(observer, "percentile", 98)
    step = observer.bound / HALF_BINS
    np.testing.assert_allclose([low, high], np.quantile(values, [0.01, 0.99]), atol=2 * step)


@pytest.mark.parametrize("seed", range(3))
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


def test_bad_calibration_data_is_named() -> None:
    model, feeds = graphs.one_layer(6, 4), graphs.vectors(6)
    feeds[1]["x"][0, 0] = np.nan
    with pytest.raises(ValueError, match=r"tensor 'x': NaN or Inf among the values on calibration batch 2"):
        observe(model, {"x": None}, feeds)
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
