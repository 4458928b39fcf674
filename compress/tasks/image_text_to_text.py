"""Images and texts, and the texts that go on from them: language models that also see."""

from __future__ import annotations

from compress.tasks.base import Starter, TorchTask
from compress.tasks.text2text_generation import read_references

IMAGE_TEXT_TO_TEXT = TorchTask(
    name="image-text-to-text",
    starter=Starter(
        "dir:model",
        """  # texts alone; or a column `messages` of {role, content}, with images; or columns image, text and label:
  # a path to an image, what is asked about it, and the answer, which alone is scored
  calibration: {source: "jsonl:train.jsonl", samples: 128}
  evaluation: {source: "jsonl:test.jsonl", samples: 200}
""",
        "  - {kind: gptq, scheme: W4A16}   # the language part; what sees stays as it is\n",
        "    - {metric: nll, max_drop: 0.05}         # nats per token of the answers\n",
        target="transformers",
    ),
    loss="next tokens",
    auto_class="AutoModelForImageTextToText",
    outputs={"logits": ("batch", "sequence", "width")},
    read_labels=read_references,
    usual_names={"text": ("question", "prompt"), "label": ("answer", "caption"), "image": ("images",)},
    files=("onnx", "checkpoint"),
    chats=True,
    perceives="image",
    tables=("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",),
)
