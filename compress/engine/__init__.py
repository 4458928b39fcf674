"""Engines: an ONNX file of a bundle compiled for NVIDIA hardware, and what became of its layers."""
