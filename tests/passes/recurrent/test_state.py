"""Recurrent state: found by watching, proven by feeding, carried beside K and V."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvcompile
from kvcompile.compile.executor import Executor
from kvcompile.errors import DetectionError
from kvcompile.kernels.ops import opaque
from kvcompile.passes.capture.capture import capture
from kvcompile.passes.recurrent.state import find_states
from tests.coverage.configs import tiny_model
from tests.support.budget import within
from tests.support.models import NanoBlock, TinyConfig

SIZES = TinyConfig()
WIDTH = SIZES.num_heads * SIZES.head_dim
EAGER: dict[str, Any] = {"compile": {"mode": "none"}, "max_tokens": 96, "max_batch": 4}


class Decay(nn.Module):
    """h = a * h + W x for each token; keeps h in a cache object of the model's own kind."""

    def __init__(self, ignores_state: bool = False, forgets: bool = False, scale: float = 1.0):
        super().__init__()
        self.proj, self.decay = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH) * 0.5 + 0.4)
        self.ignores_state, self.forgets, self.scale = ignores_state, forgets, scale

    def forward(self, x: Tensor, notes: Notes | None = None) -> Tensor:
        known = None if notes is None else notes.state
        h = x.new_zeros(x.shape[0], WIDTH)
        if known is not None and not self.forgets and not (self.ignores_state and x.shape[1] > 1):
            h = known
        factor = self.scale if known is not None and x.shape[1] == 1 else 1.0
        outs = []
        for u in self.proj(x).unbind(1):
            h = self.decay * h + factor * u
            outs.append(h)
        if notes is not None:
            notes.state = h
        return torch.stack(outs, 1)


class Notes:
    """What `Decay` is handed to keep its state in; nothing that kvcompile knows."""

    def __init__(self) -> None:
        self.state: Tensor | None = None


