"""Capture: a model becomes one plain aten graph with dynamic batch and sequence, or is refused."""
