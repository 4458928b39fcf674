"""Export a net when this is imported: processes forked later have what a first export imports and looks up."""

from __future__ import annotations

import gc

import torch
from torch import nn

from compress.export.onnx import export_program


def export_net() -> None:
    free = {"input": {0: torch.export.Dim("batch")}}
    with torch.random.fork_rng(devices=[]):
        net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2)).eval()
    export_program(net, "net", {"input": torch.ones(2, 1, 5, 5)}, ["x"], ["y"], free, 20)


export_net()
gc.collect()
gc.freeze()  # forked processes collect their own alone
