"""Serving: requests that come and go on an optimized module (docs/serving_http.md)."""

from kvcompile.serve.request import Completion, Delta, Handle, Result, Usage
from kvcompile.serve.sampling import Sampling

__all__ = ["Completion", "Delta", "Handle", "Result", "Sampling", "Usage"]
