"""Tiny random models that also see, as Hugging Face folders with their own processors, and questions about images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tiny_lm import SMALL

SPECIAL = (
    "<image>",
    "<|image|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_bos|>",
    "<|AUDIO|>",
    "<|audio_eos|>",
)
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}"
    "{% if part.type == 'image' %}{{ IMAGE }}{% else %}{{ part.text }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Reads contents that are lists of parts, and no other, as many of their kind."""
VOCABULARY = 300
TEXT: dict[str, Any] = {**SMALL, "vocab_size": VOCABULARY, "initializer_range": 0.1, "max_position_embeddings": 256}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 32,
}
NORMAL: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def write_tokens(folder: Path, image: str, **named: str) -> dict[str, int]:
    """Write a tokenizer that knows every byte and SPECIAL, `named` among them, and a template; return their ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {**names, **named, "tokenizer_class": "TokenizersBackend", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", f"'{image}'"))
    return {token: tokenizer.token_to_id(token) for token in SPECIAL}


def write_llava(folder: Path, **sizes: Any) -> Path:
    """A Llama that reads a CLIP tower's patches in the places of <image>. `sizes`: of its language part."""
    import transformers

    folder.mkdir(parents=True)
    ids = write_tokens(folder, "<image>")
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**{**TEXT, **sizes}),
        image_token_id=ids["<image>"],
        vision_feature_layer=-1,
    )
    write_clip_processor(folder)
    return save(config, folder)


def write_vip(folder: Path) -> Path:
    """A Llama that reads what several layers of a CLIP tower say of each patch."""
    import transformers

    folder.mkdir(parents=True)
    ids = write_tokens(folder, "<image>")
    config = transformers.VipLlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=ids["<image>"],
        vision_feature_layer=[-1, -2],
    )
    write_clip_processor(folder)
    return save(config, folder)


def write_gemma(folder: Path) -> Path:
    """A Gemma 3: the tokens of an image see one another, in both directions, within windows, too."""
    import transformers

    folder.mkdir(parents=True)
    named = {"boi_token": "<|vision_start|>", "image_token": "<|image_pad|>", "eoi_token": "<|vision_end|>"}
    ids = write_tokens(folder, "<|vision_start|>", **named)
    vision = {name: size for name, size in VISION.items() if name != "projection_dim"}
    text = {**TEXT, "head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**{**vision, "image_size": 32}),
        text_config=transformers.Gemma3TextConfig(**{**text, "query_pre_attn_scalar": 16}),
        mm_tokens_per_image=4,
        image_token_index=ids["<|image_pad|>"],
        boi_token_index=ids["<|vision_start|>"],
        eoi_token_index=ids["<|vision_end|>"],
    )
    size = {"size": {"height": 32, "width": 32}, "do_pan_and_scan": False}
    write_json(folder, "preprocessor_config.json", image_processor_type="Gemma3ImageProcessor", **size, **NORMAL)
    write_json(folder, "processor_config.json", processor_class="Gemma3Processor", image_seq_length=4)
    return save(config, folder)


def write_qwen(folder: Path) -> Path:
    """A Qwen 3 VL: features of the tower are added behind its first blocks, too, and positions have three axes."""
    import transformers

    folder.mkdir(parents=True)
    ids = write_tokens(folder, "<|vision_start|><|image_pad|><|vision_end|>")
    vision = {name: VISION[name] for name in ("hidden_size", "intermediate_size")}
    tower = {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "patch_size": 8, "num_position_embeddings": 16}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    config = transformers.Qwen3VLConfig(
        vision_config={**vision, **tower, "deepstack_visual_indexes": [0]},
        text_config={**TEXT, "num_hidden_layers": 3, "head_dim": 16, "rope_parameters": rope},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    sizes = {"patch_size": 8, "size": {"shortest_edge": 256, "longest_edge": 1024}, "merge_size": 2}
    write_json(folder, "preprocessor_config.json", image_processor_type="Qwen2VLImageProcessor", **sizes, **NORMAL)
    write_json(folder, "video_preprocessor_config.json", video_processor_type="Qwen3VLVideoProcessor", **sizes)
    write_json(folder, "processor_config.json", processor_class="Qwen3VLProcessor")
    return save(config, folder)


def write_mllama(folder: Path) -> Path:
    """A Llama between whose blocks others look at the image."""
    import transformers

    folder.mkdir(parents=True)
    ids = write_tokens(folder, "<|image|>")
    vision = {name: VISION[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "patch_size")}
    tower = {"num_global_layers": 1, "attention_heads": 2, "image_size": 32, "max_num_tiles": 2}
    shapes = {"supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]], "intermediate_layers_indices": [0]}
    config = transformers.MllamaConfig(
        vision_config={**vision, **tower, **shapes, "vision_output_dim": 64},
        text_config={**TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1]},
        image_token_index=ids["<|image|>"],
    )
    size = {"size": {"height": 32, "width": 32}, "max_image_tiles": 2}
    write_json(folder, "preprocessor_config.json", image_processor_type="MllamaImageProcessor", **size, **NORMAL)
    write_json(folder, "processor_config.json", processor_class="MllamaProcessor")
    return save(config, folder)


def write_clip_processor(folder: Path) -> None:
    size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    write_json(folder, "preprocessor_config.json", image_processor_type="CLIPImageProcessor", **size, **NORMAL)
    processor = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    write_json(folder, "processor_config.json", processor_class="LlavaProcessor", image_token="<image>", **processor)


def write_json(folder: Path, name: str, **values: Any) -> None:
    (folder / name).write_text(json.dumps(values))


def save(config: Any, folder: Path, auto_class: str = "AutoModelForImageTextToText") -> Path:
    import torch
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, auto_class).from_config(config)
        for parameter in model.parameters():
            parameter.data.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def write_questions(folder: Path, name: str, n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Write images and NAME.jsonl with a question about each and its answer; return the rows."""
    from PIL import Image

    (folder / "images").mkdir(exist_ok=True)
    rng, rows = np.random.default_rng(seed), []
    for i in range(n):
        shape = (int(rng.integers(16, 40)), int(rng.integers(16, 40)), 3)
        file = f"images/{name}-{i}.png"
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(folder / file)
        words = ["".join(rng.choice(list("abcdef "), int(rng.integers(4, 9)))).strip() or "a" for _ in range(2)]
        rows.append({"image": file, "text": words[0], "label": words[1]})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def perceiving_recipe(task: str, passes: list[dict[str, Any]], /, texts: bool = False, **parts: Any) -> dict[str, Any]:
    """A recipe of a model in `lm` that also sees or hears, on its own samples or on texts alone."""
    data = {name: {"source": f"jsonl:{name}{'-texts' * texts}.jsonl"} for name in ("calibration", "evaluation")}
    return {
        "version": 1,
        "name": "perceiving",
        "model": {"source": "dir:lm", "task": task},
        "data": data,
        "target": "transformers",
        "passes": passes,
        "export": [{"kind": "checkpoint"}],
        "validate": {"gates": [{"metric": "nll", "max": 20}], "steps": False},
        **parts,
    }
