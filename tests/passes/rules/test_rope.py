"""Rotary embeddings: every spelling is found and checked, and counts positions in the cache exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kvcompile
from kvcompile.errors import LimitError, PlanError
from kvcompile.kernels.shared.rope import rotate
from kvcompile.passes.capture.capture import capture
from kvcompile.passes.detect.detect import detect
from kvcompile.passes.detect.rotation import Rotations
from kvcompile.passes.probe.evaluate import evaluate
from kvcompile.passes.records import NoMatch, RopeSpec
from kvcompile.specs import RotaryForm

Rope = Callable[["Rotated", Tensor, Tensor], Tensor]  # (module, x [B, H, S, D], angles [S, D / 2])
HEADS, DIM = 4, 8


class Rotated(nn.Module):
    """Two attention layers whose q and k [B, H, S, D] go through `rope(self, x, angles)`."""

    frequencies: Tensor
    gain: Tensor

    def __init__(self, rope: Rope, of_keys: Rope | None = None, layers: int = 2):
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * DIM
        self.embed, self.head = nn.Embedding(61, width), nn.Linear(width, 61)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.rope, self.of_keys = rope, of_keys or rope
        self.register_buffer("frequencies", 0.3 / 100 ** (torch.arange(DIM // 2) / (DIM // 2)))
        self.register_buffer("gain", torch.rand(DIM) + 0.5)

    def forward(self, input_ids: Tensor) -> Tensor:
        batch, size = input_ids.shape
        angles = torch.arange(size)[:, None] * self.frequencies
        x = self.embed(input_ids)
        for layer in self.qkv:
            parts = layer(x).view(batch, size, 3, HEADS, DIM).unbind(2)
            q, k, v = (part.transpose(1, 2) for part in parts)
            q, k = self.rope(self, q, angles), self.of_keys(self, k, angles)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + y.transpose(1, 2).reshape(batch, size, -1)
        return self.head(x)


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def whole(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    angles = torch.cat([angles, angles], -1)
    return x * angles.cos() + rotate_half(x) * angles.sin()


def halves(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def backwards(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    return whole(m, x, -angles)


def interleaved(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    turned = [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()]
    return torch.stack(turned, -1).flatten(-2)


def repeated(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    """GPT-J's: tables repeated for each pair."""
    cos, sin = (t.repeat_interleave(2, -1) for t in (angles.cos(), angles.sin()))
    across = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + across * sin


