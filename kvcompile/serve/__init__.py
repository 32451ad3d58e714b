"""Serving: requests that come and go on an optimized module (docs/serving.md)."""

from kvcompile.serve.engine import Engine
from kvcompile.serve.ranks import follow
from kvcompile.serve.request import Completion, Delta, Handle, Result, Usage
from kvcompile.serve.sampling import Sampling, Structure
from kvcompile.serve.stats import Stats

__all__ = [
    "Completion",
    "Delta",
    "Engine",
    "Handle",
    "Result",
    "Sampling",
    "Stats",
    "Structure",
    "Usage",
    "follow",
]
