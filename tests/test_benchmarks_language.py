"""The claims scripts about language models: scores, errors and ratios by hand, and which values decide which claim."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from places import BENCHMARKS


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def quality_rows(module: Any, **change: float) -> list[dict[str, Any]]:
    """Every value on its bar, or changed; "gptq3" is nats of ours gptq at 3 bits."""
    at: dict[str, float] = {f"gptq{bits}": bar for bits, bar in module.GPTQ_BARS.items()}
    at |= {f"best{bits}": bar for bits, bar in module.BEST_BARS.items()} | {"rtn3": 3.7, "awq3": 3.6, "seconds": 30.0}
    at["mixed"] = module.MIXED_BAR
    at |= {"whole": at["gptq4"] + module.WHOLE_NATS - 1e-6, "ratio": module.WHOLE_RATIO}
    at |= {"w4g128": 0.98, "w3g128": 0.90, "w3g64": 0.92} | change
    rows = []
    for bits in (4, 3, 2):
        size = {"model": module.STORIES_MODEL, "bits": bits, "group_size": 32}
        rows.append(size | {"made_by": "ours gptq", "nats": at[f"gptq{bits}"]})
        rows.append(size | {"made_by": "ours best", "nats": at[f"best{bits}"], "seconds": at["seconds"]})
        rows.append(size | {"made_by": "auto-round", "nats": 9.0, "seconds": 30.0})
        rows += [size | {"made_by": f"ours {kind}", "nats": at.get(f"{kind}{bits}", 9.0)} for kind in ("rtn", "awq")]
    whole = {"made_by": "ours gptq whole", "nats": at["whole"], "times_smaller": at["ratio"]}
    rows.append({"model": module.STORIES_MODEL, "bits": 4, "group_size": 32} | whole)
    rows.append(
        {"model": module.STORIES_MODEL, "bits": 3, "group_size": 32, "made_by": "ours mixed", "nats": at["mixed"]}
    )
    for bits, group in module.MINILM_BARS:
        size = {"model": "minilm", "bits": bits, "group_size": group}
        rows.append(size | {"made_by": "ours gptq", "cosine": at[f"w{bits}g{group}"]})
        theirs = {(4, 128): 0.98, (3, 128): 0.90, (3, 64): 0.92}[bits, group]
        rows.append(size | {"made_by": "llm-compressor gptq", "cosine": theirs})
    return rows


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({}, []),
        ({"gptq4": 3.385}, ["gptq_w4_nats"]),
        ({"whole": 3.415}, ["whole_w4_more_nats"]),
        ({"ratio": 5.4}, ["whole_w4_times_smaller"]),
        ({"gptq2": 4.21}, ["gptq_w2_nats"]),
        ({"best3": 3.413}, ["best_w3_nats"]),
        ({"mixed": 3.401}, ["mixed_w3_nats"]),
        ({"seconds": 30.1}, ["best_w4_seconds", "best_w3_seconds", "best_w2_seconds"]),
        ({"awq3": 3.71}, ["awq_w3_nats"]),
        ({"w3g64": 0.919}, ["minilm_w3_g64_cosine"]),
    ],
)
def test_claims_of_weight_only_quality(load: Any, change: dict[str, float], fails: list[str]) -> None:
    module = load("weight_only_quality")
    claims = module.claims(quality_rows(module, **change), [])
    assert [claim.name for claim in claims if not claim.holds] == fails


def test_a_row_that_failed_or_is_missing_proves_nothing(load: Any) -> None:
    module = load("weight_only_quality")
    claims = module.claims([], None)
    assert not any(claim.holds for claim in claims)
    assert {claim.bar for claim in claims if "minilm" in claim.name} == {0.977, 0.894, 0.915}


def speed_rows(ours: list[float | None], theirs: list[float], errors: tuple[float, float]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"model": "ours", "round": i, "seconds": s} for i, s in enumerate(ours)]
    rows += [{"model": "llm-compressor", "round": i, "seconds": s} for i, s in enumerate(theirs)]
    rows[0]["layer_error"], rows[len(ours)]["layer_error"] = errors
    return rows


@pytest.mark.parametrize(
    ("ours", "errors", "values"),
    [
        ([20.0, 10.0, 30.0], (0.1, 0.1), (0.5, 1.0)),
        ([21.0, 21.0, 30.0], (0.1, 0.2), (0.525, 0.5)),
        ([20.0, None, 30.0], (0.1, 0.1), (None, 1.0)),
    ],
)
def test_claims_of_gptq_speed(
    load: Any, ours: list[float | None], errors: tuple[float, float], values: tuple[float | None, float]
) -> None:
    claims = load("gptq_speed").claims(speed_rows(ours, [40.0, 40.0, 40.0], errors))
    assert [claim.value for claim in claims] == list(values)


def test_without_the_peer_no_time_is_claimed(load: Any) -> None:
    claims = load("gptq_speed").claims([{"model": "ours", "round": 0, "seconds": 1.0, "layer_error": 0.1}])
    assert [claim.value for claim in claims] == [None, None]


@pytest.mark.parametrize(
    ("few", "many", "forecast", "other", "fails"),
    [
        (1000, 1100, 1090, 2200, []),
        (1000, 1101, 1101, 2202, ["peak_ratio_of_24_layers_to_6", "forecast_relative_error"]),
        (1000, 1050, 1050, 2000, ["peak_ratio_to_llm_compressor"]),
        (1000, 1050, 1050, None, ["peak_ratio_to_llm_compressor"]),
    ],
)
def test_claims_of_compression_memory(
    load: Any, few: float, many: float, forecast: float, other: float | None, fails: list[str]
) -> None:
    rows = [
        {"model": "ours", "layers": 6, "peak_mib": few, "forecast_mib": forecast},
        {"model": "ours", "layers": 24, "peak_mib": many, "forecast_mib": forecast},
        {"model": "llm-compressor", "layers": 24} | ({"failed": "no"} if other is None else {"peak_mib": other}),
    ]
    assert [claim.name for claim in load("compression_memory").claims(rows) if not claim.holds] == fails


def test_claims_of_one_billion(load: Any) -> None:
    row = {"peak_gib": 5.0, "forecast_gib": 4.6, "apply_s": 1000.0, "forecast_s": 1200.0, "blocks_kept": 5}
    row |= {"blocks_again": 0, "nll_checkpoint": 11.8, "nll_onnx": 11.81, "nll_before": 11.8, "nll_after": 11.85}
    module = load("one_billion")
    assert all(claim.holds for claim in module.claims(row))
    worse = row | {"peak_gib": 6.1, "apply_s": 500.0, "blocks_again": 1, "nll_onnx": 11.9}
    assert [claim.name for claim in module.claims(worse) if not claim.holds] == [
        "peak_gib_of_the_process_tree",
        "finished_blocks_done_again",
        "nats_between_checkpoint_and_onnx",
        "forecast_memory_relative_error",
        "forecast_time_over_measured",
    ]
    assert not any("forecast" in claim.name for claim in module.claims(row, quick=True))


def test_the_worse_past_decides_the_claim(load: Any) -> None:
    rows = [{"model": "ours", "threads": 1, "past": past, "ratio": ratio} for past, ratio in ((256, 4.5), (1000, 4.2))]
    rows.append({"model": "ours", "threads": 2, "past": 256, "ratio": 4.6})
    rows.append({"model": "llama.cpp Q4_0", "threads": 1, "failed": "no compiler"})
    assert [(c.value, c.holds) for c in load("decode").claims(rows)] == [(4.2, False), (4.6, True)]
    assert [c.value for c in load("decode").claims([])] == [None, None]


def test_bytes_claim_needs_every_kill(load: Any) -> None:
    module = load("kill_resume")
    good = {"different_files": [], "steps_again": 0, "blocks_again": 1, "left": [], "left_at_the_end": []}
    rows: list[dict[str, Any]] = [dict(good) for _ in range(module.KILLS)]
    assert all(claim.holds for claim in module.claims(rows))
    bad = {"different_files": ["x"], "steps_again": 1, "blocks_again": 2, "left": ["tmp"], "left_at_the_end": ["tmp"]}
    assert not any(claim.holds for claim in module.claims([bad, *rows[2:]]))


def test_claims_of_float_formats(load: Any) -> None:
    module = load("float_formats")
    rows: list[dict[str, Any]] = [{"nats": 3.0}]
    for made_by, nats in (("compressed-tensors' range", 3.1), ("ours rtn", 3.09), ("ours gptq", 3.06)):
        rows.append({"made_by": made_by, "scheme": "NVFP4A16", "nats": nats})
        rows[-1] |= {"reported": nats, "kl_token": 0.1} if "ours" in made_by else {}
    failing = [claim.name for claim in module.claims(rows) if not claim.holds]
    assert failing == ["NVFP4A16_gptq_nats"]
    rows[-1]["kl_token"] = 0.2
    assert "NVFP4A16_gptq_divergence" in {claim.name for claim in module.claims(rows) if not claim.holds}
