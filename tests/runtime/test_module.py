"""The optimized module's forward against the original, in any chunks; its memory against the plan."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvcompile
from kvcompile.errors import KVCompileError
from tests.support.models import NanoGPT, TinyLlama, TinyLlamaPositions, make, tiny_hf

EAGER = {"compile": {"mode": "none"}, "verify": "off"}
T = 45

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: tiny_hf("llama"),
    "llama-eager": lambda: tiny_hf("llama", "eager"),
    "mistral": lambda: tiny_hf("mistral"),
    "gemma3": lambda: tiny_hf("gemma3"),
    "gpt2": lambda: tiny_hf("gpt2"),
    "nanogpt": lambda: make(NanoGPT),
    "nanogpt-eager": lambda: make(NanoGPT, eager=True),
    "tinyllama": lambda: make(TinyLlama),
    "tinyllama-eager": lambda: make(TinyLlama, eager=True),
    "tinyllama-positions": lambda: make(TinyLlamaPositions),
}
CHUNKS = {"one": [T], "sevens": [7] * 6 + [3], "tokens": [1] * T, "mixed": [20, 1, 1, 9, 1, 13]}


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, Any]:
    """The original, and it optimized with 12 tokens in one pass."""
    model = MODELS[request.param]()
    return model, kvcompile.optimize(model, "baseline", max_tokens=64, prefill_chunk=12, **EAGER)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_hf("llama")


def tokens(batch: int = 1, count: int = T, seed: int = 0) -> Tensor:
    return torch.randint(3, 61, (batch, count), generator=torch.Generator().manual_seed(seed))


def logits_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def reference(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return logits_of(model(ids))


def rounding(model: nn.Module, ids: Tensor) -> float:
    """Twice this dtype's error against float64, plus rounding."""
    exact = reference(copy.deepcopy(model).double(), ids)
    own = reference(model, ids)
    eps = torch.finfo(own.dtype).eps
    return float(2 * (own.double() - exact).abs().max() + 64 * eps * exact.abs().max())


def feed(fast: Any, ids: Tensor, chunks: Sequence[int], mask: Tensor | None = None) -> Tensor:
    """Logits of all tokens, given chunk by chunk from an empty cache."""
    fast.reset()
    outs, start = [], 0
    for size in chunks:
        part = slice(start, start + size)
        outs.append(logits_of(fast(ids[:, part], None if mask is None else mask[:, part])))
        start += size
    return torch.cat(outs, dim=1)


@pytest.mark.few(2)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_any_chunks_equal_the_original(pair: tuple[nn.Module, Any], chunks: str) -> None:
    model, fast = pair
    ids = tokens(2)
    error = (feed(fast, ids, CHUNKS[chunks]) - reference(model, ids)).abs().max()
    assert error <= rounding(model, ids)


@pytest.mark.few(2)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_padded_rows_equal_their_sequences(pair: tuple[nn.Module, Any], chunks: str) -> None:
    model, fast = pair
    if not fast.program.takes_position_ids:
        pytest.skip("no position_ids: padding is refused, see test_errors")
    ids, mask = tokens(3), torch.ones(3, T, dtype=torch.int64)
    pads = (0, 17, 3)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    got = feed(fast, ids, CHUNKS[chunks], mask)
    for row, count in enumerate(pads):
        own = ids[row : row + 1, count:]
        assert (got[row, count:] - reference(model, own)[0]).abs().max() <= rounding(model, own)


def test_a_mask_of_all_tokens_so_far(llama: nn.Module) -> None:
    """[B, all tokens], as generate() keeps it, means the same as [B, new tokens]."""
    fast = kvcompile.optimize(llama, "baseline", max_tokens=64, **EAGER)
    ids, mask = tokens(2), torch.ones(2, T, dtype=torch.int64)
    mask[1, :4] = 0
    whole = feed(fast, ids, [T], mask)
    fast.reset()
    parts = [fast(ids[:, :20], mask[:, :20]), fast(ids[:, 20:44], mask[:, :44]), fast(ids[:, 44:], mask)]
    got = torch.cat([p.logits for p in parts], dim=1)
    assert (got - whole)[mask.bool()].abs().max() <= rounding(llama, ids)