def phases(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def deinterleaved(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    """DeepSeek's: neighbours are brought apart, then rotated as halves."""
    return whole(m, x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), angles)


def partial_first(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    return torch.cat([whole(m, x[..., :4], angles[:, :2]), x[..., 4:]], -1)


def partial_last(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    return torch.cat([x[..., :4], interleaved(m, x[..., 4:], angles[:, :2])], -1)


def proportional(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    """Some pairs of the halves never turn."""
    return whole(m, x, angles * torch.tensor([1.0, 1.0, 0.0, 0.0]))


def scaled(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    """An attention factor in the tables, as YaRN has it, and one behind them."""
    cos, sin = (torch.cat([t, t], -1) * 1.3 for t in (angles.cos(), angles.sin()))
    return 2 * (x * cos + rotate_half(x) * sin)


def normed_after(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    x = whole(m, x, angles)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def normed_before(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    return whole(m, F.rms_norm(x, (DIM,), m.gain), angles)


def flattened(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    batch, heads, size, dim = x.shape
    return whole(m, x.reshape(batch * heads, size, dim), angles).reshape(batch, heads, size, dim)


FOUND: dict[str, tuple[Rope, RotaryForm]] = {
    "whole": (whole, RotaryForm("half", 0, 8)),
    "halves": (halves, RotaryForm("half", 0, 8)),
    "backwards": (backwards, RotaryForm("half", 0, 8)),
    "interleaved": (interleaved, RotaryForm("interleaved", 0, 8)),
    "repeated": (repeated, RotaryForm("interleaved", 0, 8)),
    "complex": (phases, RotaryForm("interleaved", 0, 8)),
    "deinterleaved": (deinterleaved, RotaryForm("half", 0, 8)),
    "first channels": (partial_first, RotaryForm("half", 0, 4)),
    "last channels": (partial_last, RotaryForm("interleaved", 4, 4)),
    "proportional": (proportional, RotaryForm("half", 0, 8)),
    "scaled": (scaled, RotaryForm("half", 0, 8)),
    "norm after": (normed_after, RotaryForm("half", 0, 8)),
    "norm before": (normed_before, RotaryForm("half", 0, 8)),
}


def rope_of(model: nn.Module) -> tuple[Any, RopeSpec | NoMatch]:
    captured = capture(model.eval())
    detection = detect(captured)
    spec = detection.sites[0].rope
    return captured, spec or next(miss for miss in detection.misses if miss.rule == "rope")


@pytest.mark.parametrize("case", FOUND)
def test_spellings(case: str) -> None:
    """The form; and tables and rotation give back, from q_input and k_input, what the graph computes."""
    rope, form = FOUND[case]
    model = Rotated(rope, layers=1)
    captured, spec = rope_of(model)
    assert isinstance(spec, RopeSpec) and spec.form == form
    rotations, count = Rotations(captured.graph_module), 40
    inputs = {"input_ids": torch.randint(0, 61, (1, count))}
    cos, sin = rotations.tabulate(spec.k, rotations.table_values(spec.k, inputs), form, count)
    assert cos.shape == sin.shape == (count, form.rotary_dim)
    wanted = [spec.q.output, spec.k.output, spec.q_input, spec.k_input]
    q, k, q_in, k_in = evaluate(captured.graph_module, wanted, inputs)
    positions = torch.arange(count)[None]
    for found, before in ((q, q_in), (k, k_in)):
        torch.testing.assert_close(
            rotate(before, positions, cos.float(), sin.float(), form=form), found, rtol=1e-5, atol=1e-5
        )


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "case", ["interleaved", "complex", "deinterleaved", "last channels", "scaled", "norm after"]
)
def test_positions_in_the_cache(case: str) -> None:
    """Against the policy's oracle as rings wrap; and against the model itself while nothing is forgotten."""
    model = Rotated(FOUND[case][0]).eval()
    retention = {"kind": "sink_window", "sinks": 2, "window": 30, "positions": "in_cache"}
    fast = kvcompile.optimize(
        model, {"cache": {"retention": retention}}, compile={"mode": "none"}, verify="thorough"
    )
    ids = torch.randint(0, 61, (2, 24))
    found = torch.cat([fast(part) for part in ids.split([11, 1, 1, 7, 4], 1)], 1)
    torch.testing.assert_close(found, model(ids), rtol=1e-4, atol=1e-5)


def test_half_precision() -> None:
    """Tables are exact although the graph rounds: casts are left out when they are made."""
    captured, spec = rope_of(Rotated(interleaved).to(torch.bfloat16))
    assert isinstance(spec, RopeSpec) and spec.form == RotaryForm("interleaved", 0, 8)
    rotations = Rotations(captured.graph_module)
    inputs = {"input_ids": torch.zeros(1, 20, dtype=torch.int64)}
    cos, _ = rotations.tabulate(spec.k, rotations.table_values(spec.k, inputs), spec.form, 20)
    angles = torch.arange(20)[:, None] * Rotated(interleaved).to(torch.bfloat16).frequencies
    torch.testing.assert_close(cos[:, ::2], angles.cos().double(), rtol=0, atol=1e-12)


def test_layers_that_rotate_alike_share_their_tables() -> None:
    detection = detect(capture(Rotated(normed_before).eval()))
    assert len({site.rope.table for site in detection.sites if site.rope}) == 1
    assert all(site.rope is not None for site in detection.sites)


def nearly(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    angles = torch.cat([angles, angles], -1)
    return x * angles.cos() + rotate_half(x) * angles.sin() * 1.01


def squared(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    return whole(m, x, angles**2)


def growing(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    return whole(m, x, angles) * (1 + angles[:, :1])


def weighted_after(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    return normed_after(m, x, angles) * m.gain


def clipped(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    return whole(m, x, angles).clamp(-0.5, 0.5)


def tripled(m: Rotated, x: Tensor, angles: Tensor) -> Tensor:
    return whole(m, x, angles) + x.roll(1, -1) * angles.sin()[:, :1]


BROKEN: dict[str, tuple[Rope, Rope | None, str]] = {
    "nearly": (nearly, None, "scale as well as rotate"),
    "growing": (growing, None, "scale as well as rotate"),
    "weights behind": (weighted_after, None, "scale as well as rotate"),
    "angles not linear": (squared, None, "do not grow in proportion to the positions"),
    "clipped": (clipped, None, "do not depend linearly on what they are at position 0"),
    "three terms": (tripled, None, "channels do not rotate in pairs"),
    "another direction": (whole, backwards, "queries and keys are rotated differently"),
    "another pairing": (whole, interleaved, "queries and keys are rotated differently"),
    "keys alone": (lambda m, x, angles: x, whole, "positions enter the keys alone"),
    "nowhere": (lambda m, x, angles: x, None, "no positions enter between the projections and the scores"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_rotary_embedding(case: str) -> None:
    """It stays in the graph, which is exact; only counting in the cache is refused."""
    rope, of_keys, reason = BROKEN[case]
    model = Rotated(rope, of_keys, layers=1).eval()
    _, miss = rope_of(model)
    assert isinstance(miss, NoMatch) and reason in miss.reason
    if case in ("nearly", "another direction"):
        fast = kvcompile.optimize(model, max_tokens=64, compile={"mode": "none"})
        ids = torch.randint(0, 61, (2, 12))
        found = torch.cat([fast(part) for part in ids.split([7, 1, 4], 1)], 1)
        torch.testing.assert_close(found, model(ids), rtol=1e-4, atol=1e-5)
        with pytest.raises(PlanError, match="in_cache needs a rotary embedding"):
            kvcompile.optimize(model, "streaming", compile={"mode": "none"})


class Mixed(Rotated):
    """The first layer rotates, the second has no positions (NoPE); `learned`: positions in the residual stream."""

    def __init__(self, learned: bool = False):
        super().__init__(whole)
        self.table = nn.Embedding(64, HEADS * DIM) if learned else None

    def forward(self, input_ids: Tensor) -> Tensor:
        batch, size = input_ids.shape
        angles = torch.arange(size)[:, None] * self.frequencies
        x = self.embed(input_ids)
        if self.table is not None:
            x = x + self.table(torch.arange(size))
        for index, layer in enumerate(self.qkv):
            parts = layer(x).view(batch, size, 3, HEADS, DIM).unbind(2)
            q, k, v = (part.transpose(1, 2) for part in parts)
            if index == 0:
                q, k = whole(self, q, angles), whole(self, k, angles)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + y.transpose(1, 2).reshape(batch, size, -1)
        return self.head(x)


def test_layers_without_positions() -> None:
    """Counting in the cache changes nothing for them, so a recipe may say it for all layers."""
    model = Mixed().eval()
    assert [site.positionless for site in detect(capture(model)).sites] == [False, True]
    retention = {"kind": "sink_window", "sinks": 2, "window": 30, "positions": "in_cache"}
    fast = kvcompile.optimize(
        model, {"cache": {"retention": retention}}, compile={"mode": "none"}, verify="thorough"
    )
    assert "no position enters this layer" in fast.plan.decisions[1].because[1]
    ids = torch.randint(0, 61, (2, 24))
    found = torch.cat([fast(part) for part in ids.split([11, 1, 12], 1)], 1)
    torch.testing.assert_close(found, model(ids), rtol=1e-4, atol=1e-5)


def test_learned_positions_reach_every_layer() -> None:
    assert [site.positionless for site in detect(capture(Mixed(learned=True).eval())).sites] == [False, False]


class Tabled(Rotated):
    """Tables of a fixed number of positions."""

    cos: Tensor

    def __init__(self) -> None:
        super().__init__(whole)
        self.register_buffer("angles", torch.arange(48)[:, None] * self.frequencies)

    def forward(self, input_ids: Tensor) -> Tensor:
        angles = self.angles[torch.arange(input_ids.shape[1])]
        self_rope, self.rope = self.rope, lambda m, x, _: whole(m, x, angles)
        self.of_keys = self.rope
        try:
            return super().forward(input_ids)
        finally:
            self.rope = self.of_keys = self_rope


def test_tables_that_end() -> None:
    """Positions in the cache go no further than the model's own table, which limits sequences as well."""
    retention = {"kind": "sink_window", "sinks": 2, "window": 9, "positions": "in_cache"}
    fast = kvcompile.optimize(Tabled().eval(), {"cache": {"retention": retention}}, compile={"mode": "none"})
    assert fast.plan.limits.max_tokens == 48
    assert [len(table) for table in fast.program.constants.values()] == [48, 48]
    fast(torch.randint(0, 61, (1, 48)))
    with pytest.raises(LimitError):
        fast(torch.randint(0, 61, (1, 1)))


def test_complex_numbers_leave_the_graph() -> None:
    graph = capture(Rotated(phases).eval()).graph_module.graph
    assert not [
        n for n in graph.nodes if isinstance(n.meta.get("val"), Tensor) and n.meta["val"].is_complex()
    ]
