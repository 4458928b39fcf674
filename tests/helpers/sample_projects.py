"""Write small models and data under the names that the documentation and the recipes by use case give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

NETWORK = '''
import torch
from torch import nn


class Network(nn.Module):
    """float32 [N, 3, 32, 32] -> [N, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, stride=2, bias=False)
        self.norm1 = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 32, 3, stride=2, bias=False)
        self.norm2 = nn.BatchNorm2d(32)
        self.linear = nn.Linear(32, 10)

    def forward(self, image):
        hidden = torch.relu(self.norm1(self.conv1(image)))
        return self.linear(torch.relu(self.norm2(self.conv2(hidden))).mean((2, 3)))


def build():
    return Network()
'''


def write_image_files(folder: Path) -> None:
    """Write model.py, its weights, model.onnx and npz files as the pages name them."""
    import torch
    from onnx import TensorProto, helper, numpy_helper, save
    from safetensors.torch import save_file

    (folder / "model.py").write_text(NETWORK)
    scope: dict[str, Any] = {}
    exec(NETWORK, scope)
    with torch.random.fork_rng(devices=[]):
        save_file(scope["build"]().state_dict(), folder / "model.safetensors")
    rng = np.random.default_rng(0)
    weights = {"kernel": rng.normal(size=(8, 3, 3, 3)), "matrix": rng.normal(size=(8 * 30 * 30, 10)) / 80}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["image", "kernel"], ["maps"], "conv"),
            helper.make_node("Relu", ["maps"], ["active"], "relu"),
            helper.make_node("Flatten", ["active"], ["flat"], "flatten"),
            helper.make_node("Gemm", ["flat", "matrix"], ["logits"], "linear"),
        ],
        "network",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 32, 32])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), folder / "model.onnx")
    (folder / "metrics.py").write_text(
        "def cost(outputs, labels):\n    return 1.0 * (outputs['logits'].argmax(1) != labels)\n"
    )
    for name in ("train", "test", "day", "night"):
        images = rng.integers(0, 256, (512, 32, 32, 3), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", image=images, label=rng.integers(0, 10, 512), weather=np.arange(512) % 3)


def write_tensor_files(folder: Path) -> None:
    """Write the same files, their samples as the graph's own inputs."""
    write_image_files(folder)
    for name in ("train", "test"):
        images = np.load(folder / f"{name}.npz")["image"]
        np.savez(folder / f"{name}.npz", image=images.transpose(0, 3, 1, 2).astype(np.float32) / 255)


def write_language_files(folder: Path) -> None:
    """Write model/, a Llama with its tokenizer, and lines of text."""
    from tiny_lm import language_folder, write_texts

    sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 4096}
    language_folder(folder / "model", **sizes)
    write_texts(folder / "train.jsonl", 512, length=60)
    write_texts(folder / "test.jsonl", 200, seed=1, length=60)


def write_text_files(folder: Path) -> None:
    """Write model/, a classifier of texts with its tokenizer, and labelled lines of text."""
    from makers import text_folder, write_texts

    text_folder(folder / "model", "classifier")
    for name in ("train", "test"):
        write_texts(folder / f"{name}.jsonl", 512)


def write_seeing_files(folder: Path) -> None:
    """Write model/, a LLaVA with its processor, and lines of questions about images."""
    from seeing import write_llava, write_questions

    sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 4096}
    write_llava(folder / "model", **sizes)
    write_questions(folder, "train", 128)
    write_questions(folder, "test", 200, seed=1)


def write_hearing_files(folder: Path) -> None:
    """Write model/, a Qwen2-Audio with its processor, and lines of questions about sounds."""
    from hearing import write_qwen, write_sounds

    write_qwen(folder / "model", hidden_size=128, intermediate_size=256, max_position_embeddings=4096)
    write_sounds(folder, "train", 128)
    write_sounds(folder, "test", 200, seed=1)


WRITERS = {
    "image-classification": write_image_files,
    "generic": write_tensor_files,
    "text-generation": write_language_files,
    "image-text-to-text": write_seeing_files,
    "audio-text-to-text": write_hearing_files,
    "text-classification": write_text_files,
}


def write_projects(folder: Path) -> None:
    """Write for each task a folder with a small model and data."""
    for task, write in WRITERS.items():
        (folder / task).mkdir()
        write(folder / task)
