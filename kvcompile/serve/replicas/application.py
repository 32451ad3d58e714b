"""The Ray Serve application: replicas of an engine, and the HTTP interface in front of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from kvcompile.errors import InputError
from kvcompile.serve.http import Options, create_app
from kvcompile.serve.replicas.ranks import on_ranks
from kvcompile.serve.replicas.remote import RemoteEngine
from kvcompile.serve.replicas.replica import OwnedEngine, Replica
from kvcompile.serve.replicas.router import PrefixRouter

REPLICAS = "replicas"
INTERFACE = "interface"
_HEALTH_SECONDS = 2.0  # a replica is replaced after three looks that find its engine ended
_HEALTH_TIMEOUT = 10.0  # seconds after which a look has found nobody: a replica that hangs is replaced, too
_ONGOING = 4096  # an engine has a queue of its own, and says when that is full


@serve.ingress()
class Interface:
    """Takes HTTP requests, makes tokens of them, and reads what the replicas answer."""

    async def __init__(self, replicas: Any, options: Options):  # type: ignore[misc]  # Ray waits
        """
        Args:
            replicas: of `Replica`.
            options: of the HTTP server.
        """
        self._engine = RemoteEngine(replicas, await replicas.about.remote())
        self._options = options

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._engine, self._options)


def _check(name: str, given: float, least: int) -> None:
    """Raises InputError where a number is none, or too small: the router would fail at every request."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not least <= given < math.inf:
        raise InputError(f"{name}: expected a number from {least} on, got {given!r}")


def application(
    make: Callable[[], OwnedEngine],
    *,
    options: Options | None = None,
    replicas: int | Mapping[str, Any] = 2,
    interfaces: int = 1,
    resources: Mapping[str, Any] | None = None,
    ranks: int = 1,
    drain: float = 30.0,
    load_factor: float = 1.25,
    slack: int = 4,
) -> Any:
    """What `ray.serve.run` takes.

    Args:
        make: gives an engine that has compiled what it needs; called in every replica's process.
        options: of the HTTP server; its name of the model, key and limits.
        replicas: how many, or Ray's `autoscaling_config`, such as {"min_replicas": 1, "max_replicas": 4,
            "target_ongoing_requests": 8}.
        interfaces: processes that take HTTP requests.
        resources: of one replica with all its ranks, as `ray_actor_options`, such as {"num_gpus": 1}.
        ranks: processes of one replica, which have a model together: `make` is called in each of them (see `on_ranks`).
        drain: seconds that requests have in a replica that is to go.
        load_factor, slack: how uneven the load may be for the sake of the prefix cache: see `PrefixRouter`.

    Raises:
        InputError: what Ray does not look at is no number that can be; what it does look at, it refuses itself.
    """
    _check("ranks", ranks, 1)
    _check("slack", slack, 0)
    _check("load_factor", load_factor, 1)
    scale = (
        {"num_replicas": replicas} if isinstance(replicas, int) else {"autoscaling_config": dict(replicas)}
    )
    routing: dict[str, Any] = {
        "request_router_class": f"{PrefixRouter.__module__}.{PrefixRouter.__qualname__}",
        "request_router_kwargs": {"load_factor": load_factor, "slack": slack},
    }
    engines = serve.deployment(
        name=REPLICAS,
        max_ongoing_requests=_ONGOING,
        graceful_shutdown_timeout_s=drain,
        health_check_period_s=_HEALTH_SECONDS,
        health_check_timeout_s=_HEALTH_TIMEOUT,
        ray_actor_options=dict(resources or {}),
        request_router_config=RequestRouterConfig(**routing),
        **scale,
    )(Replica)
    front = serve.deployment(
        name=INTERFACE,
        num_replicas=interfaces,
        max_ongoing_requests=_ONGOING,
        graceful_shutdown_timeout_s=drain,
        ray_actor_options={"num_cpus": 0},
    )(Interface)
    if ranks > 1:
        make = partial(on_ranks, make, ranks)
    return front.bind(engines.bind(make), options or Options())
