"""Tools for who looks at C++ kernels; nothing here runs when a model does."""
