"""What Ray's router calls and what is made of it: loads are of what was sent, whether or not it was taken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
from kvcompile.errors import InputError
from kvcompile.serve.replicas import application
from kvcompile.serve.replicas.router import PrefixRouter


@pytest.fixture
def router() -> Iterator[Any]:
    made: Any = object.__new__(PrefixRouter)
    made._use_replica_queue_len_cache = False  # Ray's own counts
    made.initialize_state()
    yield made


def order(router: PrefixRouter, *names: str, beginnings: tuple[str, ...] = ()) -> list[str]:
    """Replicas in the order in which a request is offered to them."""
    replicas: Any = [SimpleNamespace(replica_id=name) for name in names]
    request: Any = SimpleNamespace(kwargs={"beginnings": beginnings})
    groups = asyncio.run(router.choose_replicas(replicas, request))
    return [str(replica.replica_id) for (replica,) in groups]


def test_a_replica_that_takes_nothing_has_a_load(router: Any) -> None:
    """It hangs: what was sent to it is neither taken nor ended."""
    assert order(router, "hangs", "lives")[0] == "hangs"
    router.on_send_request("hangs")
    assert order(router, "hangs", "lives")[0] == "lives"


def test_what_goes_to_all_replicas_leaves_their_loads(router: Any) -> None:
    """Of what goes to all of them, as /metrics does, Ray tells routers that it has ended, and not that it was taken."""
    for _ in range(100):
        for name in ("old", "other"):
            router.on_send_request(name)
            router.on_request_completed(name, "x")
    for _ in range(5):
        router.on_send_request("old")
    assert order(router, "old", "new")[0] == "new"
    router._places.note(["b"], "old")
    assert order(router, "old", "new", beginnings=("b",))[0] == "new", "it has more than its share"


def test_no_load_is_below_none(router: Any) -> None:
    """Ray tells that a request has ended, too, where it could not be sent."""
    router.on_request_completed("out of reach", "x")
    router.on_send_request("out of reach")
    assert order(router, "out of reach", "idle")[0] == "idle"


@pytest.mark.parametrize(
    "given", [{"ranks": 0}, {"load_factor": float("nan")}, {"load_factor": 0.5}, {"slack": -1}]
)
def test_what_the_router_cannot_go_by_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match=f"{next(iter(given))}: expected a number from"):
        application(lambda: None, **given)
