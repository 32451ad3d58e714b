"""Decode steps on hardware: as CUDA graphs, and a thousand of them without a compilation, an allocation or a wait."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import kvcompile
from kvcompile.kernels.triton.host.attention import cached_attention
from kvcompile.kernels.triton.tools.synthetic_cache import Sample, sample
from tests.gpu.sites import SITES
from tests.support.budget import within
from tests.support.models import tiny_hf

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
LAYOUTS = ("model", "int8, pages of 64", "fp8", "int4", "kivi", "model, ring", "h2o")


def started(name: str, device: torch.device, tokens: int) -> Sample:
    """Two sequences, of 20 and 25 tokens, with room for `tokens`."""
    sized = SITES[name]
    made = sample(sized.site(), sized.heads, sized.dims, (tokens, tokens - 5), torch.bfloat16, device)
    made.positions.copy_(torch.tensor([[20], [25]], device=device))
    return made


def compiled_kernels() -> int:
    """Machine code of Triton kernels in this process, over all devices."""
    from triton.runtime.jit import JITFunction

    found = [x for x in gc.get_objects() if isinstance(x, JITFunction)]
    caches = [cache for function in found for cache in function.device_caches.values()]
    return sum(len(cache[0]) for cache in caches)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_captured_step_is_the_step(name: str, device: torch.device) -> None:
    """Captured once, and replayed with other tokens and lengths."""
    captured, plain = started(name, device, 200), started(name, device, 200)

    def step(of: Sample) -> Any:
        return cached_attention(of.inputs(0))

    def feed(of: Sample, number: int) -> None:
        g = torch.Generator(device).manual_seed(number)
        for x in (of.q, of.k, of.v):
            x.normal_(generator=g)
        of.positions.add_(1)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(2):
            feed(captured, number)
            step(captured)
    torch.cuda.current_stream().wait_stream(stream)
    for number in range(2):
        feed(plain, number)
        step(plain)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(captured)
    for number in range(2, 40):
        feed(captured, number)
        feed(plain, number)
        graph.replay()
        assert torch.equal(out, step(plain)), number
    for own, wanted in zip(captured.caches[0], plain.caches[0], strict=True):
        assert torch.equal(own.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_thousand_steps_of_kernels(name: str, device: torch.device) -> None:
    """Lengths rise from 21 to 1,021: nothing compiles, no memory comes from the device, nothing waits for it."""
    own = started(name, device, 1100)
    for _ in range(4):
        cached_attention(own.inputs(0))
        own.positions.add_(1)
    torch.cuda.synchronize()
    kernels, memory = compiled_kernels(), torch.cuda.memory_stats()["segment.all.allocated"]
    assert kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(1000):
            cached_attention(own.inputs(0))
            own.positions.add_(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled_kernels() == kernels
    assert torch.cuda.memory_stats()["segment.all.allocated"] == memory


@pytest.mark.parametrize("mode", ["default", "cudagraphs"])
@pytest.mark.parametrize("recipe", ["baseline", "paged_int8", "kivi4", "h2o", "streaming_int8"])
def test_a_thousand_steps_of_a_model(recipe: str, mode: str, device: torch.device, tmp_path: Path) -> None:
    """Verified with its kernels, then run: no graph, no kernel and no memory comes while it decodes."""
    model = tiny_hf("llama", layers=3, **MODEL).to(device, torch.bfloat16)
    bounded = recipe in ("h2o", "streaming_int8")
    limit = {} if bounded else {"max_tokens": 1152}
    fast = kvcompile.optimize(model, recipe, compile={"mode": mode, "kernels": "triton"}, **limit)
    assert {decision.kernels for decision in fast.plan.decisions} == {"triton"}
    token = torch.ones(2, 1, dtype=torch.int64, device=device)
    fast(input_ids=torch.arange(60, device=device).view(2, 30), logits_to_keep=1)
    for _ in range(70):  # beyond the first block of slots, and the first pages
        token = fast(input_ids=token, logits_to_keep=1).logits[:, -1:].argmax(-1)
    torch.cuda.synchronize()
    before = {key: dict(value) for key, value in counters.items()}
    kernels, memory = compiled_kernels(), torch.cuda.memory_stats()["segment.all.allocated"]
    for _ in range(1000):
        token = fast(input_ids=token, logits_to_keep=1).logits[:, -1:].argmax(-1)
    assert {key: dict(value) for key, value in counters.items()} == before
    assert compiled_kernels() == kernels
    grows = recipe == "paged_int8"  # its pool does, by steps
    assert grows or torch.cuda.memory_stats()["segment.all.allocated"] == memory


def test_graphs_give_what_plain_steps_give(
    device: torch.device, modes: tuple[str, ...] = ("none", "default", "cudagraphs")
) -> None:
    """Each within the error budget of the reference's own steps in the same dtype."""

    def logits(dtype: torch.dtype, mode: str, kernels: str) -> torch.Tensor:
        model = tiny_hf("llama", layers=2, **MODEL).to(device, torch.bfloat16).to(dtype)
        fast = kvcompile.optimize(
            model, "int8", max_tokens=256, verify="off", compile={"mode": mode, "kernels": kernels}
        )
        prompt = torch.arange(20, device=device)[None]
        found = [fast(input_ids=prompt).logits[:, -1]]
        for number in range(30):
            found.append(fast(input_ids=torch.full((1, 1), number, device=device)).logits[:, -1])
        return torch.stack(found)

    truth, torchs = (logits(dtype, "none", "reference") for dtype in (torch.float32, torch.bfloat16))
    for mode in modes:
        within(logits(torch.bfloat16, mode, "triton"), torchs, truth, torch.bfloat16, mode)