def test_the_output_is_the_original_class(pair: tuple[nn.Module, Any]) -> None:
    model, fast = pair
    fast.reset()
    ids = tokens(1, 5)
    with torch.no_grad():
        ours, theirs = fast(ids), model(ids)
    assert type(ours) is type(theirs)
    assert logits_of(ours).dtype == logits_of(theirs).dtype and not logits_of(ours).requires_grad


def test_logits_to_keep_and_tuples(llama: nn.Module) -> None:
    fast = kvcompile.optimize(llama, "baseline", max_tokens=64, prefill_chunk=12, **EAGER)
    whole = feed(fast, tokens(), [T])
    for keep in (1, 2, 13, 44, T, 60):
        fast.reset()
        got = fast(tokens(), logits_to_keep=keep).logits
        assert got.shape[1] == min(keep, T)
        torch.testing.assert_close(got, whole[:, -keep:], rtol=0, atol=rounding(llama, tokens()))
    fast.reset()
    first, *rest = fast(tokens(1, 5), return_dict=False)
    assert not rest and first.shape == (1, 5, 61)
    assert fast(tokens(1, 2), past_key_values=fast.handle).past_key_values is fast.handle


def test_layers_may_differ(llama: nn.Module) -> None:
    """An override changes its own layer, and nothing else."""
    ring = {"retention": {"kind": "window", "size": T}}
    rules = [{"where": {"index": 1}, "cache": ring}]
    fast = kvcompile.optimize(llama, {"layers": rules, "runtime": {"max_tokens": 64}, **EAGER})
    assert [str(d.layout) for d in fast.plan.decisions] == [
        "model · contiguous · full",
        f"model · ring · window {T}",
    ]
    ids = tokens(2)
    assert (feed(fast, ids, [20, 1, 24]) - reference(llama, ids)).abs().max() <= rounding(llama, ids)
    ring["retention"]["size"] = 6
    short = kvcompile.optimize(llama, {"layers": rules, "runtime": {"max_tokens": 64}, **EAGER})
    got, expected = feed(short, ids, [20, 1, 24]), reference(llama, ids)
    assert (got - expected)[:, :6].abs().max() <= rounding(llama, ids)
    assert (got - expected)[:, 6:].abs().max() > 100 * rounding(llama, ids)


