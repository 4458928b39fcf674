"""A text classifier, an image classifier, and a file of Python that makes a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier with a tokenizer file."""
    from transformers import BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("bert")
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = BertConfig(vocab_size=50, max_position_embeddings=64, **sizes)
    config.id2label = {0: "bad", 1: "fair", 2: "good"}
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="session")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import ViTConfig, ViTForImageClassification

    folder = tmp_path_factory.mktemp("vit")
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    torch.manual_seed(0)
    config = ViTConfig(image_size=16, patch_size=8, **sizes)
    config.num_labels = 5
    ViTForImageClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture
def python_file(tmp_path: Path) -> Callable[[str], str]:
    """Writes a module body (torch and nn imported) and gives the source of its factory `make`."""

    def write(body: str) -> str:
        (tmp_path / "net.py").write_text(f"import torch\nfrom torch import nn\n{body}")
        return f"python:{tmp_path / 'net.py'}:make"

    return write
