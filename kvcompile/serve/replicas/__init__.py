"""Many engines behind one HTTP interface, on Ray Serve (docs/serving_replicas.md); `pip install 'kvcompile[ray]'`."""

from kvcompile.serve.replicas.application import application
from kvcompile.serve.replicas.ranks import on_ranks

__all__ = ["application", "on_ranks"]
