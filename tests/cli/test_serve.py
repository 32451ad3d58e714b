"""`kvcompile serve`: what it makes of its options, what it says, and how it ends."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from typer.testing import CliRunner

import kvcompile.cli.serve as command
import kvcompile.serve.http as http
from kvcompile.cli import app
from kvcompile.cli.common import on_ranks
from tests.serve.http.fake_engine import FakeEngine, tiny_tokenizer


class Made:
    """What the command made: the engine's arguments, the application, and where it serves."""

    def __init__(self) -> None:
        self.engine = FakeEngine(tiny_tokenizer())
        self.closed = False
        self.arguments: tuple[Any, ...] = ()
        self.more: dict[str, Any] = {}
        self.url = ""
        self.ready = threading.Event()
        self.app: Any = None


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    found = Made()
    close, create = found.engine.close, http.create_app

    def engine(*arguments: Any, **more: Any) -> FakeEngine:
        found.arguments, found.more = arguments, more
        return found.engine

    def closed(drain: float = 0.0) -> None:
        found.closed = True
        close(drain)

    def created(*arguments: Any) -> Any:
        found.app = create(*arguments)
        return found.app

    def served(app: Any, bound: Any) -> None:
        found.url = http.url(bound)
        found.ready.set()
        http.server.serve(app, bound)

    monkeypatch.setattr(found.engine, "close", closed)
    monkeypatch.setattr(command, "_engine", engine)
    monkeypatch.setattr(http, "create_app", created)
    monkeypatch.setattr(http, "serve", served)
    monkeypatch.delenv("KVCOMPILE_API_KEY", raising=False)
    yield found
    close()


def run(made: Made, *options: str, ask: Any = None, env: dict[str, str] | None = None) -> str:
    """What it prints from its start to its end; `ask` is called in between."""
    results: list[Any] = []
    arguments = ["serve", "--port", "0", *options]
    environment = {"COLUMNS": "200", "TERM": "dumb", **(env or {})}
    thread = threading.Thread(
        target=lambda: results.append(CliRunner().invoke(app, arguments, env=environment))
    )
    thread.start()
    try:
        assert made.ready.wait(20), results
        if ask is not None:
            ask()
    finally:
        if made.app is not None:
            made.app.state.service.stop()
        thread.join(20)
    assert not thread.is_alive() and made.closed
    assert results[0].exit_code == 0, (results[0].output, results[0].exception)
    return str(results[0].output)


def test_it_serves_and_ends(made: Made) -> None:
    def ask() -> None:
        client = openai.OpenAI(base_url=made.url, api_key="none", max_retries=0)
        assert client.models.list().data[0].id == "smollm2"
        assert client.completions.create(model="smollm2", prompt="w3").choices[0].text

    said = run(made, ask=ask)
    assert f"serving smollm2 at {made.url}" in said and made.url.startswith("http://127.0.0.1:")
    assert "40 pages, 1 MiB; prefix cache on" in said and "stopped" in said and "everybody" not in said
    assert made.arguments == ("smollm2", "paged", {}, None, "cpu", 1)
    options = made.app.state.service.options
    assert options == http.Options(name="smollm2", hosts=http.LOOPBACK)


def test_every_option_is_used(made: Made) -> None:
    run(
        made,
        *("--model", "tiny", "--recipe", "int8", "--served-model-name", "mine", "--memory", "1GiB"),
        *("--max-sequences", "5", "--max-queue", "6", "--prefix-cache", "off", "--host-memory", "2MiB"),
        *("--packed", "off", "--snapshot-memory", "3MiB", "--store", "pages", "--store-memory", "4MiB"),
        *("--max-body", "3KiB", "--max-prompt-tokens", "7", "--max-completion-tokens", "8", "--timeout", "9"),
        *("--drain", "10", "--allow-host", "a.example", "--dtype", "float32", "--device", "cpu"),
        *("--set", "runtime.max_tokens=77", "--scales", "s.json", "--no-compile", "--verify", "off"),
    )
    recipe = {"runtime": {"max_tokens": 77}, "scales": "s.json", "compile": {"mode": "none"}, "verify": "off"}
    assert made.arguments == ("tiny", "int8", recipe, "float32", "cpu", 1)
    assert made.more == {
        "name": "mine",
        "memory": "1GiB",
        "max_sequences": 5,
        "max_queue": 6,
        "prefix_cache": "off",
        "packed": "off",
        "host_memory": "2MiB",
        "snapshot_memory": "3MiB",
        "store": "pages",
        "store_memory": "4MiB",
    }
    options = made.app.state.service.options
    assert options.name == "mine" and options.hosts == (*http.LOOPBACK, "a.example")
    assert options.limits == http.Limits(
        body_bytes=3 << 10, prompt_tokens=7, completion_tokens=8, seconds=9, drain_seconds=10
    )


