"""Several threads at one module, and at `optimize`: as one after the other, or told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvcompile
from kvcompile.errors import InputError
from tests.support.models import NanoGPT, TinyConfig, TinyLlama, make, tiny_hf

EAGER: dict[str, Any] = {"compile": {"mode": "none"}, "verify": "off", "max_tokens": 64}
MAKES: dict[str, Callable[[], nn.Module]] = {
    "hugging face": lambda: tiny_hf("llama"),
    "plain": lambda: make(NanoGPT),
}


def prompts(count: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randint(3, 61, (1, 4 + 3 * i), generator=g) for i in range(count)]


@pytest.mark.few(2)
@pytest.mark.parametrize("model", MAKES)
def test_generate_in_many_threads(model: str) -> None:
    fast = kvcompile.optimize(MAKES[model](), "int8", **EAGER)
    wanted = [fast.generate(ids, max_new_tokens=12) for ids in prompts(6)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda ids: fast.generate(ids, max_new_tokens=12), prompts(6) * 3))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted * 3, strict=True))


def test_optimize_in_many_threads_and_beside_generate() -> None:
    """Tracing changes what PyTorch knows of the whole process; no thread sees another's."""
    busy = kvcompile.optimize(tiny_hf("llama"), **EAGER)
    wanted = busy.generate(prompts(1)[0], max_new_tokens=12)
    one = TinyConfig(num_layers=1)
    models = [tiny_hf("llama", layers=1), make(TinyLlama, one), make(NanoGPT), tiny_hf("gpt2", layers=1)]
    done = threading.Event()

    def generate() -> list[Tensor]:
        found = []
        while not done.is_set():
            found.append(busy.generate(prompts(1)[0], max_new_tokens=12))
        return found

    with ThreadPoolExecutor(5) as pool:
        served = pool.submit(generate)
        try:
            made = list(pool.map(lambda m: kvcompile.optimize(m, **{**EAGER, "verify": "quick"}), models))
        finally:
            done.set()
        assert all(torch.equal(tokens, wanted) for tokens in served.result())
    ids = prompts(2)[1]
    for model, fast in zip(models, made, strict=True):
        with torch.no_grad():
            exact, got = (x if isinstance(x, Tensor) else x.logits for x in (model(ids), fast(ids)))
        torch.testing.assert_close(got, exact, atol=1e-4, rtol=1e-4)


def elsewhere(function: Callable[[], Any]) -> Any:
    """The result of a function in a thread that lives on."""
    found: list[Any] = []
    hold.append(threading.Thread(target=lambda: (found.append(_kept(function)), stay.wait(60)), daemon=True))
    hold[-1].start()
    while not found:
        hold[-1].join(0.01)
    return found[0]


hold: list[threading.Thread] = []
stay = threading.Event()


def _kept(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return error


def test_a_text_that_another_thread_ended_is_not_gone_on_with() -> None:
    fast = kvcompile.optimize(make(NanoGPT), **EAGER)
    first, second = prompts(2)
    fast(first)
    elsewhere(lambda: (fast.reset(), fast(second)))
    with pytest.raises(InputError, match="another thread"):
        fast(first[:, -1:])
    assert fast.cache.columns == second.shape[1]  # the other's text is as it was
    fast.reset()
    torch.testing.assert_close(fast(first), fast.model(first))


def test_a_worker_may_take_over() -> None:
    """One text, each call from another thread of a pool."""
    fast = kvcompile.optimize(make(NanoGPT), **EAGER)
    ids = prompts(4)[3]
    outs = [elsewhere(lambda i=i: fast(ids[:, i : i + 1])) for i in range(ids.shape[1])]
    torch.testing.assert_close(torch.cat(outs, 1), fast.model(ids))


def test_a_call_waits_for_a_whole_generate() -> None:
    fast = kvcompile.optimize(make(NanoGPT), **EAGER)
    ids = prompts(1)[0]
    wanted = fast.generate(ids, max_new_tokens=8)
    other: list[Any] = []

    class Streamer:
        """Starts a second caller while tokens come."""

        thread: threading.Thread | None = None

        def put(self, tokens: Tensor) -> None:
            if self.thread is None:
                self.thread = threading.Thread(target=lambda: other.append(_kept(lambda: fast(ids))))
                self.thread.start()

        def end(self) -> None:
            assert not other

    streamer = Streamer()
    assert torch.equal(fast.generate(ids, max_new_tokens=8, streamer=streamer), wanted)
    assert streamer.thread is not None
    streamer.thread.join(60)
    assert len(other) == 1


def test_sessions_of_artifacts_take_turns(tmp_path: Any) -> None:
    from kvcompile.runtime.load import load

    kvcompile.export(
        make(NanoGPT, TinyConfig(num_layers=1)), tmp_path / "a", "onnx", max_tokens=64, verify="off"
    )
    session = load(tmp_path / "a")
    wanted = [session.generate(ids, max_new_tokens=8) for ids in prompts(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda ids: session.generate(ids, max_new_tokens=8), prompts(4) * 2))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted * 2, strict=True))
