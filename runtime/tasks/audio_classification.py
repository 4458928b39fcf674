"""Sounds, each of one class."""

from __future__ import annotations

from runtime.encode.audio import AUDIO_COLUMNS
from runtime.tasks.base import Classification


class AudioClassification(Classification):
    """Choose one class for each sound."""

    name = "audio-classification"
    about = "one class for each sound: a spoken command, a noise, a speaker"
    columns = AUDIO_COLUMNS
    preprocess = "audio"
