"""Caches on a GPU take memory piece by piece: nothing reads or writes what is not mapped, and all is given back.

The driver is this machine's (tests/support/fake_cuda_memory.py): a page that is not mapped kills the process that
touches it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcompile
from kvcompile.errors import LimitError
from kvcompile.recipe import shipped_recipes
from kvcompile.runtime import cuda_memory
from kvcompile.runtime.cuda_memory import CudaDriver, DriverError, MappedRange, driver_of, trial
from kvcompile.runtime.growing import make_asked_for
from tests.support.fake_cuda_memory import RUBBISH, FakeDriver, tell, use
from tests.support.models import tiny_hf

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the driver is made of mmap and mprotect")
PAGE = FakeDriver.granularity


def compared(to: Path, *cases: tuple[Any, str, str, int]) -> list[dict[str, Any]]:
    """`tests.support.fake_cuda_memory.compared` of each case, in one process of its own; its answers go to a file."""
    # Forked, it has Triton as this process has, and what is imported; kernels for the CPU have to be interpreted.
    method = "fork" if "TRITON_INTERPRET" in os.environ else "spawn"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.syspath_prepend(str(Path(__file__).parents[2]))
        process = multiprocessing.get_context(method).Process(target=tell, args=(cases, to / "told.json"))
        process.start()
        process.join()
    assert process.exitcode == 0, "a mistake is a segmentation fault: what it printed is above"
    return json.loads((to / "told.json").read_text())


def check(told: dict[str, Any]) -> None:
    usual, mapped = told["usual"], told["mapped"]
    assert usual["growing"] == mapped["growing"] > 0
    assert mapped["texts"] == usual["texts"]
    assert mapped["logits"] == pytest.approx(usual["logits"], abs=1e-9)
    assert mapped["bytes"] < mapped["reserved"] / 2 and mapped["reserved"] == usual["reserved"]
    assert told["driver"] > 0
    assert told["released"] == [0, 0]


def test_nothing_touches_what_is_not_mapped(tmp_path: Path) -> None:
    """By the reference, nor by generated kernels, with groups of tokens; all recipes are in the slow test."""
    for told in compared(tmp_path, ("int8", "reference", "none", 90), ("kivi4", "triton", "none", 20)):
        check(told)


@pytest.mark.slow
def test_nor_does_compiled_code(tmp_path: Path) -> None:
    (told,) = compared(tmp_path, ("int8", "reference", "default", 90))
    check(told)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_any_recipe_that_keeps_every_token(kernels: str, tmp_path: Path) -> None:
    kept = [
        name
        for name in shipped_recipes()
        if name not in ("auto",) and kvcompile.Recipe.load(name).cache.retention.kind == "full"
    ]
    for told in compared(tmp_path, *((name, kernels, "none", 70) for name in kept)):
        if told["usual"]["growing"]:
            check(told)


def test_pieces_are_zeros_and_are_given_back() -> None:
    driver = FakeDriver()
    made = make_asked_for((1, 2, 4 * PAGE, 1), torch.uint8, driver)
    buffer, memory = made
    assert driver.mapped == PAGE  # whose memory it is must be known
    memory.hold(10, 5)
    assert driver.mapped == 4 * PAGE == memory.held(10)  # the first and the last piece of both heads
    assert not buffer[:, :, :10].any() and not buffer[:, :, -5:].any()
    buffer[:, :, :10] = 3
    memory.hold(2 * PAGE + 1, 5)  # the third piece begins: the first is as it was
    assert (
        driver.mapped == 8 * PAGE and buffer[:, :, :10].eq(3).all() and not buffer[:, :, 10 : 2 * PAGE].any()
    )
    memory.hold(5, 0)
    assert driver.mapped == 8 * PAGE
    view = buffer[0, 0, :5]
    del made, buffer, memory
    gc.collect()
    assert driver.mapped == 8 * PAGE and view.eq(3).all()  # a view keeps it
    del view
    gc.collect()
    assert driver.mapped == 0 and not driver.ranges


def test_what_is_mapped_is_rubbish_before() -> None:
    driver = FakeDriver()
    address = driver.reserve(PAGE)
    driver.map(address, PAGE)
    assert ctypes.string_at(address, 3) == bytes([RUBBISH]) * 3


def test_no_memory_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_hf("llama", head_dim=32, layers=1, max_position_embeddings=16_384)
    own: Any = {"max_tokens": 16_384, "compile": {"mode": "none"}, "verify": "off"}
    usual: Any = kvcompile.optimize(model, "baseline", **own)
    with torch.no_grad():
        usual(torch.full((1, 1), 3))  # its buffers are made of the usual kind
        usual.reset()
    driver = FakeDriver(most=40)
    use(driver, monkeypatch.setattr)
    fast: Any = kvcompile.optimize(model, "baseline", **own)
    ids = torch.randint(3, 60, (1, 700), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        fast(ids[:, :50])
        assert not driver.spared
        with pytest.raises(
            LimitError, match=r"no memory for .* more of the cache: cuMemCreate: out of memory"
        ):
            fast(ids[:, 50:])
        assert driver.spared and fast.cache.columns == 50
        after = fast(ids[:, 50:52]).logits
        usual(ids[:, :50])
        assert torch.equal(after, usual(ids[:, 50:52]).logits)
        fast.reset()
        with pytest.raises(LimitError, match="out of memory"):
            fast.cache.reserve(2) or fast.cache.hold(16_384)


def test_a_device_without_the_calls_allocates_at_once() -> None:
    assert driver_of(torch.device("cpu")) is None and driver_of(torch.device("meta")) is None


def test_a_driver_is_tried_before_it_is_used(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    driver = FakeDriver()
    assert trial(driver) is None
    gc.collect()
    assert not driver.mapped and not driver.ranges

    class Other(FakeDriver):
        def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
            raise ValueError("of another kind")

    assert trial(Other()) == "ValueError: of another kind"
    assert trial(FakeDriver(most=1)) is not None and "out of memory" in str(trial(FakeDriver(most=1)))
    monkeypatch.setattr(CudaDriver, "of", lambda device: Other())
    assert driver_of(torch.device("cuda", 7)) is None
    assert "allocated for all of max_tokens at once: ValueError: of another kind" in caplog.text


class Library:
    """libcuda as Python: notes its calls, and fails those that it shall."""

    def __init__(self, fails: str = ""):
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            plain = tuple(getattr(a, "value", a) if not hasattr(a, "_obj") else a._obj for a in arguments)
            self.calls.append((name, plain))
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"told by the driver"
            if name == "cuMemGetAllocationGranularity":
                arguments[0]._obj.value = 1 << 21
            if name == "cuMemAddressReserve":
                arguments[0]._obj.value = 0x7F0000000000
            if name == "cuMemCreate":
                arguments[0]._obj.value = 77
            return 2 if name == self.fails else 0

        return call

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def test_calls_of_the_driver() -> None:
    library = Library()
    driver = CudaDriver(library, 3)
    assert driver.granularity == 1 << 21
    address = driver.reserve(1 << 24)
    driver.map(address, 1 << 21)
    driver.unmap(address, 1 << 21)
    driver.free(address, 1 << 24)
    assert library.names()[1:] == [
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemRelease",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemAddressFree",
    ]
    calls = dict(library.calls)
    made = calls["cuMemCreate"][2]
    assert (made.type, made.handle_types, made.location.type, made.location.id) == (1, 0, 1, 3)
    assert calls["cuMemMap"] == (address, 1 << 21, 0, 77, 0) and calls["cuMemRelease"] == (77,)
    access = calls["cuMemSetAccess"][2]
    assert (access.location.type, access.location.id, access.flags) == (1, 3, 3)
    # cuda.h: CUmemAllocationProp_v1 and CUmemAccessDesc_v1 on 64 bits.
    assert ctypes.sizeof(made) == 32 and ctypes.sizeof(access) == 12
    assert type(made).location.offset == 8 and type(made).flags.offset == 24


@pytest.mark.parametrize("fails", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_call_that_fails_leaves_nothing(fails: str) -> None:
    library = Library(fails)
    driver = CudaDriver(library, 0)
    with pytest.raises(DriverError, match=f"{fails}: told by the driver .CUDA driver error 2.") as caught:
        driver.map(1 << 40, 1 << 21)
    assert caught.value.code == 2
    names = library.names()
    assert ("cuMemRelease" in names) == (fails != "cuMemCreate")
    assert ("cuMemUnmap" in names) == (fails == "cuMemSetAccess")


def test_no_addresses_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()

    def none(size: int) -> int:
        raise DriverError("cuMemAddressReserve", 2, "out of memory")

    monkeypatch.setattr(driver, "reserve", none)
    with pytest.raises(
        LimitError, match=r"no addresses for a cache tensor of 1 MiB .*lower runtime\.max_tokens"
    ):
        MappedRange(driver, 1 << 20)


def test_the_reason_is_told_where_a_gpu_cannot(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    class Context:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...
        def synchronize(self) -> None: ...

    def none(name: str) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda_memory.torch.cuda, "device", lambda _: Context())
    monkeypatch.setattr(cuda_memory.torch.cuda, "current_stream", Context)
    monkeypatch.setattr(cuda_memory.ctypes, "CDLL", none)
    assert CudaDriver.of(torch.device("cuda", 0)) is None
    assert "allocated for all of max_tokens at once: libcuda.so.1: cannot open" in caplog.text
