"""Tiny models as streams see them: saved, their structure found, their calibration data made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from compress.blocks.materialise import copy_without_weights, memory_store
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext
from compress.facts import InputGroup, Structure
from compress.formats.schemes import PRESETS, Scheme
from compress.formats.targets import TARGETS
from compress.models.checkpoint import open_store
from compress.models.huggingface import TextModel
from compress.rounding.quantized_weight import QuantizedWeight, round_to_nearest
from compress.structure.find import find_structure
from compress.work.contexts import ModelContext
from runtime.progress import no_progress

VOCABULARY, N_TOKENS = 64, 12
TEXT = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
W4: Scheme = PRESETS["W4A16"].with_group(16)


def llama(seed: int = 0, layers: int = 2, tied: bool = False, **more: Any) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": layers, "vocab_size": VOCABULARY, **more}
    config = LlamaConfig(**sizes, tie_word_embeddings=tied)
    return LlamaForCausalLM(config).eval()


def bert(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY
    )
    return BertModel(config, add_pooling_layer=False).eval()


def gpt2(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=32)).eval()


def output_of(net: nn.Module) -> str:
    return "last_hidden_state" if type(net).__name__ == "BertModel" else "logits"


def streamed(net: nn.Module, folder: Path | None = None, structure: Structure | None = None) -> StreamedModel:
    """`net` wrapped, its weights in memory, or in `folder`, where it is saved."""
    net.config.use_cache = False  # type: ignore[union-attr]
    module = TextModel(net, output_of(net)).eval().requires_grad_(False)
    template = copy_without_weights(module)
    if folder is None:
        store = memory_store(module)
    else:
        net.save_pretrained(folder, max_shard_size="20kB")  # type: ignore[operator]
        store = open_store(sorted(folder.glob("*.safetensors")), template)
    found = structure or structure_of(module)
    return StreamedModel(lambda: copy_without_weights(template), store, found, TEXT, type(net).__name__)


STRUCTURES: dict[object, Structure] = {}


def structure_of(module: nn.Module) -> Structure:
    """The structure of a wrapped model: found once for all of the same classes, sizes and configuration."""
    classes = tuple((name, type(part)) for name, part in module.named_modules())
    sizes = tuple((name, tuple(tensor.shape)) for name, tensor in module.named_parameters())  # a tied one once
    key = classes, sizes, str(module.wrapped.config)  # type: ignore[union-attr]
    if key not in STRUCTURES:
        STRUCTURES[key] = find_structure(copy_without_weights(module).to("meta"), probe())
    return STRUCTURES[key]


def probe() -> dict[str, Tensor]:
    ids = torch.zeros((2, 8), dtype=torch.int64, device="meta")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def texts(n: int = 5, seed: int = 0, padded: bool = True) -> list[dict[str, np.ndarray]]:
    """Batches of one, every third padded on the right."""
    rng = np.random.default_rng(seed)
    batches = []
    for k in range(n):
        mask = np.ones((1, N_TOKENS), np.int64)
        mask[0, N_TOKENS - 4 * (padded and k % 3 == 2) :] = 0
        batches.append({"input_ids": rng.integers(0, VOCABULARY, (1, N_TOKENS)), "attention_mask": mask})
    return batches


def together(batches: list[dict[str, np.ndarray]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.concatenate([one[name] for one in batches])) for name in batches[0]}


def context(
    batches: Any = (),
    work: Path | None = None,
    log: Callable[[str], None] = lambda text: None,
    target: str = "onnxruntime-cpu",
    **more: Any,
) -> PassContext:
    """What a pass over blocks is given, quietly; `more`: further fields."""
    return PassContext(batches, TARGETS[target], 0, log, no_progress, work=work, **more)


def model_context(batches: Any = (), **more: Any) -> ModelContext:
    """What a pass over the whole torch module is given, quietly; `more`: further fields of ModelContext."""
    return ModelContext(**vars(context(batches)) | more)


def nearest(matrix: Tensor, scheme: Scheme = W4) -> QuantizedWeight:
    weights = scheme.weights
    return round_to_nearest(matrix.numpy(), weights.bits, weights.group_size, weights.symmetric)


def sum_grams(model: StreamedModel, batches: Any, lockstep: bool) -> dict[str, Tensor]:
    """The first layer of each input group -> X^T X of all rows that it reads."""
    grams: dict[str, Tensor] = {}

    def visit(reading: InputGroup, x: Tensor) -> None:
        grams[reading.layers[0]] = grams.get(reading.layers[0], 0) + x.T @ x

    for block in Stream(model, context(batches)):
        if lockstep:
            block.lockstep(visit, lambda reading: None)
        else:
            block.collect(visit)
    return grams
