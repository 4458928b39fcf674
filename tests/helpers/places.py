"""Where the repository's own files lie."""

from __future__ import annotations

from pathlib import Path

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[1]
BENCHMARKS = ROOT / "benchmarks"
RECIPES = ROOT / "recipes"
QUICKSTART = RECIPES / "quickstart.yaml"
