"""Attention of one query a sequence, and of many: the parts of its kernels."""
