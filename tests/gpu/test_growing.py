"""Caches on a GPU take memory piece by piece, plain and in CUDA graphs, and compute what usual ones do."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import kvcompile
from kvcompile.runtime.cuda_memory import CudaDriver, driver_of
from tests.support.models import tiny_hf

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
LONG = 131_072


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Address -> bytes that the test has had memory given to, and that were not taken back: neither what others take of
    the GPU meanwhile is among them, nor what a test before gives back late."""
    found: dict[int, int] = {}
    plain_map, plain_unmap = CudaDriver.map, CudaDriver.unmap

    def map_(self: CudaDriver, address: int, size: int) -> None:
        plain_map(self, address, size)
        found[address] = size

    def unmap(self: CudaDriver, address: int, size: int) -> None:
        plain_unmap(self, address, size)
        found.pop(address, None)

    monkeypatch.setattr(CudaDriver, "map", map_)
    monkeypatch.setattr(CudaDriver, "unmap", unmap)
    return found


# A head's slots must be several of the driver's pieces (2 MiB): of 131,072 tokens those of 256 channels are.
@pytest.mark.parametrize("recipe", ["baseline", "int8", "kivi4"])
@pytest.mark.parametrize("mode", ["none", "cudagraphs"])
def test_a_text_takes_its_memory(
    recipe: str, mode: str, device: torch.device, mapped: dict[int, int]
) -> None:
    driver = driver_of(torch.device("cuda", torch.cuda.current_device()))
    assert driver is not None
    model = tiny_hf("llama", layers=2, head_dim=256, max_position_embeddings=LONG).to(device, torch.bfloat16)
    allocated = torch.cuda.memory_allocated()
    own: Any = {"compile": {"mode": mode}, "verify": "off", "max_batch": 2}
    long: Any = kvcompile.optimize(model, recipe, max_tokens=LONG, **own)
    short: Any = kvcompile.optimize(model, recipe, max_tokens=4096, **own)
    ids = torch.randint(3, 60, (2, 3000), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(ids)
    mask[1, :700] = 0
    with torch.no_grad():
        texts = [
            fast.generate(ids, attention_mask=mask, max_new_tokens=80, do_sample=False)
            for fast in (long, short)
        ]
    assert torch.equal(*texts)
    assert long.cache._growing and long.cache.nbytes < long.cache.reserved / 2
    assert sum(mapped.values()) > 0
    held = long.cache.nbytes
    with torch.no_grad():
        for _ in range(40):  # far beyond a piece of each head
            long(ids[:, :1000])
    assert held < long.cache.nbytes < long.cache.reserved
    torch.cuda.synchronize()
    long.release()
    short.release()
    del long, short
    gc.collect()
    assert not mapped
    assert torch.cuda.memory_allocated() < allocated + (1 << 28)
