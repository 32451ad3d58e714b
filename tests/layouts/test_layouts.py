"""Every layout: symbolic bytes are its tensors' bytes, address and token_at are inverse on live tokens."""

from __future__ import annotations

import itertools

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.layouts import (
    CacheLayout,
    Contiguous,
    Full,
    Ring,
    Scale,
    Scored,
    SinkWindow,
    Slots,
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
from kvcompile.layouts import symbols as sy
from kvcompile.specs import MaskSpec

SCALES = ("float16", "float32")
STORAGES = (
    model_dtype(),
    *(int8(scale_dtype=scale) for scale in SCALES),
    *(uint(4, group, scale) for group in (0, 32, 64, 128) for scale in SCALES),
    *(uint(bits, 64) for bits in (2, 3, 8)),
    *(nf4(group, scale) for group in (0, 32, 64) for scale in SCALES),
    mxfp4(),
    float_dtype("float32"),
    float_dtype("float16"),
    float_dtype("bfloat16"),
    *(fp8(form, scale) for form in ("e4m3", "e5m2") for scale in ("token", "none")),
    with_hadamard(uint(2, 32)),
)
RESIDUAL = (
    with_residual(uint(2, 32), 128),
    with_residual(fp8(), 5),
    *(per_channel(bits, 32, 128, scale) for bits in (2, 3, 4, 8) for scale in SCALES),
    per_channel(2, 128, 128),
    with_hadamard(per_channel(4, 64, 192)),
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

retentions = st.one_of(
    st.just(Full()),
    st.builds(Window, st.integers(1, 40)),
    st.builds(SinkWindow, st.integers(0, 6), st.integers(1, 40), st.sampled_from(("original", "in_cache"))),
)


@st.composite
def layouts(draw: st.DrawFn) -> CacheLayout:
    retention = draw(retentions)
    placement = draw(st.sampled_from((Contiguous(), Ring()))) if retention.window else Contiguous()
    storages = st.sampled_from(STORAGES if isinstance(placement, Ring) else (*STORAGES, *RESIDUAL))
    layout = CacheLayout(draw(storages), draw(storages), placement, retention)
    assert layout.check() is None
    return layout


scored = st.builds(
    CacheLayout,
    st.sampled_from(STORAGES),
    st.sampled_from(STORAGES),
    st.just(Slots()),
    st.builds(
        Scored,
        st.integers(0, 4),
        st.integers(0, 20),
        st.integers(1, 20),
        granularity=st.sampled_from(("kv_head", "layer")),
    ),
)


@given(
    layout=st.one_of(layouts(), scored),
    batch=st.integers(1, 5),
    heads=st.integers(1, 8),
    dims=st.tuples(*[st.sampled_from((128, 256, 384))] * 2),
    tokens=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
)
def test_bytes_are_those_of_the_tensors(
    layout: CacheLayout, batch: int, heads: int, dims: tuple[int, int], tokens: int, dtype: torch.dtype
) -> None:
    assert layout.keys.check(dims[0]) is None
    buffers = layout.buffers(heads, *dims, dtype, tokens)
    real = sum(torch.empty((batch, *b.shape), dtype=b.dtype, device="meta").nbytes for b in buffers)
    values = {sy.B: batch, sy.T: tokens, sy.H: heads, sy.D: dims[0], sy.Dv: dims[1], sy.P: dtype.itemsize}
    assert layout.bytes.subs(values) == real
    if not layout.residual:
        assert layout.bytes_per_slot.subs(values) * layout.slots(tokens) * batch == real
    else:  # beyond the tokens in full, and over whole groups
        more = layout.bytes.subs(values | {sy.T: tokens + 128}) - real
        assert layout.bytes_per_slot.subs(values) * 128 * batch == more


@settings(max_examples=200)
@given(layout=layouts(), length=st.integers(1, 150))
def test_address_and_token_at_are_inverse_on_live_tokens(layout: CacheLayout, length: int) -> None:
    address = sympy.lambdify(sy.pos, layout.address, "math")
    token_at = sympy.lambdify((sy.slot, sy.length), layout.token_at, "math")
    slots = layout.slots(length)
    sinks, window = layout.retention.sinks, layout.retention.window
    live = [pos for pos in range(length) if window is None or pos < sinks or pos > length - 1 - window]
    taken = [address(pos) for pos in live]
    assert len(set(taken)) == len(live), "two live tokens in one slot"
    assert all(0 <= slot < slots for slot in taken)
    assert [token_at(slot, length) for slot in taken] == live
    assert [address(token_at(slot, length)) for slot in taken] == taken


@given(layout=layouts())
def test_slots_that_hold_nothing_yet_name_no_live_token(layout: CacheLayout) -> None:
    token_at = sympy.lambdify((sy.slot, sy.length), layout.token_at, "math")
    address = sympy.lambdify(sy.pos, layout.address, "math")
    sinks = layout.retention.sinks
    for length in (0, 1, 2, 5):
        written = {address(pos) for pos in range(length)}
        for slot in set(range(min(layout.slots(64), 64))) - written:
            token = token_at(slot, length)
            # Below `sinks` a slot is its own token, which is not seen yet; a ring slot counts back too far.
            assert token >= length or (slot >= sinks and token < sinks)


@given(layout=scored, length=st.integers(1, 60), slot=st.integers(0, 40))
def test_slots_fill_in_order_and_then_as_scores_say(layout: CacheLayout, length: int, slot: int) -> None:
    assert layout.check() is None and layout.bounded
    address = sympy.lambdify((sy.pos, sy.given_up), layout.address, "math")
    slots = layout.slots(None)
    assert [address(pos, -1) for pos in range(min(length, slots))] == list(range(min(length, slots)))
    assert address(slots + length, slot) == slot


@given(layout=st.one_of(layouts(), scored))
def test_json_round_trip(layout: CacheLayout) -> None:
    assert CacheLayout.from_json(layout.to_json()) == layout


def test_a_ring_takes_a_constant_number_of_slots() -> None:
    layout = CacheLayout(placement=Ring(), retention=SinkWindow(4, 1020))
    assert layout.bounded and layout.slots(None) == layout.slots(7) == 1024
    assert sy.T not in layout.bytes.free_symbols


def test_a_ring_that_must_keep_everything_is_refused() -> None:
    problem = CacheLayout(placement=Ring(), retention=Full()).check()
    assert problem is not None and "contiguous" in problem


@pytest.mark.parametrize("storage", RESIDUAL, ids=str)
def test_what_settles_in_order_is_refused_in_a_ring(storage: Storage) -> None:
    for layout in (CacheLayout(keys=storage), CacheLayout(values=storage)):
        ring = CacheLayout(layout.keys, layout.values, Ring(), Window(9))
        problem = ring.check()
        assert layout.check() is None
        if storage.channelwise:
            assert problem is not None
            assert "axis: channel needs slots in the order of tokens" in problem and "'contiguous'" in problem
        else:
            assert problem is None


@pytest.mark.parametrize(
    ("storage", "dim", "reason"),
    [
        (uint(4), 63, "int4 packs 2 channels together"),
        (uint(2), 66, "int2 packs 4 channels together"),
        (uint(3), 68, "int3 packs 8 channels together"),
        (per_channel(3, 32, 32), 68, "int3 packs 8 channels together"),
        (with_residual(uint(2), 9), 66, "int2 packs 4 channels together"),
        (uint(4, 64), 96, "int4 group 64 does not divide"),
        (uint(4, 128), 64, "int4 group 128 does not divide"),
        (nf4(), 63, "nf4 packs 2 channels together"),
        (mxfp4(), 80, "mxfp4 group 32 does not divide"),
        (with_hadamard(int8()), 66, "blocks of a power of two"),
        (with_hadamard(uint(4, 64)), 96, "int4 group 64 does not divide"),
    ],
    ids=str,
)
def test_a_dim_that_does_not_fit(storage: Storage, dim: int, reason: str) -> None:
    problem = storage.check(dim)
    assert problem is not None and str(dim) in problem and reason in problem


def test_bytes_per_token_head_of_each_storage() -> None:
    """D = 128: data, plus scales (and minimums) at their own width."""
    expected = {model_dtype(): 256, int8(): 130, int8(scale_dtype="float32"): 132}
    expected |= {
        uint(4): 68,
        uint(4, 32): 80,
        uint(4, 64): 72,
        uint(4, 128, scale_dtype="float32"): 72,
        uint(2, 32): 48,
        uint(3, 32): 64,
        uint(8): 132,
        nf4(): 66,
        nf4(32): 72,
        nf4(64, "float32"): 72,
        mxfp4(): 68,
        float_dtype("float32"): 512,
        float_dtype("float16"): 256,
        fp8(): 130,
        fp8("e5m2", scale_dtype="float32"): 132,
        fp8(scale="none"): 128,
        per_channel(2, 32, 128): 48,
        with_residual(uint(2, 32), 128): 48,
        with_hadamard(uint(2, 32)): 48,
    }
    values = {sy.P: 2}
    assert {s: int(s.bytes_per_vector(sympy.Integer(128)).subs(values)) for s in expected} == expected


@pytest.mark.parametrize(
    ("code", "scale", "reason"),
    [
        ("int8", Scale(), "int8 takes a scale per vector, not no scale"),
        ("uint4", Scale("group", 32), "and a minimum, not a scale per group of channels"),
        ("e4m3", Scale("group", 32), "fp8_e4m3 takes a scale per vector or"),
        ("model", Scale("vector"), "model takes no scale"),
        ("e2m1", Scale("group", 32), "mxfp4 keeps its scales in e8m0, not in float16"),
        ("nf4", Scale("group", 32, "e8m0"), "nf4 keeps its scales in float16 or float32, not in e8m0"),
    ],
)
def test_codes_go_with_the_scales_of_the_table(code: str, scale: Scale, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Storage(code, scale)


def test_str_names_all_axes() -> None:
    pairs = itertools.product((model_dtype(), uint(4, 32)), repeat=2)
    texts = [str(CacheLayout(keys, values)) for keys, values in pairs]
    assert texts[0] == "model · contiguous · full"
    assert texts[1] == "K model, V int4/g32 · contiguous · full"


@pytest.mark.parametrize(
    ("kept", "seen", "exact"), [(8, 8, True), (9, 8, True), (7, 8, False), (8, None, False)]
)
def test_a_window_is_exact_where_the_model_sees_no_more(kept: int, seen: int | None, exact: bool) -> None:
    mask = MaskSpec("causal") if seen is None else MaskSpec("sliding", seen)
    assert Window(kept).exact(mask)[0] == exact
