"""Samples to a model's inputs: images, texts, chats. The one implementation, for calibration, evaluation and
serving."""
