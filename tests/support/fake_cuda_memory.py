"""A CUDA driver's virtual memory on this machine: what is not mapped cannot be touched (the process dies of it).

`tell` is what a test asks of a process of its own, since a mistake is a segmentation fault.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcompile.runtime.cuda_memory import DriverError

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_NO_ACCESS = 0  # PROT_NONE
RUBBISH = 0x7F  # a float32, bfloat16 or float16 of these bytes is huge or not a number


class FakeDriver:
    """Pieces of one page; what was mapped holds rubbish, as a GPU's memory does.

    most: pieces that may be mapped at once (None: any number)
    """

    granularity = mmap.PAGESIZE

    def __init__(self, most: int | None = None):
        self.most = most
        self.spared = 0
        self.ranges: dict[int, int] = {}
        self.maps: dict[int, int] = {}

    @property
    def mapped(self) -> int:
        return sum(self.maps.values())

    def reserve(self, size: int) -> int:
        address = _LIBC.mmap(None, size, _NO_ACCESS, _ANONYMOUS, -1, 0)
        assert address not in (None, ctypes.c_void_p(-1).value)
        self.ranges[address] = size
        return int(address)

    def map(self, address: int, size: int) -> None:
        if self.most is not None and (self.mapped + size) // self.granularity > self.most:
            raise DriverError("cuMemCreate", 2, "out of memory")
        assert size > 0 == address % self.granularity == size % self.granularity
        assert any(start <= address and address + size <= start + of for start, of in self.ranges.items())
        assert not any(part < address + size and address < part + of for part, of in self.maps.items())
        assert _LIBC.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        ctypes.memset(address, RUBBISH, size)
        self.maps[address] = size

    def unmap(self, address: int, size: int) -> None:
        assert self.maps.pop(address) == size  # a mapping goes as a whole
        assert _LIBC.mprotect(address, size, _NO_ACCESS) == 0

    def free(self, address: int, size: int) -> None:
        assert self.ranges.pop(address) == size
        assert not any(address <= part < address + size for part in self.maps)
        _LIBC.munmap(address, size)

    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        memory = (ctypes.c_uint8 * size).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def idle(self) -> None:
        """Nothing runs."""

    def spare(self) -> None:
        self.spared += 1

    def device_of(self) -> AbstractContextManager[Any]:
        return nullcontext()


def use(driver: FakeDriver, patch: Any) -> None:
    """Caches of this process take their memory as a GPU's do."""
    from kvcompile.runtime import growing

    def make(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        # The size that decides is one of CPUs; the rest is the code of GPUs.
        if torch.Size(shape).numel() * dtype.itemsize < growing.LEAST:
            return None
        return growing.make_asked_for(shape, dtype, driver)

    patch("kvcompile.runtime.cache.make_growing", make)


def compared(recipe: Any, kernels: str, mode: str, tokens: int) -> dict[str, Any]:
    """What a model generates from so many tokens, and its memory, with a cache that is mapped and with a usual one."""
    from unittest.mock import patch

    import kvcompile
    from tests.support.models import tiny_hf

    model = tiny_hf("llama", head_dim=32, layers=1, max_position_embeddings=16_384)
    new = 3 if kernels == "triton" else 6  # interpreted, a step takes half a second
    own: Any = {"compile": {"mode": mode, "kernels": kernels}, "verify": "off", "max_batch": 4}
    ids = torch.randint(3, 60, (2, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, : tokens // 4] = 0
    told: dict[str, Any] = {}
    driver = FakeDriver()
    for which in ("usual", "mapped"):
        with ExitStack() as patches:
            if which == "mapped":
                use(driver, lambda name, new, on=patches: on.enter_context(patch(name, new)))
            fast: Any = kvcompile.optimize(model, recipe, max_tokens=16_384, **own)
            with torch.no_grad():
                steps = fast.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
                short = ids[:1, : tokens // 2]
                beams = fast.generate(
                    short, max_new_tokens=min(new, 4), num_beams=3, do_sample=False, pad_token_id=0
                )
                fast.reset()
                parts = [fast(part).logits for part in ids[:, 1:].split(47, 1)]
                fork = fast.handle.fork()
                parts.append(fast(ids[:, :1], past_key_values=fork).logits)
            cache = fast.cache
            told[which] = {
                "texts": [steps[:, tokens:].tolist(), beams[:, tokens // 2 :].tolist()],
                "logits": torch.cat(parts, 1).double().sum((0, 2)).tolist(),
                "growing": len(cache._growing),
                "bytes": cache.nbytes,
                "reserved": cache.reserved,
            }
            if which == "mapped":
                told["driver"] = driver.mapped
                del fork
                fast.release()
                gc.collect()
                told["released"] = [driver.mapped, len(driver.ranges)]
    return told


def tell(cases: Sequence[tuple[Any, str, str, int]], to: Path) -> None:
    torch.set_num_threads(1)
    to.write_text(json.dumps([compared(*case) for case in cases]), "utf-8")
