"""TensorRT: engines of ONNX files traced under `kernels.dialect.TENSORRT`, and Triton kernels as plugins."""
