"""What takes scripts long is made once, and kept in benchmarks/.trained/: models that they train, rows of tables."""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import HERE, Row

TRAINED = HERE / ".trained"


def find_trained(name: str, settings: object, code: Sequence[Any], train: Callable[[], Any], out: Path) -> float:
    """Write weights to `out`, those kept of these settings and this code or new ones; the seconds that training took.

    `code`: the modules and functions that decide what is learned. `train` gives the module.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    text = repr(settings) + "".join(map(inspect.getsource, code))
    kept = TRAINED / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.safetensors"
    if not kept.is_file():
        begun = time.monotonic()
        weights = {key: value.contiguous() for key, value in train().state_dict().items()}
        TRAINED.mkdir(exist_ok=True)
        save_file(weights, kept, {"seconds": f"{time.monotonic() - begun:.1f}"})
    save_file(load_file(kept), out)
    with safe_open(kept, "pt") as file:
        return float(file.metadata()["seconds"])


def find_row(name: str, settings: object, files: Sequence[str], make: Callable[[], Row]) -> Row:
    """Return a row that was kept of these settings and scripts, or a new one; one that failed is not kept."""
    text = repr(settings).encode() + b"".join(Path(file).read_bytes() for file in files)
    kept = TRAINED / f"{name.replace(' ', '-')}-{hashlib.sha256(text).hexdigest()[:16]}.json"
    if kept.is_file():
        row: Row = json.loads(kept.read_text(encoding="utf-8"))
        return row
    row = make()
    if "failed" not in row:
        TRAINED.mkdir(exist_ok=True)
        kept.write_text(json.dumps(row), encoding="utf-8")
    return row
