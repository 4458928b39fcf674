"""Sounds, each of one class."""

from __future__ import annotations

from runtime.tasks.base import Classification, ReadsAudio


class AudioClassification(Classification, ReadsAudio):
    """Choose one class for each sound."""

    name = "audio-classification"
    about = "one class for each sound: a spoken command, a noise, a speaker"
