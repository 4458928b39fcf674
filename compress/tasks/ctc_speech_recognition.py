"""Speech, written down letter by letter as it is heard."""

from __future__ import annotations

import json
from pathlib import Path

from compress.errors import SourceError
from compress.tasks.base import INT8, Starter, TorchTask
from compress.tasks.text2text_generation import REFERENCES, read_references

VOCABULARY, SETTINGS = "vocab.json", "tokenizer_config.json"
DELIMITER = "|"
"""What Wav2Vec2CTCTokenizer has between words where its settings name no other."""
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
"""Setting -> the token where nothing is set, of what writes nothing; the first is the blank."""


def read_vocabulary(folder: Path) -> tuple[str, ...]:
    """Return what each class of a CTC model writes, by its tokenizer's files: "" for the blank and special tokens.

    SourceError where there is no vocabulary, or one for each of several languages.
    """
    try:
        vocabulary = json.loads((folder / VOCABULARY).read_text(encoding="utf-8"))
        settings = folder / SETTINGS
        said = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    except (OSError, ValueError) as error:
        raise SourceError(f"{folder}: its vocabulary cannot be read: {error}; give model.class_names") from error
    if not vocabulary or not all(type(number) is int for number in vocabulary.values()):
        raise SourceError(
            f"{folder / VOCABULARY}: is no list of tokens with their numbers, as of one language; give "
            'model.class_names: what each output writes, "" for the blank'
        )
    tokens = [said.get(name) or usual for name, usual in SPECIAL.items()]
    tokens = [token["content"] if isinstance(token, dict) else token for token in tokens]  # as added tokens are written
    written = dict.fromkeys(tokens, "") | {said.get("word_delimiter_token", DELIMITER): " "}
    names = {number: written.get(token, token) for token, number in vocabulary.items()}
    lower = bool(said.get("do_lower_case"))
    return tuple(name.lower() if lower else name for name in (names.get(i, "") for i in range(max(names) + 1)))


CTC_SPEECH_RECOGNITION = TorchTask(
    name="ctc-speech-recognition",
    starter=Starter(
        "dir:model",
        """  # audio: a path to each recording; label: what is said, as text
  calibration: {source: "jsonl:train.jsonl", samples: 64}
  evaluation: {source: "jsonl:test.jsonl"}
""",
        INT8,
        "    - {metric: wer, max_drop: 0.005}\n",
    ),
    loss="outputs",
    pipeline_tag="automatic-speech-recognition",
    auto_class="AutoModelForCTC",
    outputs={"logits": ("batch", "frames", "classes")},
    read_labels=read_references,
    read_class_names=read_vocabulary,
    usual_names={"label": ("text", *REFERENCES)},
    make_targets=lambda columns, _: None,
    tables=("MODEL_FOR_CTC_MAPPING_NAMES",),
)
