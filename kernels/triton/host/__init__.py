"""Launches kernels for an op: which ones a call is made of, with which arguments, on which device."""
