"""Computes attention over whole sequences, forgetting and rounding as a layout does: it decides what is right.

It shares with `kernels/reference` what `kernels/shared` holds, and nothing else (`tests/kernels/test_trust.py`).
"""
