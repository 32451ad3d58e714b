"""Dependence: what each value of a captured graph may depend on, by construction and without running it."""

from kvcompile.passes.dependence.analysis import Dependence
from kvcompile.passes.dependence.facts import Fact, Factor, Level, Reason

__all__ = ["Dependence", "Fact", "Factor", "Level", "Reason"]
