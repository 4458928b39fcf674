"""The speed of a large decoder, foretold from decoders of a few of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from hosts import Host
from makers import plan
from tiny_lm import QUICK_DECODING, language_folder, language_recipe

from compress.graph.specs import attention_layers
from compress.planning import latency
from compress.planning.measured_speed import FLOAT_ELSEWHERE, LatencyForecast
from compress.planning.plan import plan_html

N_BLOCKS, SHALLOW = 4, (1, 2)


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A recipe of a decoder that counts as large, where a block takes 1 ms, a rounded one 0.25 ms, the head 10 ms."""

    def time_decoders(recipe: Any, graphs: Sequence[ir.Model], *_: Any, **__: Any) -> tuple[list[float], list[float]]:
        ms = [1.0, 0.25] * len(SHALLOW)
        costs = [len(attention_layers(graph)) * each for graph, each in zip(graphs, ms, strict=True)]
        return [20 + 5 * cost for cost in costs], [10 + cost for cost in costs]

    monkeypatch.setenv("COMPRESS_TIMING", "on")
    small = {"latency.LARGEST_BYTES": 0, "in_files.WHOLE_BYTES": 0, "shallow.SHALLOW": SHALLOW, "shallow.HELD": 64}
    for name, value in small.items():
        monkeypatch.setattr(f"compress.planning.{name}", value)
    monkeypatch.setattr(latency, "time_decoders", time_decoders)
    language_folder(tmp_path / "lm", num_hidden_layers=N_BLOCKS)
    passes = [{"kind": "rtn", "scheme": "W4A16", "group_size": 32}]
    return language_recipe(tmp_path, passes, validate={"gates": [], "benchmark": QUICK_DECODING})


def test_each_further_block_takes_what_those_between_took(large: dict[str, Any], tmp_path: Path) -> None:
    made = plan(large, tmp_path, tmp_path / "cache")
    assert made.latency is not None and made.latency.blocks == SHALLOW
    assert (made.latency.float_ms, made.latency.compressed_ms) == (10 + N_BLOCKS, 10 + 0.25 * N_BLOCKS)
    assert made.latency.first_ms == (20 + 5 * N_BLOCKS, 20 + 5 * 0.25 * N_BLOCKS)
    text = plan_html(made)
    assert "measured on models of this shape with 1 and 2 blocks" in text and "the first token about 40 ms" in text
    assert plan(large, tmp_path, tmp_path / "cache").latency == made.latency, "it is not kept"


@pytest.mark.parametrize(
    ("memory_bytes", "n_blocks", "said"),
    [(1 << 16, N_BLOCKS, "to time a few blocks takes"), (2**40, SHALLOW[1], "its 2 blocks are too few")],
)
def test_what_has_no_twin_is_said(
    large: dict[str, Any], host: Host, memory_bytes: int, n_blocks: int, said: str, tmp_path: Path
) -> None:
    host.memory_bytes = memory_bytes
    language_folder(tmp_path / "lm", num_hidden_layers=n_blocks)
    made = plan(large, tmp_path, tmp_path / "cache")
    assert made.latency is None and any(said in note.text for note in made.notes)


def test_what_is_left_beside_the_float_model_in_another_runtime_is_said() -> None:
    others = {f"{FLOAT_ELSEWHERE}bf16": 50.0}
    forecast = LatencyForecast("tpot", "onnxruntime-cpu", 100.0, 25.0, others=others)
    assert "bf16 is 2.00x as fast as here: beside that this recipe is 2.00x" in forecast.describe_unrounded()
    assert not replace(forecast, others={f"{FLOAT_ELSEWHERE}bf16": 95.0}).describe_unrounded(), "no faster"
    assert not replace(forecast, compressed_ms=60.0).describe_unrounded(), "faster than the recipe: said otherwise"
