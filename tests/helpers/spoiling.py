"""Healthy tiny bundles, and ways to spoil one layer of them in the file that runs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
from makers import QUICK, apply, image_recipe
from places import BENCHMARKS
from shortcuts import quick_judge
from trained_models import write_tagger, write_writer

RECIPES: dict[str, dict[str, Any]] = {
    "writer": {
        "model": {"source": "dir:model", "task": "text-generation"},
        "data": {
            "calibration": {"source": "jsonl:calibration.jsonl"},
            "evaluation": {"source": "jsonl:test.jsonl"},
        },
        "passes": [{"kind": "rtn", "bits": 8, "group_size": 32}],
        "validate": {"benchmark": {"warmup": 0, "iterations": 1, "processes": 1, "prompt_tokens": 4, "new_tokens": 2}},
    },
    "tagger": {
        "model": {"source": "dir:model", "task": "token-classification"},
        "preprocess": {"kind": "text", "max_length": 24},
        "data": {"calibration": {"source": "jsonl:train.jsonl"}, "evaluation": {"source": "jsonl:test.jsonl"}},
        "passes": [{"kind": "int8", "placement": "inputs", "weight_bits": 7}],  # the same on all CPUs
        "validate": {"benchmark": QUICK},
    },
}


def build_healthy(kind: str, folder: Path, **parts: Any) -> Path:
    """Build a small bundle that loses next to nothing: "images", "tagger" or "writer"; its cache lies in `folder`."""
    if kind == "images":
        recipe = image_recipe(folder) | {"passes": [{"kind": "int8", "placement": "all"}]}
    else:
        {"writer": write_writer, "tagger": write_tagger}[kind](folder)
        recipe = {"version": 1, "name": kind, **RECIPES[kind]}
    with quick_judge():
        apply(recipe | parts, folder / "bundle", folder / "cache")
    return folder / "bundle"


def spoil(bundle: Path, seed: int, how: str) -> str:
    """Spoil one layer, drawn by `seed`, as benchmarks/blame.py does; return its name."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        script = importlib.import_module("blame")
    finally:
        sys.path.remove(str(BENCHMARKS))
    layer: str = script.plant(bundle, np.random.default_rng(seed), how)
    return layer
