"""From specs to kernels that run: compiling, loading, and the ops of PyTorch."""
