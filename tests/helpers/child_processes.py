"""Say where child processes of tests find modules: in the repository, and among the helpers."""

from __future__ import annotations

import os

from places import HELPERS, ROOT

SEARCH_PATH = os.pathsep.join((str(ROOT), str(HELPERS)))
"""`PYTHONPATH` of a child process; the pytest option `pythonpath` holds for this process alone."""
