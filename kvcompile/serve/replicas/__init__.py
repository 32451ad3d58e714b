"""Many engines behind one HTTP interface, on Ray Serve (docs/serving_replicas.md); `pip install 'kvcompile[ray]'`."""

from kvcompile.serve.replicas.application import application

__all__ = ["application"]
