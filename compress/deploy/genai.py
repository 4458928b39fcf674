"""The folder that onnxruntime-genai opens, out of a decoder's bundle."""

from __future__ import annotations

import shutil
from pathlib import Path

from compress.errors import ExportError
from runtime.bundle.format import verify

CONFIG = "genai_config.json"


def write_folder(bundle: Path, out: Path) -> Path:
    """Write model, tokenizer and configuration to `out`, which must not exist. ExportError if the bundle has none."""
    manifest = verify(bundle)
    folders = sorted({Path(name).parent for name in manifest.files if Path(name).name == CONFIG})
    if not folders:
        raise ExportError(
            f"{bundle}: no {CONFIG}: onnxruntime-genai runs decoders that were made for onnxruntime-cpu, with their "
            "keys and values in one buffer"
        )
    out.mkdir(parents=True)
    for name in manifest.files:
        if Path(name).is_relative_to(folders[0]):
            target = out / Path(name).relative_to(folders[0])
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle / name, target)
    return out
