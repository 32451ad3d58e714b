"""Storages: error bounds, packing, rotation, the rules of KIVI, and what stands in the buffers after any chunks.

That the cached reference gives what the policy's oracle gives is in `test_attention.py`, for every storage; here it is
for what those cases do not have: latent rows, caches that several sites share, masks from activations.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code

import kvcompile
from kvcompile.expression import SCORE, ScoreMod, program
from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.kernels.oracle import quantize
from kvcompile.kernels.reference import codec
from kvcompile.kernels.reference import residual as recent
from kvcompile.kernels.reference.codes import scales
from kvcompile.kernels.reference.packing import pack, unpack
from kvcompile.kernels.shared.hadamard import hadamard
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import (
    CacheLayout,
    Contiguous,
    InKeys,
    Ring,
    SinkWindow,
    Storage,
    Window,
    float_dtype,
    fp8,
    int8,
    model_dtype,
    mxfp4,
    nf4,
    per_channel,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.pipeline import plan_for
from kvcompile.recipe import Recipe
from kvcompile.specs import RotaryForm, ScoreSpec
from kvcompile.verify import check_program, verify
from tests.kernels.reference.test_attention import rope_tables
from tests.support.carried_scores import op, pair
from tests.support.models import tiny_hf
from tests.support.policy import policy_attention
from tests.support.runner import run
from tests.verify.test_verify import fronts

SCALES = ("float16", "float32")
AFFINE = [uint(bits, group, scale) for bits in (2, 3, 4, 8) for group in (0, 32) for scale in SCALES]
FLOATS = [float_dtype("float32"), float_dtype("float16"), float_dtype("bfloat16")]
FP8 = [fp8(form, scale) for form in ("e4m3", "e5m2") for scale in ("token", "none")]
CODEBOOKS = [nf4(), nf4(32), nf4(32, "float32"), mxfp4()]
PER_TOKEN: list[Any] = [
    model_dtype(),
    *FLOATS,
    *FP8,
    fp8("e5m2", scale_dtype="float32"),
    int8(),
    *AFFINE,
    *CODEBOOKS,
]
TURNED: list[Any] = [
    with_hadamard(storage)
    for storage in (model_dtype(), float_dtype("bfloat16"), fp8(), int8(), uint(2, 32), nf4(32), mxfp4())
]
RESIDUAL: list[Any] = [
    with_residual(uint(2, 32), 6),
    with_residual(fp8(), 3),
    with_residual(mxfp4(), 4, sinks=1),
    per_channel(2, 4, 8),
    per_channel(3, 5, 5),
    with_hadamard(per_channel(4, 4, 12)),
    with_hadamard(with_residual(int8(), 4)),
]
D = 64


def vectors(seed: int, size: float, count: int = 24) -> Tensor:
    """[count, D] of absolute value up to about `size`, with channels that stand out, and rows of zeros."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, D, generator=g) * (1 + 9 * (torch.rand(D, generator=g) > 0.9))
    x[::7] = 0
    return x * size / 40


def around(storage: Storage, x: Tensor) -> Tensor:
    return codec.decode(storage, codec.encode(storage, x), torch.float32)


# ---- bits


