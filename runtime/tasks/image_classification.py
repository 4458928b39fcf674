"""Images, each of one class."""

from __future__ import annotations

from runtime.tasks.base import Classification


class ImageClassification(Classification):
    """Choose one class for each image."""

    name = "image-classification"
    about = "one class for each image"
    columns = ("image",)
    preprocess = "image"
