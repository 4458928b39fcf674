"""Writing what the passes decided: float ONNX with parity, the file each target gets, the bundle around it."""
