"""Sounds and texts, and the texts that go on from them: language models that also hear."""

from __future__ import annotations

from compress.tasks.base import Starter, TorchTask
from compress.tasks.text2text_generation import read_references

AUDIO_TEXT_TO_TEXT = TorchTask(
    name="audio-text-to-text",
    starter=Starter(
        "dir:model",
        """  # texts alone; or a column `messages` of {role, content}, with sounds; or columns audio, text and label:
  # a path to a sound, what is asked about it, and the answer, which alone is scored
  calibration: {source: "jsonl:train.jsonl", samples: 128}
  evaluation: {source: "jsonl:test.jsonl", samples: 200}
""",
        "  - {kind: gptq, scheme: W4A16}   # the language part; what hears stays as it is\n",
        "    - {metric: nll, max_drop: 0.05}         # nats per token of the answers\n",
        target="transformers",
    ),
    loss="next tokens",
    auto_class="AutoModelForMultimodalLM",
    outputs={"logits": ("batch", "sequence", "width")},
    read_labels=read_references,
    usual_names={"text": ("question", "prompt"), "label": ("answer",), "audio": ("audios", "sound")},
    files=("checkpoint",),
    chats=True,
    perceives="audio",
    tables=("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",),
)
