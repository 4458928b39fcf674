"""Structured pruning: what is coupled, what matters least, what makes up for it. Functions on modules and tensors."""