def test_weights_are_shared_and_the_original_is_as_it_was() -> None:
    model = tiny_hf("llama")
    model.train()
    model.model.layers[1].eval()  # a model in training may have parts that are not
    config = model.config.to_dict()
    flags = {name: m.training for name, m in model.named_modules()}
    state = {name: (p.data_ptr(), p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    before = reference(model, tokens())
    fast = kvcompile.optimize(model, "int8", max_tokens=64, compile={"mode": "none"})
    fast.generate(tokens(), max_new_tokens=3)
    assert flags == {name: m.training for name, m in model.named_modules()}
    assert config == model.config.to_dict() and torch.equal(before, reference(model, tokens()))
    for name, p in model.named_parameters():
        pointer, value, requires_grad = state[name]
        assert p.data_ptr() == pointer and torch.equal(p, value) and p.requires_grad == requires_grad
    pointers = {p.data_ptr() for p in model.parameters()}
    weights = fast.executor.regions.weights
    parameters = [w for w in weights.values() if w.numel() > 50]
    assert parameters and all(w.data_ptr() in pointers for w in parameters)
    assert {p.data_ptr() for p in fast.parameters()} == pointers and not fast.training


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "recipe", ["baseline", "int8", "int4", "fp8", "kivi2", "kivi4", "streaming", "streaming_int8"]
)
def test_memory_is_what_plan_and_estimate_say(recipe: str) -> None:
    model = tiny_hf("llama", hidden_size=192, head_dim=32)
    small = {"runtime": {"max_tokens": 40}}
    if recipe.startswith("streaming"):
        small = {"cache": {"retention": {"sinks": 4, "window": 16}}}
    fast = kvcompile.optimize(model, recipe, **small, **EAGER)
    assert fast.cache.nbytes == 0
    for batch in (1, 3):
        fast.reset()
        fast(tokens(batch, 20))
        assert fast.cache.nbytes == fast.plan.bytes(batch)
        limit = fast.plan.limits.max_tokens or 1000
        told = kvcompile.estimate(model, recipe, batch=batch, tokens=limit, **small)
        assert told.bytes == fast.cache.nbytes
    assert sum(b.untyped_storage().nbytes() for b in fast.cache.buffers.values()) == fast.plan.bytes(3)


@pytest.mark.parametrize("recipe", ["baseline", "streaming_int8"])
def test_steps_allocate_no_cache(llama: nn.Module, recipe: str) -> None:
    fast = kvcompile.optimize(llama, recipe, max_tokens=None if "stream" in recipe else 128, **EAGER)
    fast(tokens(2, 20))
    before = {name: buffer.data_ptr() for name, buffer in fast.cache.buffers.items()}
    for step in range(50):
        fast(tokens(2, 1, seed=step))
    fast(tokens(2, 9))
    fast.cache.reorder(torch.tensor([1, 0]))
    fast.reset()
    fast(tokens(2, 20))
    assert before == {name: buffer.data_ptr() for name, buffer in fast.cache.buffers.items()}


def test_reset_forgets_and_release_frees(llama: nn.Module) -> None:
    fast = kvcompile.optimize(llama, "baseline", max_tokens=64, **EAGER)
    first = fast(tokens(2)).logits
    assert fast.cache.columns == T and fast.cache.seq_lens.tolist() == [T, T]
    more = fast(tokens(2, 5)).logits
    assert not torch.allclose(more, first[:, :5])
    fast.reset()
    assert fast.cache.columns == 0 and fast.cache.nbytes == fast.plan.bytes(2)
    assert torch.equal(fast(tokens(2)).logits, first)
    fast.release()
    assert fast.cache.columns == 0 and fast.cache.nbytes == 0 and fast.cache.batch == 0
    # Memory that comes back dirty must not matter.
    fast(tokens(2, 64, seed=9))
    fast.reset()
    assert torch.equal(fast(tokens(2)).logits, first)
    fast.reset()
    assert fast(tokens(3, 4)).logits.shape[0] == 3 and fast.cache.nbytes == fast.plan.bytes(3)


def test_reorder_moves_rows(llama: nn.Module) -> None:
    """Also for rings, whose slots are not in the order of columns."""
    for recipe, more in (("baseline", {"max_tokens": 64}), ("streaming", {})):
        fast = kvcompile.optimize(
            llama, recipe, **more, **EAGER, **({"cache": {"retention": {"window": 8}}} if not more else {})
        )
        ids, mask = tokens(3), torch.ones(3, T, dtype=torch.int64)
        mask[2, :7] = 0
        index = torch.tensor([2, 2, 0])
        fast(ids[:, :40], mask[:, :40])
        fast.cache.reorder(index)
        got = fast(ids[index, 40:]).logits
        fast.reset()
        fast(ids[index, :40], mask[index, :40])
        assert torch.equal(got, fast(ids[index, 40:]).logits)


def test_bounded_layouts_have_no_limit(llama: nn.Module) -> None:
    cache = {"retention": {"sinks": 2, "window": 6}}
    fast = kvcompile.optimize(llama, "streaming", cache=cache, **EAGER)
    assert fast.plan.limits.max_tokens is None and fast.handle.get_max_cache_shape() == -1
    for _ in range(3):
        fast(tokens(1, 600))  # far beyond the 512 positions of the model
    assert fast.cache.columns == 1800 and fast(tokens(1, 1)).logits.isfinite().all()
    assert fast.cache.nbytes == fast.plan.bytes(1) == 8 * fast.plan.bytes_per_token


def test_device_and_dtype_are_fixed(llama: nn.Module) -> None:
    fast = kvcompile.optimize(llama, "baseline", max_tokens=64, **EAGER)
    assert fast.device == torch.device("cpu") and fast.dtype == torch.float32
    assert fast.to("cpu") is fast and fast.float() is fast and fast.eval() is fast
    for move in (fast.half, fast.bfloat16, fast.double, lambda: fast.to(torch.float16)):
        with pytest.raises(KVCompileError, match=r"optimized for torch\.float32 on cpu"):
            move()
    with pytest.raises(KVCompileError, match="for inference"):
        fast.train()
    assert fast(tokens()).logits.dtype == torch.float32
