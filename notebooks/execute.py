"""Execute notebooks and keep their outputs: `python -m notebooks.execute [NAME ...]`, all of them without a name.

Each runs in a folder of its own, offline, with an empty cache, on the models of COMPRESS_BENCH where
that names a folder. What changes from run to run without being a result
(times of execution, versions of Python) is not kept.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).resolve().parent
TIMEOUT_S = 900
"""For one cell: a search is one, and other work on the machine may slow it several times."""
QUIET = "--log-level=ERROR"
"""The kernel's own; it warns that it listens on this machine's sockets."""
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

DRAWN = {"text/html", "image/png"}


def notebooks() -> list[Path]:
    """All of this folder, in their order."""
    return sorted(NOTEBOOKS.glob("*.ipynb"))


def execute(
    path: Path,
    folder: Path,
    bench: str = "",
    before: str = "",
    replaced: Mapping[str, str] = MappingProxyType({}),
    cache: Path | None = None,
) -> NotebookNode:
    """Return the notebook `path` with the outputs of a run in `folder`, where all its files go. The file stays.

    `bench` is what the notebook sees as COMPRESS_BENCH, whatever it is outside. `before`: code that its kernel runs
    first, unseen. `replaced`: text of its cells -> what is run instead; ValueError for one that no cell holds.
    `cache`: where finished results lie; None for an empty one. Raises CellExecutionError with the traceback of the
    first cell that fails.
    """
    notebook = nbformat.read(path, as_version=4)
    for old, new in replaced.items():
        cells = [cell for cell in notebook.cells if old in cell.source]
        if not cells:
            raise ValueError(f"{path.name}: no cell holds {old!r}")
        for cell in cells:
            cell.source = cell.source.replace(old, new)
    startup = folder / "ipython/profile_default/startup/before.py"
    startup.parent.mkdir(parents=True)
    startup.write_text(before)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(NOTEBOOKS.parent), os.environ.get("PYTHONPATH")))),
        "COMPRESS_BENCH": bench,
        "CI": "true",  # no bars, which would be kept
        "COMPRESS_CACHE": str(cache or folder / "cache"),
        "IPYTHONDIR": str(folder / "ipython"),
        "TMPDIR": str(folder),  # the notebooks' own temporary folders
    }
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        extra_arguments=[QUIET],
        coalesce_streams=True,  # what one cell prints is one output, however often the kernel flushed it
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute(env=environment)


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """The same without what differs between two runs that give the same; changed in place.

    Of an output that is drawn, its plain text is not kept: that of a plan or a report holds the paths of this machine.
    """
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if DRAWN & data.keys():
                data.pop("text/plain", None)
    return notebook


def main(names: list[str]) -> None:
    """Execute and rewrite the notebooks of these names (01_first_recipe), or all."""
    for path in [NOTEBOOKS / f"{name.removesuffix('.ipynb')}.ipynb" for name in names] or notebooks():
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(cleaned(execute(path, Path(folder), os.environ.get("COMPRESS_BENCH", ""))), path)
        print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
