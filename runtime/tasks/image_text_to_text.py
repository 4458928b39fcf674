"""Images and texts, and the texts that go on from them: language models that also see."""

from __future__ import annotations

from runtime.tasks.text_generation import TextGeneration


class ImageTextToText(TextGeneration):
    """Continue a text in which there may be images."""

    name = "image-text-to-text"
    about = "text, token by token, by a model that also sees"
