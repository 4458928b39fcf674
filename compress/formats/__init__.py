"""How numbers are stored, what each target runs fast, slow or not at all, and what checkpoints can hold."""
