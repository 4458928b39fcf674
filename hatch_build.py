"""Puts recipes and pages into the wheel, below compress/share as they lie here, so that links between them hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHARED = (
    "*.md",
    *(f"{folder}/README.md" for folder in ("benchmarks", "compress", "notebooks", "recipes", "runtime")),
    *(f"docs/**/*.{kind}" for kind in ("md", "png")),
    *(f"recipes/**/*.{kind}" for kind in ("yaml", "json")),
)


class ShareRecipesAndPages(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # they are read where they lie
            return
        root = Path(self.root)
        files = sorted(file for pattern in SHARED for file in root.glob(pattern))
        build_data["force_include"] |= {str(file): f"compress/share/{file.relative_to(root)}" for file in files}
