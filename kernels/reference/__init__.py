"""Runs the cache in plain PyTorch, which Inductor compiles, and which generated kernels are held against."""
