"""What more than one of `reference`, `oracle` and `triton` is built on: a mistake here is a mistake of all.

`tests/kernels/test_trust.py` lists who uses what; everything else has two implementations that are compared.
"""
