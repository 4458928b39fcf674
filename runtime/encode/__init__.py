"""Samples to a model's inputs: images, audio, texts, chats. The one implementation, for calibration, evaluation and
serving."""
