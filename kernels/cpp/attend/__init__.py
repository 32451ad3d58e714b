"""Attention of one query a sequence: the parts of its kernel."""
