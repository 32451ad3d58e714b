"""Caches that keep every token take memory as tokens come, and have addresses for the limit of tokens."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcompile
from kvcompile.errors import LimitError
from kvcompile.runtime import growing
from kvcompile.runtime.growing import PAGE, FirstWritten, growing_zeros
from tests.support.models import tiny_hf

EAGER: dict[str, Any] = {"compile": {"mode": "none"}, "verify": "off"}
LONG = 32_768
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def resident(tensor: Tensor) -> int:
    """Bytes of a tensor's own mapping that are in memory."""
    address, found = tensor.data_ptr(), False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                low, high = (int(end, 16) for end in words[0].split("-"))
                found = low <= address < high
            elif found and words[0] == "Rss:":
                return int(words[1]) * 1024
    raise AssertionError("no such mapping")


def long(recipe: str = "baseline", **more: Any) -> Any:
    return kvcompile.optimize(
        tiny_hf("llama", head_dim=32, max_position_embeddings=LONG),
        recipe,
        max_tokens=LONG,
        max_batch=4,
        **EAGER,
        **more,
    )


def ids(batch: int, tokens: int) -> Tensor:
    return torch.randint(3, 60, (batch, tokens), generator=torch.Generator().manual_seed(0))


def test_zeros_take_memory_where_they_are_written() -> None:
    buffer = growing_zeros((2, 3, 65_536, 16), torch.float32)
    assert not buffer[1, 2, 60_000].any() and buffer.is_contiguous()
    buffer[:, :, :100] = 1
    assert buffer[:, :, :100].sum() == 2 * 3 * 100 * 16 and not buffer[:, :, 100:200].any()
    assert FirstWritten(buffer).held(100) == 6 * 2 * PAGE
    neighbours = 8 * PAGE  # a page before, which another mapping may have joined
    assert FirstWritten(buffer).held(100) <= resident(buffer) <= FirstWritten(buffer).held(100) + neighbours


@pytest.mark.parametrize("recipe", ["baseline", "int8", "int4"])
def test_a_short_text_takes_the_memory_of_a_short_text(recipe: str) -> None:
    fast = long(recipe)
    with torch.no_grad():
        fast(ids(2, 40))
        few = fast.cache.nbytes
        assert fast.cache.reserved == fast.plan.bytes(2) > 8 * few
        for name in fast.cache._growing:
            assert resident(fast.cache.buffers[name]) <= 2 * few
        fast(ids(2, 3000))
    report = fast.cache.report()
    assert few < report["bytes"] < report["reserved"] / 8 and report["reserved"] == fast.plan.bytes(2)
    told = kvcompile.estimate(fast, batch=2, tokens=3040)
    assert told.limit == LONG and told.limit_bytes == fast.cache.reserved
    buffers = len(fast.cache.buffers) * 2 * 2  # of two sequences and two heads
    assert told.bytes <= report["bytes"] <= told.bytes + buffers * PAGE
    assert "its limit, 32,768 tokens" in str(told)


def test_what_is_computed_is_the_same() -> None:
    model = tiny_hf("llama", head_dim=32, max_position_embeddings=LONG)
    fast = kvcompile.optimize(model, max_tokens=LONG, **EAGER)
    text = ids(2, 90)
    with torch.no_grad():
        right = model(text).logits
        parts = [fast(text[:, :70]).logits, *(fast(text[:, i : i + 1]).logits for i in range(70, 90))]
    assert fast.cache._growing
    torch.testing.assert_close(torch.cat(parts, 1), right, atol=1e-5, rtol=1e-4)


def test_a_fork_takes_what_it_holds() -> None:
    fast = long()
    with torch.no_grad():
        fast(ids(1, 50))
        fork = fast.handle.fork()
        assert fork.cache.nbytes == fast.cache.nbytes < fork.cache.reserved / 8
        assert all(
            resident(fork.cache.buffers[name]) <= 2 * fork.cache.nbytes for name in fork.cache._growing
        )
        own, other = fast(ids(1, 1)).logits, fast(ids(1, 1), past_key_values=fork).logits
    torch.testing.assert_close(own, other)


def test_memory_is_kept_by_reset_and_given_back_by_release() -> None:
    fast = long()
    with torch.no_grad():
        fast(ids(1, 500))
        held_before = fast.cache.nbytes
        fast.reset()
        fast(ids(1, 5))
        assert fast.cache.nbytes == held_before
        fast.release()
        assert fast.cache.nbytes == 0 == fast.cache.reserved
        fast(ids(1, 5))
    assert fast.cache.nbytes < held_before


def test_a_saved_text_is_loaded_into_what_grows(tmp_path: Any) -> None:
    fast = long()
    with torch.no_grad():
        fast(ids(1, 60))
        fast.handle.save(tmp_path / "text")
        after = fast(ids(1, 1)).logits
        fast.reset()
        fast.handle.load(tmp_path / "text")
        assert fast.cache.nbytes < fast.cache.reserved / 8
        torch.testing.assert_close(fast(ids(1, 1)).logits, after)


def test_addresses_that_the_system_refuses_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = long()

    def none(*_: Any, **__: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(growing.mmap, "mmap", none)
    with torch.no_grad():
        with pytest.raises(
            LimitError, match=r"no addresses for a cache tensor of .* lower runtime\.max_tokens"
        ):
            fast(ids(1, 5))
        monkeypatch.setattr(growing.mmap, "mmap", mmap.mmap)
        monkeypatch.undo()
        assert fast(ids(1, 5)).logits.shape[1] == 5


def test_nobody_has_to_say_how_many_tokens() -> None:
    from tests.soundness.test_18_python import Decoder, Quiet

    model = Decoder(Quiet).eval()
    fast = kvcompile.optimize(model, **EAGER)
    assert fast.plan.limits.max_tokens == LONG
    assert any("set runtime.max_tokens" in note for note in fast.plan.notes)
    with torch.no_grad():
        torch.testing.assert_close(fast(ids(1, 30)), model(ids(1, 30)), atol=1e-5, rtol=1e-4)


@pytest.mark.slow  # an export only to see what grows
def test_what_a_session_writes_anew_is_held(tmp_path: Any) -> None:
    pytest.importorskip("onnxruntime")
    from kvcompile.recipe import Recipe
    from kvcompile.targets.onnx.session import Session

    recipe = Recipe.load("kivi2", max_tokens=LONG, verify="off")
    model = tiny_hf("llama", head_dim=32, layers=1, max_position_embeddings=LONG)
    manifest = kvcompile.export(model, tmp_path / "out", "onnx", recipe=recipe)
    session = Session(tmp_path / "out", threads=1)
    session.prefill(ids(2, 20))
    session.decode(ids(2, 1))
    moved = {alias.input for graph in manifest.graphs for alias in graph.aliases if not alias.in_place}
    kept = session.cache._growing.keys()
    assert kept and not kept & moved
    most = sum(buffer.nbytes for name, buffer in session.cache.buffers.items() if name in kept)
    assert session.cache.reserved - most < session.cache.nbytes < session.cache.reserved
