"""Lines that the recipes `compress new` writes have in common."""

from __future__ import annotations

INT8 = """  - kind: int8                 # weights and activations in eight bits
    calibration: mse           # or minmax, percentile, entropy
    # ignore: ["re:.*head"]    # layers that stay float: names, types, re:patterns
"""
TEXT_DATA = """  calibration: {source: "csv:train.csv", samples: 512}
  evaluation: {source: "csv:test.csv"}
  # columns: {text: sentence, label: label} inside a set says which column is what
"""
TEXT_PASSES = "  - {kind: smoothquant}        # move activation outliers into the weights first\n" + INT8
ACCURACY_GATE = "    - {metric: top1, max_drop: 0.01}\n"