class OwnState(nn.Module):
    """A short causal convolution that keeps its last inputs in an attribute when `keep` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
        self.last: Tensor | None = None

    def forward(self, x: Tensor, keep: bool) -> Tensor:
        x = x.transpose(1, 2)
        before = x.new_zeros(x.shape[0], WIDTH, 2) if not keep or self.last is None else self.last
        x = torch.cat([before, x], 2)
        self.last = x[:, :, -2:] if keep else None
        return self.conv(x).transpose(1, 2)


class Hybrid(nn.Module):
    """A mixer, then attention without positions."""

    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.wte, self.mixer = nn.Embedding(61, WIDTH), mixer
        self.block, self.head = NanoBlock(SIZES, eager=False), nn.Linear(WIDTH, 61)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        x = self.wte(input_ids)
        given = (Notes() if use_cache else None) if isinstance(self.mixer, Decay) else use_cache
        return self.head(self.block(x + self.mixer(x, given)))


def hybrid(mixer: nn.Module) -> Hybrid:
    torch.manual_seed(0)
    return Hybrid(mixer).eval()


def tokens(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 61, (batch, count), generator=torch.Generator().manual_seed(seed))


def logits(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else output.logits
    assert isinstance(found, Tensor)
    return found


def in_chunks(fast: Any, ids: Tensor, chunks: tuple[int, ...]) -> Tensor:
    fast.reset()
    return torch.cat([logits(fast(part)) for part in ids.split(chunks, dim=1)], dim=1)


@pytest.mark.parametrize(
    ("mixer", "feed"),
    [
        (Decay(), "together"),
        (Decay(ignores_state=True), "singly"),
        (Decay(scale=1.01), "in pairs"),
        (OwnState(), "together"),
    ],
    ids=["cache object", "one by one", "another form for one", "own attribute"],
)
def test_hand_written_state_is_found_and_carried(mixer: nn.Module, feed: str) -> None:
    model = hybrid(mixer)
    fast = kvcompile.optimize(model, **EAGER)
    (state,) = fast.plan.states
    assert state.module_path == "mixer" and state.feed == feed
    ids = tokens(3, 21)
    with torch.no_grad():
        wanted = model(ids)
    for chunks in ((21,), (1,) * 21, (9, 1, 1, 6, 4), (2, 19)):
        torch.testing.assert_close(in_chunks(fast, ids, chunks), wanted, rtol=1e-4, atol=1e-5)


def test_half_precision_is_proven_in_float32() -> None:
    """One percent is no difference in bfloat16, but a form that is off by it is not exact."""
    for scale, feed in ((1.0, "together"), (1.01, "in pairs")):
        (record,) = capture(hybrid(Decay(scale=scale)).bfloat16()).opaques
        assert record.state is not None and record.state.feed == feed
        assert record.state.slots[0].dtype is torch.bfloat16


def test_the_model_is_left_as_it_was() -> None:
    model = hybrid(OwnState())
    model.mixer.last = before = torch.ones(2, WIDTH, 2)
    names = {name: set(vars(module)) for name, module in model.named_modules()}
    fast = kvcompile.optimize(model, **EAGER)
    assert model.mixer.last is before and bool((before == 1).all())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == names
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    fast(tokens(2, 5))
    assert model.mixer.last is before and bool((before == 1).all())


def test_state_that_is_lost_is_refused() -> None:
    with pytest.raises(
        DetectionError, match="mixer does not give with its state what it gives in one pass: 1 tokens"
    ):
        kvcompile.optimize(hybrid(Decay(forgets=True)), **EAGER)


def test_a_wrong_form_for_one_token_and_no_form_for_many_is_refused() -> None:
    with pytest.raises(
        DetectionError, match=r"recurrent state cannot be carried: mixer .* differ by [0-9.e-]+ of"
    ):
        kvcompile.optimize(hybrid(Decay(scale=1.01, ignores_state=True)), **EAGER)


def test_state_with_attention_inside_is_refused_with_its_reason() -> None:
    class Both(nn.Module):
        """K and V, and something else, in one forward."""

        def __init__(self) -> None:
            super().__init__()
            self.block, self.inner = NanoBlock(SIZES, eager=False), Decay()

        def forward(self, x: Tensor, keep: bool) -> Tensor:
            notes = Pair() if keep else None
            return self.fill(x, notes)

        def fill(self, x: Tensor, notes: Any) -> Tensor:
            return self.core(x, notes)

    class Core(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decay = Decay()

        def forward(self, x: Tensor, notes: Any) -> Tensor:
            if notes is not None:
                notes.keys = x
                notes.state = x[:, -1]
            return x.cumsum(1)

    class Pair(Notes):
        keys: Tensor | None = None

    model = Both()
    model.core = Core()
    with pytest.raises(DetectionError) as caught:
        kvcompile.optimize(hybrid(model), **EAGER)
    assert "mixer.core keeps recurrent state and K/V in one forward" in str(caught.value)
    assert "tokens mix outside attention" in str(caught.value)


def test_models_without_state_have_no_mixers() -> None:
    model = tiny_model("llama")

    def run(batch: int, count: int) -> object:
        return model(tokens(batch, count), use_cache=True)

    assert find_states(model, run, run) == {}
    assert capture(model).opaques == ()


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["lfm2", "bamba", "jamba", "recurrent_gemma", "zamba2"])
def test_transformers_hybrids(name: str) -> None:
    """Chunks of any size, rows that start at different places, beams, and what the cache counts."""
    model = tiny_model(name)
    fast: Any = kvcompile.optimize(model, **EAGER)
    ids = tokens(2, 20)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
    for chunks in ((20,), (7, 1, 1, 6, 5), (1,) * 20):
        torch.testing.assert_close(in_chunks(fast, ids, chunks), wanted, rtol=1e-3, atol=1e-4)
    assert fast.cache.nbytes == fast.plan.bytes(2) and fast.plan.state_bytes > 0

    mask = torch.ones_like(ids)
    mask[1, :8] = 0  # the second row starts in the middle of the second chunk
    with torch.no_grad():
        later = model(ids[1:, 8:], use_cache=False).logits
    fast.reset()
    parts = [fast(ids[:, a:b], mask[:, a:b]).logits for a, b in ((0, 6), (6, 12), (12, 13), (13, 20))]
    found = torch.cat(parts, dim=1)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[1, 8:], later[0], rtol=1e-3, atol=1e-4)

    options = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    beams = fast.generate(input_ids=ids[:1, :7], **options)
    assert torch.equal(beams, model.generate(input_ids=ids[:1, :7], use_cache=False, **options))


def test_state_does_not_grow_and_is_told() -> None:
    model = tiny_model("bamba")
    fast = kvcompile.optimize(model, **EAGER)
    plan = fast.plan
    assert plan.state_bytes == (112 * 4 + 6 * 16 * 8) * 4
    assert plan.bytes(3, 40) - plan.bytes(3, 20) == 3 * 20 * plan.bytes_per_token
    text = str(kvcompile.explain(fast))
    assert "recurrent state" in text and "model.layers.*.mamba (BambaMixer) runs as Python" in text
    told = kvcompile.estimate(fast, tokens=40, batch=3)
    assert told.state_bytes == plan.state_bytes and told.bytes == plan.bytes(3, 40)
    assert "state model.layers.0.mamba" in str(plan)
    fast(tokens(2, 4))
    fast.release()
    assert fast.cache.nbytes == 0


def test_steps_of_mixers_are_compiled_and_the_rest_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are padded, or begin, run as Python in a step, too."""
    model = tiny_model("lfm2")
    fast: Any = kvcompile.optimize(model, max_tokens=96)
    assert isinstance(fast.executor, Executor)
    regions = fast.executor.regions
    (eager,) = regions.eager
    targets = {node.target for node in regions.modules[eager].graph.nodes if node.op == "call_function"}
    assert opaque.mixer in targets
    for number, module in enumerate(regions.modules):
        if number != eager:
            assert opaque.mixer not in {node.target for node in module.graph.nodes}
    ran: list[int] = []
    call_with = opaque.OpaqueModule.call_with
    monkeypatch.setattr(
        opaque.OpaqueModule, "call_with", lambda self, leaves: [call_with(self, leaves), ran.append(1)][0]
    )
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad():
        own, true = (
            [of(part, use_cache=False).logits[0] for part in (ids[:1], ids[1:, 4:])]
            for of in (model, copy.deepcopy(model).double())
        )
    outs = []
    for at in range(9):  # no prompt, whose programs would be compiled as well
        ran.clear()
        outs.append(fast(ids[:, at : at + 1], mask[:, at : at + 1]).logits)
        assert bool(ran) == (at < 5), "the second row is padding until the fifth token, and begins there"
    both = torch.cat(outs, dim=1)
    for found, torchs, truth in zip((both[0], both[1, 4:]), own, true, strict=True):
        within(found, torchs, truth, torch.float32)


def test_modules_are_let_go_with_the_optimized_model() -> None:
    model = tiny_model("lfm2")
    before = set(opaque._KNOWN)
    fast = kvcompile.optimize(model, **EAGER)
    (key,) = set(opaque._KNOWN) - before
    assert opaque.find(key).path == "model.layers.0.conv"
    del fast
    gc.collect()
    with pytest.raises(RuntimeError, match="is gone: keep the captured"):
        opaque.find(key)
