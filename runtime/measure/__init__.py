"""How fast, how big, how much memory: measured here, baseline and candidate in the same rounds."""
