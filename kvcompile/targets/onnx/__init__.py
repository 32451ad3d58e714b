"""Target onnx: the rewritten graph as `.onnx` files with one file of weights, and its session."""
