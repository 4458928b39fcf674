"""Speech, written down."""

from __future__ import annotations

from runtime.encode.audio import AUDIO_COLUMNS
from runtime.tasks.text2text_generation import WritesAnswers


class AutomaticSpeechRecognition(WritesAnswers):
    """Write down what is said: Whisper and the like. Of a recording in several pieces, one text after the other."""

    name = "automatic-speech-recognition"
    about = "what is said in a recording, by an encoder and a decoder"
    columns = AUDIO_COLUMNS
    longer_audio = "pauses"
