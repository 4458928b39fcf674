"""ONNX graphs as the passes see them: read, written, searched for layers, run over calibration data."""
