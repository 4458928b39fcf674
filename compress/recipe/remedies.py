"""What would end each cause of slowness that the runtime sees: pieces of recipes, which every bundle carries.

The runtime knows a cause by its name and numbers alone, and puts its backend and its layers into the places for them.
"""

from __future__ import annotations

REMEDIES = {
    "signed_activations": "target: {backend}\npasses:\n  - kind: int8\n",
    "signed_activations_elsewhere": "export:\n  - kind: onnx\n  - kind: onnx\n    target: {backend}\n",
    "unfused_batch_norm": "passes:\n  - kind: int8\n",
    "unfused_qdq": "passes:\n  - kind: int8\n    placement: fastest\n",
    "other_operators": "passes:\n  - kind: int8\n    placement: fastest\n",
    "casts": "target: openvino\n",
    "computed_in_float": "passes:\n  - kind: rtn\n    scheme: W4A16\n",
    "small_groups": "passes:\n  - kind: gptq\n    scheme: W4A16\n    group_size: 128\n",
    "compute_bound": "passes:\n  - kind: int8\n",
    "odd_widths": "passes:\n  - kind: prune_channels\n    round_to: 16\n",
    "no_int8_kernels": "passes:\n  - kind: prune_channels\n    ratio: 0.3\n",
    "zeros_computed": "passes:\n  - kind: prune_channels\n    ratio: 0.3\n  - kind: int8\n",
    "slower_layers": "ignore: [{layers}]  # of the pass that changed them\n",
    "fixed_cost": "validate:\n  gates:\n    - {metric: throughput, min_speedup: 1.5}\n",
}
