"""Distillation: losses, batches and the loop that teaches a student. Functions on modules and tensors."""
