"""Every notebook runs from end to end in an empty folder, and what is kept of it is fit to be read on a web page."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from child_processes import forked_kernels
from places import HELPERS

from notebooks.execute import NOTEBOOKS, cleaned, execute, notebooks

QUICK_ALONE = f"""
import sys
sys.path.append({str(HELPERS)!r})
from shortcuts import quick_judge
shortcut = quick_judge()  # it ends when it is no longer held
shortcut.__enter__()
"""
QUICK_JUDGE = f"""{QUICK_ALONE}
import gc
gc.freeze()
del gc, sys, quick_judge
"""
"""What is drawn is of fewer measurements: no other backends, no probes of load time and memory."""
ALONE = {"import runtime\nfrom runtime.report": f"{QUICK_ALONE}import runtime\nfrom runtime.report"}
"""In the process that judges a bundle without torch."""
SHORTER = {
    "01_first_recipe": ALONE,
    "02_accuracy_vs_speed": {"(1.2, 1.4), 60": "(1.4,), 1", "speedup=speedup": "max_params=0.5"},
    "04_prune_distill_quantize": {"SECONDS = 60": "SECONDS = 1"},
    "06_language_model_bits": {"steps=300": "steps=20", '("W8A16", "W4A16", "W2A16")': '("W2A16",)', "[:100]": "[:50]"},
    "07_your_own_model": {"max_seconds=60": "max_seconds=1", "speedup=1.6": "max_params=0.5"},
    "08_find_objects": {
        "STEPS = 1200": "STEPS = 20",
        "max_seconds=60": "max_seconds=1",
        "Shapes(300, seed=1), Shapes(200, seed=2)": "Shapes(64, seed=1), Shapes(40, seed=2)",
    },
}
"""Of what takes longest: what is written there -> less of it, which draws the same kinds of pictures."""
MOST_PNG_BYTES = 60_000
PATHS = ("/tmp/", "/home/", "/root/", "/Users/", "site-packages", "C:\\")
"""Signs of the machine that a notebook ran on."""

every_notebook = pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)


def outputs(notebook: Any) -> Iterator[tuple[str, Any]]:
    """(id of the cell, output) of all code cells."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            yield cell.id, output


def drawn(output: Any, kind: str) -> str:
    """What an output holds of a MIME type; "" for nothing."""
    return str(output.get("data", {}).get(kind, ""))


def test_there_are_notebooks_and_the_readme_lists_each() -> None:
    readme = (NOTEBOOKS / "README.md").read_text()
    assert len(notebooks()) >= 3
    assert [path.name for path in notebooks() if f"]({path.name})" not in readme] == []


@every_notebook
def test_it_runs_and_draws_what_is_kept_of_it(path: Path, tmp_path: Path) -> None:
    cache = tmp_path.parent / "cache of the notebooks"  # one for all, as a user has
    with forked_kernels():  # raises what cells do
        done = execute(path, tmp_path, before=QUICK_JUDGE, replaced=SHORTER.get(path.stem, {}), cache=cache)
    done = cleaned(done)
    assert [cell for cell, output in outputs(done) if output.get("name") == "stderr"] == [], "it warns"
    shape = [(cell, output.output_type, sorted(output.get("data", ()))) for cell, output in outputs(done)]
    kept = nbformat.read(path, as_version=4)
    assert shape == [(cell, o.output_type, sorted(o.get("data", ()))) for cell, o in outputs(kept)], (
        f"the outputs that are kept are of another notebook: run `python -m notebooks.execute {path.stem}`"
    )


@pytest.mark.skipif(not os.environ.get("COMPRESS_BENCH"), reason="needs COMPRESS_BENCH, the folder of benchmark data")
def test_inside_gptq_runs_on_a_language_model(tmp_path: Path) -> None:
    done = execute(NOTEBOOKS / "03_inside_gptq.ipynb", tmp_path, os.environ["COMPRESS_BENCH"])
    assert any("mlp.down_proj" in output.get("text", "") for _, output in outputs(done))


@every_notebook
def test_what_is_kept_is_small_complete_and_of_no_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "not executed from the top"
    assert all(not cell.metadata for cell in notebook.cells), "times of execution are kept"
    pictures = [(cell, len(base64.b64decode(drawn(o, "image/png")))) for cell, o in outputs(notebook)]
    assert any(size for _, size in pictures), "no plot"
    assert [(cell, size) for cell, size in pictures if size > MOST_PNG_BYTES] == []
    texts = [
        (cell, str(o.get("text", "")) + drawn(o, "text/html") + drawn(o, "text/plain")) for cell, o in outputs(notebook)
    ]
    assert [(cell, sign) for cell, text in texts for sign in PATHS if sign in text] == []
