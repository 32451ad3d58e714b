"""Rewriting: from a detected graph to one with a cache."""
