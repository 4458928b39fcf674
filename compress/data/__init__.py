"""Sets of samples: what a recipe's `data:` names, looked at when planning and loaded when applying. No torch here.

`inspect_data` answers at plan time (is it there, is it enough, which columns, which shapes); `load_samples` reads the
samples, checked; `overlap` counts those that two sets share.
"""

from __future__ import annotations

from compress.data.inspect import DataFacts, inspect_data
from compress.data.samples import Samples, load_samples, overlap

__all__ = ["DataFacts", "Samples", "inspect_data", "load_samples", "overlap"]
