"""Target tensorrt: engines of ONNX files traced under TensorRT's dialect, and their session."""
