"""OpenAI's interface over HTTP, for an engine (docs/serving_http.md); needs `pip install 'kvcompile[serve]'`."""

from kvcompile.serve.http.app import create_app
from kvcompile.serve.http.options import LOOPBACK, Limits, Options
from kvcompile.serve.http.server import bind, serve, url

__all__ = ["LOOPBACK", "Limits", "Options", "bind", "create_app", "serve", "url"]