@pytest.mark.parametrize("by", ["option", "variable"])
def test_the_key(made: Made, by: str) -> None:
    def ask() -> None:
        assert httpx2.get(f"{made.url}/models").status_code == 401
        answer = httpx2.get(f"{made.url}/models", headers={"Authorization": "Bearer k3y"})
        assert answer.status_code == 200

    options, env = (["--api-key", "k3y"], {}) if by == "option" else ([], {"KVCOMPILE_API_KEY": "k3y"})
    assert "k3y" not in run(made, *options, ask=ask, env=env)


def test_who_may_ask_is_told(made: Made) -> None:
    def ask() -> None:  # other names than loopback's are known
        answer = httpx2.get(
            made.url.replace("0.0.0.0", "127.0.0.1") + "/models", headers={"Host": "x.example"}
        )
        assert answer.status_code == 200

    assert "everybody who reaches 0.0.0.0 may ask" in run(made, "--host", "0.0.0.0", ask=ask)


def test_the_live_view(made: Made) -> None:
    said = run(made, "--top", ask=lambda: httpx2.get(f"{made.url}/models"))
    assert f"smollm2 at {made.url}" in said and "0 running, 0 waiting" in said


def fails(*options: str, env: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(
        app, ["serve", *options], env={"COLUMNS": "200", "TERM": "dumb", **(env or {})}
    )
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
    return result.output


def test_only_the_first_of_several_ranks_has_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[tuple[Any, ...]] = []
    monkeypatch.setattr(command, "_follow", lambda *given: followed.append(given))
    options = ["--tensor", "2", "--recipe", "int8", "--device", "cuda", "--port", "1"]  # nobody may bind it
    result = CliRunner().invoke(app, ["serve", *options], env={"RANK": "1", "LOCAL_RANK": "1"})
    assert result.exit_code == 0, result.output
    assert followed == [("smollm2", "int8", {}, None, "cuda", 2)]


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert on_ranks(2, "cuda") == ({"tensor": 2, "stages": 1}, "cuda:1")
    assert on_ranks(2, "cpu") == ({"tensor": 2, "stages": 1}, "cpu") and on_ranks(2, "cuda:3")[1] == "cuda:3"
    assert on_ranks(1, "cuda") == (None, "cuda")


def test_what_is_refused_before_a_model_loads(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "serve", lambda *_: None)  # what is not refused ends at once
    assert "the API key is empty" in fails(env={"KVCOMPILE_API_KEY": ""})
    assert "the API key is empty" in fails("--api-key", "")
    assert "expected a size such as" in fails("--port", "0", "--max-body", "many")
    with http.bind("127.0.0.1", 0) as taken:
        assert "cannot serve on 127.0.0.1 port" in fails("--port", str(taken.getsockname()[1]))
    assert made.arguments == ()


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    gone = {"fastapi", "uvicorn"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in gone else find(name, *more)
    )
    said = fails()
    assert "serve needs fastapi and uvicorn; run: pip install 'kvcompile[serve]'" in said


def test_nothing_else_needs_them() -> None:
    """`import kvcompile`, the engine and the command line's help come without the packages of the server."""
    script = """
import sys
sys.modules.update(dict.fromkeys(["fastapi", "starlette", "uvicorn", "prometheus_client"]))  # None: not importable
import kvcompile, kvcompile.api, kvcompile.serve, kvcompile.serve.engine, kvcompile.serve.top, kvcompile.cli.app
kvcompile.optimize, kvcompile.load
print("kvcompile.serve.http" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )
    assert done.stdout.strip() == "False", done.stderr
