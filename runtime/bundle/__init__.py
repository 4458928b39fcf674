"""The bundle's format: its manifest, its files, and the readers of both."""
