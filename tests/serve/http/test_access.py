"""Who may ask: the key, the host, the address that is bound to."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator

import httpx2
import openai
import pytest

from kvcompile.errors import KVCompileError
from kvcompile.serve.http import LOOPBACK, Options, bind, url
from tests.serve.http.fake_engine import FakeEngine, tiny_tokenizer
from tests.serve.http.running_server import TRUSTED, Running, running
from tests.serve.http.test_errors import error_of

KEY = "sk-3f9é"


@pytest.fixture(scope="module")
def keyed(engine: FakeEngine) -> Iterator[Running]:
    with running(engine, Options(api_key=KEY)) as found:
        yield found


@pytest.fixture(scope="module")
def local(engine: FakeEngine) -> Iterator[Running]:
    with running(engine, Options(hosts=LOOPBACK)) as found:
        yield found


def test_the_right_key(serving: Callable[..., Running]) -> None:
    server = serving(FakeEngine(tiny_tokenizer()), Options(api_key="sk-3f9"))
    client = server.client(api_key="sk-3f9")
    assert client.completions.create(model="fake", prompt="w3").choices[0].text
    assert client.models.list().data


@pytest.mark.parametrize("header", ["Bearer sk-3f9é", "bearer   sk-3f9é"])
def test_the_scheme_has_no_case(keyed: Running, header: str) -> None:
    response = httpx2.get(f"{keyed.url}/models", headers={"Authorization": header.encode()}, verify=TRUSTED)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer sk-3f", "Bearer sk-3f9é0", "Basic sk-3f9é", "sk-3f9é"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/metrics", "/openapi.json", "/v2"])
def test_wrong_keys(keyed: Running, header: str | None, path: str) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    response = httpx2.get(f"{keyed.root}{path}", headers=headers, verify=TRUSTED)
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    error = error_of(response)
    assert error["code"] == "invalid_api_key" and KEY not in response.text


def test_what_the_client_says_of_a_wrong_key(keyed: Running) -> None:
    with pytest.raises(openai.AuthenticationError, match="a wrong API key"):
        keyed.client(api_key="other").completions.create(model="fake", prompt="w3")


def test_health_needs_no_key(keyed: Running) -> None:
    response = httpx2.get(f"{keyed.root}/health", verify=TRUSTED)
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_keys_are_not_shown() -> None:
    assert KEY not in repr(Options(api_key=KEY))


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("LOCALHOST:8000", 200), ("127.0.0.1:1", 200), ("[::1]:8000", 200), ("localhost.", 200),
     ("evil.example", 403), ("localhost.evil.example", 403), ("evil.example:8000", 403), ("[", 403), ("", 403)],
)  # fmt: skip
def test_hosts(local: Running, host: str, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(local.root.rpartition(":")[2]), timeout=10)
    connection.request("GET", "/v1/models", headers={"Host": host})
    response = connection.getresponse()
    assert response.status == status, response.read()
    connection.close()


def test_addresses() -> None:
    with bind("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        assert bound.getsockname()[0] == "127.0.0.1" and url(bound) == f"http://127.0.0.1:{port}/v1"
        with pytest.raises(KVCompileError, match=rf"cannot serve on 127\.0\.0\.1 port {port}"):
            bind("127.0.0.1", port)
    with pytest.raises(KVCompileError, match=r"cannot serve on no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)


def test_addresses_of_ipv6() -> None:
    try:
        bound = bind("::1", 0)
    except KVCompileError:
        pytest.skip("this machine has no IPv6")
    with bound:
        assert url(bound) == f"http://[::1]:{bound.getsockname()[1]}/v1"
