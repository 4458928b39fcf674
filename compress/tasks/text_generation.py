"""Texts, continued token by token."""

from __future__ import annotations

from compress.tasks.base import Starter, TorchTask

TEXT_GENERATION = TorchTask(
    name="text-generation",
    starter=Starter(
        "dir:model",
        """  # texts, or conversations: a column `messages` of {role, content}, rendered with the model's chat template
  # each text alone, or with `preprocess: {kind: language, pack: 512}` windows of the texts joined
  calibration: {source: "jsonl:train.jsonl", samples: 256}
  evaluation: {source: "jsonl:test.jsonl", samples: 200}
""",
        "  - {kind: gptq, scheme: W4A16, group_size: 32}   # lm_head stays float; awq before it is a normal thing\n",
        "    - {metric: nll, max_drop: 0.05}         # nats per token\n",
    ),
    loss="next tokens",
    auto_class="AutoModelForCausalLM",
    files=("onnx", "openvino", "tensorrt", "tensorrt-rtx", "checkpoint", "gguf"),
    chats=True,
    outputs={"logits": ("batch", "sequence", "width")},
)
