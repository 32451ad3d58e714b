"""Artifacts: folders that hold an exported model with its cache, and all that running it takes."""

from kvcompile.artifact.manifest import Manifest

__all__ = ["Manifest"]
