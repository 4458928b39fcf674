"""What the person of these scripts has before a line is written: a network, a language model, and their data.

`BENCH` and `NETWORK` in the environment: the folder of benchmark data, and the file that builds the network.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

BENCH = Path(os.environ["BENCH"])
WEIGHTS = "models/cifar10-resnet56/model.safetensors"
WRITER, STORIES = "models/tinystories656k-hf", "data/tinystories/stories.jsonl"


def read_network() -> torch.nn.Module:
    """Return ResNet-56 with its weights."""
    from safetensors.torch import load_file

    spec = importlib.util.spec_from_file_location("network", os.environ["NETWORK"])
    assert spec is not None and spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    sys.modules["network"] = code  # a pickle of the network names it
    spec.loader.exec_module(code)
    net: torch.nn.Module = code.resnet56()
    net.load_state_dict(load_file(BENCH / WEIGHTS))
    return net.eval()


def read_images(name: str) -> DataLoader[Any]:
    """Return the CIFAR-10 images as the network reads them, and their classes."""
    with np.load(BENCH / f"data/cifar10/{name}.npz") as arrays:
        pixels = (arrays["image"] / np.float32(255) - np.float32([0.485, 0.456, 0.406])) / np.float32(
            [0.229, 0.224, 0.225]
        )
        images, labels = torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()), torch.from_numpy(arrays["label"])
    return DataLoader(TensorDataset(images, labels), 64, shuffle=name == "train")


def read_writer() -> tuple[Any, Any]:
    """Return the teller of stories and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = BENCH / WRITER
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def read_stories() -> tuple[list[str], list[str]]:
    """Return stories to calibrate on, and others to judge on."""
    with open(BENCH / STORIES) as file:
        stories = [json.loads(line)["text"] for line in file]
    return stories[400:656], stories[200:400]


def tell(known: Any) -> None:
    """Print what is known at the end: of a result of ours what was judged."""
    if not isinstance(known, str):
        from runtime.report.report import table_rows

        shown = ("size", "latency p50", "time per token", "top1", "nll")
        rows = [row for row in table_rows(known.report) if row.name in shown]
        known = "; ".join([known.verdict, *(f"{row.name} {row.before} to {row.after} {row.change}" for row in rows)])
    print(f"known: {known}")
