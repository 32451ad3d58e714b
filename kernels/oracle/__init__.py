"""Attention over whole sequences that forgets and rounds as a layout does, with no cache: what decides who is right.

It shares with `kernels/reference` what `kernels/shared` holds, and nothing else (`tests/kernels/test_trust.py`).
"""
