"""Speech, written down by an encoder and a decoder."""

from __future__ import annotations

from compress.tasks.base import INT8, Starter, TorchTask
from compress.tasks.text2text_generation import LENGTHS, REFERENCES, number_targets, read_references

AUTOMATIC_SPEECH_RECOGNITION = TorchTask(
    name="automatic-speech-recognition",
    starter=Starter(
        "dir:model",
        """  # audio: a path to each recording; label: what is said, as text
  calibration: {source: "jsonl:train.jsonl", samples: 64}
  evaluation: {source: "jsonl:test.jsonl", samples: 200}
""",
        INT8,
        "    - {metric: wer, max_drop: 0.005}\n",
    ),
    loss="target tokens",
    auto_class="AutoModelForSpeechSeq2Seq",
    outputs={"logits": ("batch", "sequence", "width")},
    lengths=LENGTHS,
    read_labels=read_references,
    usual_names={"label": ("text", *REFERENCES)},
    make_targets=number_targets,
    files=("onnx",),
    tables=("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",),
)
