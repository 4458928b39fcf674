"""A graph with what encoders have, compiled by TensorRT for RTX where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import graphs
import pytest
from graphs import int8_state

from compress.engine.compile import Job, build_engine, find_asked_precisions
from compress.export.onnx import save_graph
from compress.graph.specs import input_specs
from compress.rounding.qdq import write_state
from runtime.bundle.engine import free_dimensions, profile_of


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None,
    reason="TensorRT for RTX is not installed: pip install '.[tensorrt-rtx]'",
)
def test_an_encoder_with_its_table_in_int8(tmp_path: Path) -> None:
    state = int8_state(graphs.transformer(), graphs.tokens())
    assert state.weight_only == ["embedding"]
    model = write_state(state, "s8s8")
    save_graph(model, tmp_path / "model.onnx")
    profile = profile_of(input_specs(model), dict.fromkeys(free_dimensions(input_specs(model)), (1, 2, 8)))
    files = {name: str(tmp_path / name) for name in ("engine", "layers", "record")}
    asked = find_asked_precisions(tmp_path / "model.onnx")
    job = Job(
        "tensorrt-rtx",
        str(tmp_path / "model.onnx"),
        **files,
        cache="",
        profiles=(profile,),
        options={"compute_capabilities": ["8.6"]},
        asked=asked,
    )
    record, _ = build_engine(job)
    assert record.held == 1.0 and record.asked["int8"] >= 6, record.short
