"""Torch-Pruning's one-shot structured pruning of CIFAR ResNets: JOB. No training follows.

Job: "network" (the Python file that builds it), "factory" in it; "weights" (.safetensors); "ratio" of the channels
that go; "grouping": "default" (all coupled channels, as the library finds them) or "inner" (only channels inside the
residual blocks, rounded to 8); "input" (its name); "out" (.onnx); "result". L2 importance, local, as its README begins
with.
Result: "macs_ratio", "parameters_ratio": of before over after.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch_pruning
from jobs import read_job, write_result
from safetensors.torch import load_file


def build(job: dict[str, Any]) -> torch.nn.Module:
    """The trained network."""
    spec = importlib.util.spec_from_file_location("network", Path(job["network"]))
    assert spec is not None and spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    network: torch.nn.Module = getattr(code, job["factory"])()
    network.load_state_dict(load_file(job["weights"]))
    return network.eval()


def main() -> None:
    job = read_job()
    network, example = build(job), torch.zeros(1, 3, 32, 32)
    inner = job["grouping"] == "inner"
    stay = [part for name, part in network.named_modules() if name == "linear" or (inner and _writes_outside(name))]
    before = torch_pruning.utils.count_ops_and_params(network, example)
    pruner = torch_pruning.pruner.MagnitudePruner(
        network,
        example,
        importance=torch_pruning.importance.MagnitudeImportance(p=2),
        pruning_ratio=job["ratio"],
        ignored_layers=stay,
        round_to=8 if inner else None,
    )
    pruner.step()
    after = torch_pruning.utils.count_ops_and_params(network, example)
    batch = torch.export.Dim("batch")
    torch.onnx.export(
        network,
        (example,),
        job["out"],
        input_names=[job["input"]],
        output_names=["logits"],
        dynamic_shapes=({0: batch},),
        dynamo=True,
        external_data=False,
    )
    write_result(job, macs_ratio=before[0] / after[0], parameters_ratio=before[1] / after[1])


def _writes_outside(name: str) -> bool:
    """True for a convolution whose channels are added to others: the first one, and the second of every block."""
    return name == "conv1" or name.endswith(".conv2")


if __name__ == "__main__":
    main()
