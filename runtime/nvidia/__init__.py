"""NVIDIA's libraries behind small functions: CUDA, TensorRT, the driver's own tool."""