@given(
    bits=st.sampled_from((2, 3, 4, 8)),
    bytes_per_plane=st.integers(1, 16),
    rows=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_packed_bits_have_no_gaps_and_come_back(
    bits: int, bytes_per_plane: int, rows: int, seed: int
) -> None:
    """n channels are exactly n * bits / 8 bytes, and every one of these bits is used."""
    channels = 8 * bytes_per_plane
    codes = torch.randint(0, 2**bits, (rows, channels), generator=torch.Generator().manual_seed(seed))
    data = pack(codes.to(torch.uint8), bits)
    assert data.dtype == torch.uint8 and data.shape == (rows, channels * bits // 8)
    assert torch.equal(unpack(data, bits), codes.to(torch.uint8))
    full = pack(torch.full((channels,), 2**bits - 1, dtype=torch.uint8), bits)
    assert torch.equal(full, torch.full_like(full, 255))
    # And the other way: any bytes are codes, and those pack to the same bytes.
    any_bytes = torch.randint(0, 256, data.shape, generator=torch.Generator().manual_seed(seed)).to(
        torch.uint8
    )
    assert torch.equal(pack(unpack(any_bytes, bits), bits), any_bytes)


# ---- one vector


def bound(storage: Storage, x: Tensor) -> Tensor:
    """How far a decoded element may be from x [.., D]: half a step, and what the stored scale rounds away."""
    tiny = 1e-5 * x.abs() + 1e-30  # fp32 arithmetic
    code = storage.element
    match code.kind:
        case "float" if code.dtype is None:
            return torch.zeros_like(x)
        case "float":
            info = torch.finfo(code.dtype)
            return x.abs() * info.eps / 2 + info.smallest_normal * info.eps
        case "fp8":
            info = torch.finfo(code.dtype)
            none = storage.scale.per == "none"
            scale = torch.ones(len(x)) if none else codec.encode(storage, x)[1].float()
            lost = x.abs() * info.eps / 2 + scale[:, None] * info.smallest_normal * info.eps / 2
            return lost + (x.abs() - storage.largest * scale[:, None]).clamp(min=0) + tiny
        case "int":
            scale = codec.encode(storage, x)[1].float()[:, None]
            return scale / 2 + (x.abs() - 127 * scale).clamp(min=0) + tiny
        case "codebook":
            scale = scales.numbers(storage.scale, codec.encode(storage, x)[1])
            step = scale.repeat_interleave(D // storage.groups(D), -1)
            widest = max(b - a for a, b in itertools.pairwise(sorted(code.numbers)))
            return step * widest / 2 + (x.abs() - code.largest * step).clamp(min=0) + tiny
        case "uint":
            _, scale, minimum = (part.float() for part in codec.encode(storage, x))
            size = D // storage.groups(D)
            step, low = (part.repeat_interleave(size, -1) for part in (scale, minimum))
            high = low + step * code.largest
            return step / 2 + (low - x).clamp(min=0) + (x - high).clamp(min=0) + tiny + 1e-6 * low.abs()
    raise AssertionError(storage)


@settings(max_examples=30)
@given(seed=st.integers(0, 999), size=st.sampled_from((1e-6, 1e-3, 1.0, 30.0, 5e4)))
@pytest.mark.parametrize("storage", PER_TOKEN, ids=str)
def test_what_is_decoded_is_half_a_step_away_at_most(storage: Any, seed: int, size: float) -> None:
    x = vectors(seed, size)
    assert ((around(storage, x) - x).abs() <= bound(storage, x)).all()


@pytest.mark.parametrize("storage", PER_TOKEN, ids=str)
def test_the_bound_means_something(storage: Any) -> None:
    """For vectors of the size that caches have, in relation to the vector: the error that the bits allow."""
    x = torch.randn(64, D, generator=torch.Generator().manual_seed(1))
    largest = {8: 0.02, 4: 0.25, 3: 0.5, 2: 1.2}
    allowed = {
        "model": 0.0,
        "float": 4e-3,
        "fp8": 0.07 if storage.code == "e4m3" else 0.13,
        "int": 0.02,
        "uint": largest.get(storage.element.bits, 0.0),
        "codebook": 0.4 if storage.code == "nf4" else 0.5,
    }["model" if storage.code == "model" else storage.element.kind]
    error = (around(storage, x) - x).abs()
    assert (error / x.abs().clamp(min=1)).max() <= allowed


@pytest.mark.parametrize("storage", PER_TOKEN, ids=str)
@pytest.mark.parametrize("value", [0.0, 0.75, -1.5, 32.0])
def test_constants_come_back_exactly(storage: Any, value: float) -> None:
    """Values that the scale's dtype (and fp8) holds: also a group, or a row, that has no range."""
    x = torch.full((3, D), value)
    if storage.scale.per == "vector":
        # The scale is absmax / 127 (or 448), rounded; times 127 it is the value to the scale's precision.
        assert (around(storage, x) - x).abs().max() <= abs(value) * 2**-10
    else:
        assert torch.equal(around(storage, x), x)
    assert torch.equal(around(storage, torch.zeros(3, D)), torch.zeros(3, D))


@pytest.mark.parametrize("storage", [s for s in PER_TOKEN if s.code != "model"], ids=str)
def test_what_no_scale_can_hold_saturates(storage: Any) -> None:
    """Never infinite, never NaN: 0 times infinity would be, in every later query."""
    for size in (1e9, 1e38):
        x = torch.randn(5, D, generator=torch.Generator().manual_seed(0)).clamp(-1, 1) * size
        back = around(storage, x)
        assert back.isfinite().all()
        assert ((back * x) >= 0).all() or storage.element.kind == "uint"
        assert around(storage, x.bfloat16()).isfinite().all()
    assert around(storage, torch.full((1, D), 1e-12)).abs().max() <= 1e-4


@pytest.mark.parametrize("storage", [*PER_TOKEN, *TURNED], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_oracle_rounds_to_the_same_bits(storage: Any, dtype: torch.dtype) -> None:
    """It says it in other words: a value on an edge must fall to the same side."""
    for size in (1e-4, 1.0, 1e3):
        x = vectors(3, size)[None].to(dtype)
        own = codec.decode(storage, codec.encode(storage, x), dtype)
        older, newest = quantize.older_and_newest(storage, x)
        assert torch.equal(older, own) and torch.equal(newest, own) and older.dtype == dtype


def test_exact_is_what_comes_back_as_it_was() -> None:
    """The plan calls a layout lossless by this."""
    for storage, dtype in itertools.product(
        [*PER_TOKEN, *TURNED], (torch.float32, torch.bfloat16, torch.float16)
    ):
        x = torch.randn(16, D, generator=torch.Generator().manual_seed(2))
        x = (x * torch.logspace(-6, 3, D)).to(dtype)
        same = torch.equal(codec.decode(storage, codec.encode(storage, x), dtype), x)
        if storage.exact(dtype):
            assert same, f"{storage}, {dtype}"
        elif not storage.hadamard:
            assert not same, f"{storage}, {dtype}"
    assert not any(storage.exact(torch.float32) for storage in RESIDUAL)


# ---- rotation


@pytest.mark.parametrize(("dim", "block"), [(64, 64), (96, 32), (80, 16), (4, 4), (576, 64)])
def test_the_rotation_is_orthonormal_and_its_own_inverse(dim: int, block: int) -> None:
    matrix = hadamard(torch.eye(dim))
    torch.testing.assert_close(matrix @ matrix, torch.eye(dim), rtol=0, atol=1e-6)
    assert torch.equal(matrix, matrix.T)
    blocks = torch.block_diag(*[torch.ones(block, block)] * (dim // block)) * block**-0.5
    torch.testing.assert_close(matrix.abs(), blocks, rtol=1e-6, atol=0)


def test_the_rotation_rounds_alike_for_any_number_of_vectors() -> None:
    x = torch.randn(37, D, generator=torch.Generator().manual_seed(0))
    assert torch.equal(hadamard(x), torch.cat([hadamard(row[None]) for row in x]))


def test_the_rotation_helps_where_channels_stand_out() -> None:
    """What it is for: one channel of 20 times the size leaves the others no steps."""
    x = torch.randn(200, D, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 20
    plain, turned = (around(storage, x) - x for storage in (uint(4), with_hadamard(uint(4))))
    assert turned.norm() < 0.6 * plain.norm()


# ---- the cached reference

HQ, HKV, T = 4, 2, 40


def inputs(batch: int, k_dim: int = D, v_dim: int = 32, heads: int = HKV) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    sizes = ((HQ, k_dim), (heads, k_dim), (heads, v_dim))
    return [torch.randn(batch, h, T, d, generator=g) for h, d in sizes]


def close(got: Tensor, wanted: Tensor, pads: Tensor) -> None:
    """Within 64 units in the last place of values of size 1 to 4: far less than any step of a storage."""
    real = (torch.arange(T)[None] >= pads[:, None])[:, None, :, None].expand_as(got)
    assert got.isfinite().all()
    assert (got - wanted).abs()[real].max() <= 64 * torch.finfo(torch.float32).eps * 4


CHUNKS = ([T], [7] * 5 + [5], [1] * T, [13, 1, 1, 20, 1, 4])


@pytest.mark.parametrize("placed", [{}, {"placement": Ring(), "retention": Window(9)}], ids=["full", "ring"])
def test_a_turned_cache_is_the_plain_one_up_to_rounding(placed: Any) -> None:
    """Without rounding: queries turn with the keys, and results turn back."""
    args, pads = inputs(2), torch.tensor([0, 4])
    turned, plain = (CacheLayout(s, s, **placed) for s in (with_hadamard(model_dtype()), model_dtype()))
    for chunks in CHUNKS:
        got = run(SiteSpec(turned, 0.125), args, chunks, pads).out
        close(got, policy_attention(*args, SiteSpec(plain, 0.125), [], pads), pads)


@pytest.mark.parametrize("storage", [*PER_TOKEN[1:], *TURNED, *RESIDUAL], ids=str)
def test_values_in_the_keys(storage: Any) -> None:
    """MLA: one head of rows whose first channels are the values, as they are stored."""
    args, pads = inputs(2, k_dim=D, v_dim=40, heads=1), torch.tensor([0, 3])
    spec = SiteSpec(CacheLayout(storage, InKeys(40)), 0.125)
    wanted = policy_attention(*args, spec, [], pads)
    for chunks in CHUNKS:
        close(run(spec, args, chunks, pads).out, wanted, pads)


@pytest.mark.parametrize("storage", [fp8(), *TURNED, *RESIDUAL], ids=str)
def test_values_in_keys_before_rope(storage: Any) -> None:
    """Keys that rotate when they are read; the values in them do not."""
    args, pads = inputs(2, k_dim=D, v_dim=40, heads=1), torch.tensor([0, 3])
    rope, form = rope_tables(64, 8), RotaryForm("half", 48, 8)
    layout = CacheLayout(storage, InKeys(40), Contiguous(), SinkWindow(3, 6, "in_cache"))
    spec = SiteSpec(layout, 0.125, rotary=form)
    wanted = policy_attention(*args, spec, rope, pads)
    for chunks in CHUNKS:
        close(run(spec, args, chunks, pads, rope).out, wanted, pads)


@pytest.mark.parametrize("storage", [fp8(), with_hadamard(uint(4)), *RESIDUAL], ids=str)
def test_sites_that_share_a_cache(storage: Any) -> None:
    """The first appends what comes before attention, the last what comes after; all see the same."""
    args, pads = inputs(2), torch.tensor([0, 3])
    layout = CacheLayout(storage, RESIDUAL[0])
    wanted = policy_attention(*args, SiteSpec(layout, 0.125), [], pads)
    shares = [SiteSpec(layout, 0.125, share=share).to_json() for share in ("first", "middle", "last")]
    for chunks in CHUNKS[:2]:
        buffers = [
            torch.full((2, *b.shape), 77, dtype=b.dtype) for b in layout.buffers(HKV, D, 32, args[0].dtype, T)
        ]
        seq_lens, start, outs = torch.zeros(2, dtype=torch.long), 0, []
        for size in chunks:
            own = [x[:, :, start : start + size] for x in args]
            positions = seq_lens[:, None] - (pads - start).clamp(0, size)[:, None] + torch.arange(size)
            outs.append(
                [
                    ops.cached_attention(*own, buffers, positions, seq_lens, [], start + size, s)
                    for s in shares
                ]
            )
            seq_lens, start = positions[:, -1] + 1, start + size
        for site in zip(*outs, strict=True):
            close(torch.cat(site, dim=2), wanted, pads)


@pytest.mark.few(2)
@pytest.mark.parametrize("storage", RESIDUAL, ids=str)
@pytest.mark.parametrize("boolean", [True, False])
def test_a_mask_from_activations(storage: Any, boolean: bool) -> None:
    args, pads = inputs(2), torch.tensor([0, 0])
    made = torch.randn(2, T, T, generator=torch.Generator().manual_seed(1))
    made = (made > -0.5) | torch.eye(T, dtype=torch.bool) if boolean else made
    leaf = pair("made", made.dtype)
    score, mask = (None, leaf) if boolean else (op("add", SCORE, leaf), None)
    instructions, numbers = program({"score": score, "mask": mask}, lambda leaf: 0)
    mod = ScoreMod(instructions, ("pair",), numbers["score"], numbers["mask"])
    for layout in (CacheLayout(storage, model_dtype()), CacheLayout(storage, RESIDUAL[0])):
        spec = SiteSpec(layout, 0.125, score=ScoreSpec(mod=mod))
        wanted = policy_attention(*args, spec, [], pads, leaves=[made])
        without = policy_attention(*args, replace(spec, score=ScoreSpec()), [], pads)
        assert (wanted - without).abs().max() > 0.1
        for chunks in CHUNKS:
            close(run(spec, args, chunks, pads, leaves=[made]).out, wanted, pads)


# ---- KIVI


def kivi_state(prompt: int, steps: int, residual: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Which tokens of K and V are rounded and which are not, as Algorithm 1 of the paper moves them (token numbers).

    Liu et al. 2024, section 3: a prompt leaves the last l mod R keys and the last R values; each later token is
    appended, keys are rounded all together when they are R, values one by one when they are more than R.
    """
    tokens = list(range(prompt))
    cut = prompt - prompt % residual
    k_rounded, k_full = tokens[:cut], tokens[cut:]
    v_rounded, v_full = tokens[: max(0, prompt - residual)], tokens[max(0, prompt - residual) :]
    for token in range(prompt, prompt + steps):
        k_full.append(token)
        if len(k_full) == residual:
            k_rounded, k_full = k_rounded + k_full, []
        v_full.append(token)
        if len(v_full) > residual:
            v_rounded, v_full = v_rounded + v_full[:-residual], v_full[-residual:]
    return k_rounded, k_full, v_rounded, v_full


@given(prompt=st.integers(0, 60), steps=st.integers(0, 60), groups=st.integers(1, 4), group=st.integers(1, 5))
def test_tokens_settle_as_the_paper_has_it(prompt: int, steps: int, groups: int, group: int) -> None:
    residual, length = groups * group, prompt + steps
    keys, values = per_channel(2, group, residual), with_residual(uint(2), residual)
    k_rounded, k_full, v_rounded, v_full = kivi_state(prompt, steps, residual)
    k_from, v_from = (int(recent.in_full_from(s, torch.tensor([length]))) for s in (keys, values))
    assert k_rounded == list(range(k_from)) and k_full == list(range(k_from, length))
    assert v_rounded == list(range(max(0, v_from))) and v_full == list(range(max(0, v_from), length))
    assert quantize.newest_from(keys, length) == k_from and quantize.newest_from(values, length) == max(
        0, v_from
    )


@settings(max_examples=40, deadline=None)
@given(
    keys=st.sampled_from(RESIDUAL),
    values=st.sampled_from([*RESIDUAL, int8()]),
    cuts=st.lists(st.integers(1, T - 1), max_size=8),
    padding=st.lists(st.integers(0, 9), min_size=1, max_size=2),
)
def test_the_state_is_the_same_after_any_chunks(
    keys: Any, values: Any, cuts: list[int], padding: list[int]
) -> None:
    """Bit for bit: the rings, and the settled form of all that is read settled."""
    args, pads = inputs(len(padding)), torch.tensor(padding)
    spec = SiteSpec(CacheLayout(keys, values), 0.125)
    edges = [0, *sorted(set(cuts)), T]
    chunks = [b - a for a, b in itertools.pairwise(edges)]
    one, many = (run(spec, args, c, pads).buffers for c in ([T], chunks))
    split = spec.layout.num_key_parts
    for storage, own, other in ((keys, one[:split], many[:split]), (values, one[split:], many[split:])):
        for row, length in enumerate((T - pads).tolist()):
            settled = quantize.newest_from(storage, length) if storage.residual else length
            places = torch.arange(T)[None]
            forms = (
                recent.decode_settled(storage, parts, T, torch.float32)[row, :, :settled]
                for parts in (own, other)
            )
            assert torch.equal(*forms)
            if storage.residual:
                live = torch.remainder(
                    places[0, max(0, length - storage.residual) : length], storage.residual
                )
                # Of K's ring, what is settled is never read again.
                assert torch.equal(own[-1][row][:, live], other[-1][row][:, live])


def test_per_channel_keys_keep_an_outlier_channel_apart() -> None:
    """What the axis is for: a large channel of K costs the others nothing."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, T, D, generator=g)
    x[..., 5] += 30
    channel, token = (quantize.older_and_newest(s, x)[0] for s in (per_channel(2, 4, 8), uint(2, 32)))
    assert (channel - x).norm() < 0.4 * (token - x).norm()


# ---- whole models


LOSSY = {
    "fp8 without scale": {
        "keys": {"dtype": "fp8_e4m3", "scale": "none"},
        "values": {"dtype": "fp8_e5m2", "scale": "none"},
    },
    "fp8 and float16": {"keys": {"dtype": "fp8_e5m2"}, "values": {"dtype": "float16"}},
    "asymmetric int8": {"keys": {"dtype": "int8", "mode": "asymmetric"}, "values": {"dtype": "bfloat16"}},
    "turned int3 and int2": {
        "keys": {"dtype": "int3", "rotate": "hadamard"},
        "values": {"dtype": "int2", "rotate": "hadamard"},
    },
    "turned KIVI": {
        "keys": {"dtype": "int2", "axis": "channel", "group": 32, "residual": 32, "rotate": "hadamard"},
        "values": {"dtype": "int4", "residual": 16, "rotate": "hadamard"},
    },
    "turned, in a ring, before RoPE": {
        "keys": {"dtype": "int4", "rotate": "hadamard"},
        "values": {"dtype": "int4", "rotate": "hadamard"},
        "retention": {"kind": "sink_window", "sinks": 2, "window": 9, "positions": "in_cache"},
    },
    "KIVI, forgetting, before RoPE": {
        "keys": {"dtype": "int4", "axis": "channel", "group": 32, "residual": 32},
        "values": {"dtype": "int4", "residual": 8},
        "placement": {"kind": "contiguous"},
        "retention": {"kind": "sink_window", "sinks": 2, "window": 40, "positions": "in_cache"},
    },
}


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", LOSSY)
def test_models_are_verified(what: str, dtype: str) -> None:
    """Thorough: also with the residual and the groups as the recipe has them."""
    model, front = fronts("llama", dtype)
    plan = plan_for(front, Recipe.load({"cache": LOSSY[what], "runtime": {"max_tokens": 96}}))
    assert not plan.lossless
    for result in verify(model, front, plan, "thorough"):
        assert result.error < result.budget / 2, str(result)


def test_float32_keeps_a_half_precision_model_exact() -> None:
    model = tiny_hf("llama").to(torch.bfloat16)
    cache = {"keys": {"dtype": "float32"}, "values": {"dtype": "bfloat16"}}
    fast = kvcompile.optimize(model, "baseline", cache=cache, max_tokens=64, compile={"mode": "none"})
    assert fast.plan.lossless and fast.cache.shapes()["cache_0_keys_data"][1] == torch.float32


@pytest.mark.parametrize("recipe", ["kivi2", "fp8"])
def test_rows_of_a_beam_change_places(recipe: str) -> None:
    """reorder() moves groups and rings as it moves slots."""
    model = tiny_hf("llama", hidden_size=192, head_dim=32)
    small = {"keys": {"residual": 32}, "values": {"residual": 8}} if recipe == "kivi2" else {}
    made = [
        kvcompile.optimize(model, recipe, cache=small, max_tokens=96, verify="off", compile={"mode": "none"})
        for _ in range(2)
    ]
    ids = torch.randint(3, 61, (3, 70), generator=torch.Generator().manual_seed(0))
    order = torch.tensor([2, 0, 0])
    made[0](ids)
    made[1](ids[order])
    made[0].cache.reorder(order)
    for step in range(3):
        new = torch.full((3, 1), 5 + step)
        got, wanted = (fast(new).logits for fast in made)
        # The same tokens in another row of a product: summed in another order, and no more than that.
        assert (got - wanted).abs().max() <= 64 * torch.finfo(got.dtype).eps * wanted.abs().max()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(CacheLayout(fp8(), with_hadamard(uint(3, 32))), marks=pytest.mark.slow),
        CacheLayout(per_channel(2, 32, 64), with_residual(uint(2, 32), 64)),
    ],
    ids=["per token", "KIVI"],
)
def test_a_compiled_step_allocates_nothing_of_the_cache_s_size(layout: CacheLayout) -> None:
    """The buffers are written in place: Inductor makes no copy of them, and no temporary over all slots."""
    slots, span = 32 * 4099, 96
    text = SiteSpec(layout, 0.125).to_json()
    buffers = [
        torch.zeros(1, *b.shape, dtype=b.dtype) for b in layout.buffers(HKV, D, D, torch.float32, slots)
    ]
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 1, D, generator=g) for heads in (HQ, HKV, HKV))
    position = torch.full((1, 1), 77)

    def step(*parts: Tensor) -> Tensor:
        return ops.cached_attention(q, k, v, list(parts), position, position[:, 0], [], span, text)

    eager = [buffer.clone() for buffer in buffers]
    with fresh_cache(), torch.no_grad():
        got, code = run_and_get_code(torch.compile(step, fullgraph=True), *buffers)
    wanted = step(*eager)
    # Fused arithmetic may round a scale to its neighbour in float16: a step of 2^-10 of it, over 7 levels.
    assert (got - wanted).abs().max() <= 7 * 2**-10 * v.abs().max()
    for name, new, old in zip(layout.buffers(HKV, D, D, torch.float32, slots), buffers, eager, strict=True):
        assert torch.equal((new.float() != 0).any(-1), (old.float() != 0).any(-1)), name
    made = re.findall(r"empty_strided\w*\(\(([^)]*)\)", "\n".join(code))
    assert made and not [shape for shape in made if "4099" in shape or "131168" in shape]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["KIVI", "turned KIVI", "fp8"])
def test_compiled_programs_equal_the_policy(what: str) -> None:
    """Prompt, chunks and steps, ragged, over the edge of the residual; and no step compiles again."""
    model, front = fronts("llama", "float32")
    kivi = {
        "keys": {"dtype": "int4", "axis": "channel", "group": 32, "residual": 32},
        "values": {"dtype": "int4", "residual": 32},
    }
    cache = {"KIVI": kivi, "turned KIVI": LOSSY["turned KIVI"]}.get(what, {"keys": {"dtype": "fp8_e4m3"}})
    recipe = {"cache": cache, "runtime": {"max_tokens": 160, "prefill_chunk": 64}}
    with fresh_cache():
        fast = kvcompile.optimize(model, recipe, verify="off")
        chunks = (29, 1, 1, 1, 1, 9, 1, 40, 1)
        check_program(lambda ids, mask: fast(ids, mask).logits, front, fast.plan, chunks)
        before = counters["aot_autograd"]["total"]
        fast.reset()
        for size in (70, 1, 5, 1, 40):
            fast(torch.randint(3, 61, (2, size)))
        assert counters["aot_autograd"]["total"] == before


def test_no_part_of_a_residual_storage_is_encoded_without_its_neighbours() -> None:
    """The codec knows single vectors; it says so instead of guessing."""
    for storage in (with_residual(int8(), 4), per_channel(2, 4, 8)):
        with pytest.raises(ValueError, match="depends on"):
            codec.encode(storage, torch.zeros(1, D))
        with pytest.raises(ValueError, match="depends on"):
            codec.decode(storage, [], torch.float32)
