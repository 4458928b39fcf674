"""The numbers: observing, rounding, smoothing, placing, measuring. Plain functions that a notebook can call."""
