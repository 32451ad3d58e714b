"""Probing: parts of a captured graph evaluated at concrete sizes."""
