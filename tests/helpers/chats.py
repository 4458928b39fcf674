"""Chat templates in the style of real families, a tokenizer with their tokens, and conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_lm import language_folder

TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}"
    "{{ '<|im_start|>assistant\ncall ' + m.tool_calls | tojson + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '(no thinking)' }}{% endif %}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
REASONING = (  # Qwen 3: only the last turn has its reasoning, an empty one too
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '(thinks)\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REWRITING = (  # what is before depends on what follows
    "{% for m in messages %}{{ loop.length ~ m.role + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
)
TURNS = [
    {"role": "user", "content": "what is it"},
    {"role": "assistant", "content": "a cat"},
    {"role": "user", "content": "and this"},
    {"role": "assistant", "content": "two dogs"},
]


def chat_folder(folder: Path, template: Any = LLAMA, **sizes: Any) -> Path:
    """Write a tiny Llama whose tokenizer knows every byte and TOKENS, and has this chat template."""
    language_folder(folder, vocab_size=300, **sizes)
    write_chat_tokenizer(folder, template)
    return folder


def write_chat_tokenizer(folder: Path, template: Any) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    words = ["<pad>", "<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {**names, "tokenizer_class": "TokenizersBackend", "add_bos_token": True}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_chats(path: Path, n: int, length: int = 4, seed: int = 0, key: str = "messages") -> Path:
    """Write `n` conversations of two turns of random words, as jsonl."""
    import numpy as np

    rng = np.random.default_rng(seed)

    def words() -> str:
        return " ".join("".join(rng.choice(list("abcdefgh"), 3)) for _ in range(rng.integers(1, length)))

    rows = [
        {key: [{"role": role, "content": words()} for role in ("user", "assistant", "user", "assistant")]}
        for _ in range(n)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
