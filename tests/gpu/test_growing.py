"""Caches on a GPU take memory piece by piece, plain and in CUDA graphs, and compute what usual ones do."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import kvcompile
from kvcompile.runtime.cuda_memory import driver_of
from tests.support.models import tiny_hf

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
LONG = 131_072


@pytest.mark.parametrize("recipe", ["baseline", "int8", "kivi2"])
@pytest.mark.parametrize("mode", ["none", "cudagraphs"])
def test_a_text_takes_its_memory(recipe: str, mode: str, device: torch.device) -> None:
    driver = driver_of(torch.device("cuda", torch.cuda.current_device()))
    assert driver is not None
    model = tiny_hf("llama", layers=2, head_dim=64, max_position_embeddings=LONG).to(device, torch.bfloat16)
    own: Any = {"compile": {"mode": mode}, "verify": "off", "max_batch": 2}
    free = torch.cuda.mem_get_info()[0]
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
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free - (1 << 28)
