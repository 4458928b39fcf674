"""Say where child processes of tests find modules: in the repository, and among the helpers."""

from __future__ import annotations

import os
from pathlib import Path

HELPERS = Path(__file__).parent
SEARCH_PATH = os.pathsep.join((str(HELPERS.parents[1]), str(HELPERS)))
"""`PYTHONPATH` of a child process; the pytest option `pythonpath` holds for this process alone."""
