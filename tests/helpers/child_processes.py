"""Say where child processes of tests find modules: in the repository, among the helpers and among the tests."""

from __future__ import annotations

import os

from places import HELPERS, ROOT

ROOMS = sorted({str(path.parent) for path in (ROOT / "tests").rglob("test_*.py")})
SEARCH_PATH = os.pathsep.join((str(ROOT), str(HELPERS), *ROOMS))
"""`PYTHONPATH` of a child process; the pytest option `pythonpath` holds for this process alone."""
