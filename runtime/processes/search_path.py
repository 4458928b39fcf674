"""Where modules are looked up by our own programs and their children: never in the folder that a command works on.

`python -m` puts the working directory first, and a bundle's folder may hold a numpy.py. This module is the first that
`python -m runtime` and `python -m compress` import, so that it imports nothing itself that is not loaded already: even
`from __future__ import annotations` would look for `__future__.py` in the bundle.
"""

import os
import sys

PROGRAMS = ("runtime", "compress")
"""Packages that are started by `python -m`, also as `python -m runtime.lm_eval_adapter`."""
SCRIPTS = ("compress", "compress-run")
"""Console scripts that stand for them."""
HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The folder in which `runtime` and `compress` lie: site-packages, or a source checkout."""
MANIFEST = "manifest.json"


def is_own_program() -> bool:
    """Return whether this process runs our command line; False where it imports `runtime` as a library."""
    if sys.argv[:1] != ["-m"]:
        return os.path.basename(sys.argv[0] if sys.argv else "").removesuffix(".exe") in SCRIPTS
    # while `python -m` locates its module, argv is ["-m", *arguments]; orig_argv still has the module before them
    module = sys.orig_argv[-len(sys.argv)].partition(".")[0]
    return module in PROGRAMS or (module.startswith("-") and module.endswith(tuple(f"m{name}" for name in PROGRAMS)))


def keep_trusted(entries: list[str], named: str = "") -> list[str]:
    """Return the entries of a search path that are not the working directory.

    It stays, as the last, where our own code lies in it or `named`, a PYTHONPATH, gives it in full; a bundle's never.
    """
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        here = ""
    kept = [entry for entry in entries if os.path.isabs(entry) and not _is_same_folder(entry, here)]
    wanted = _is_same_folder(HOME, here) or here in filter(os.path.isabs, named.split(os.pathsep))
    return [*kept, here] if wanted and not holds_bundle(here) else kept


def holds_bundle(folder: str) -> bool:
    """Return whether `folder` is a bundle's, whose files are anybody's."""
    return os.path.exists(os.path.join(folder, MANIFEST))


def leave_working_directory() -> None:
    """Look no module up in the working directory, here or in Python processes that this one starts."""
    sys.path[:] = keep_trusted(sys.path, os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONSAFEPATH"] = "1"


def _is_same_folder(entry: str, folder: str) -> bool:
    return os.path.realpath(entry) == os.path.realpath(folder)


if is_own_program():
    leave_working_directory()
