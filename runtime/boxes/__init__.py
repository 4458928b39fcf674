"""Boxes around objects: what a detector's outputs mean, its detections read from them, and how these are counted."""
