"""Prompts over caches that keep tokens in full beside codes, or that another site writes: all slots are decoded to rows
once, and what each query reads is what it would read of the slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.kernels.reference.residual import decode_settled
from kvcompile.kernels.triton.host import decoded_once, ops_rows, over_rows
from kvcompile.kernels.triton.host.launches import launches
from kvcompile.kernels.triton.spec import ROWS, KernelSpec
from kvcompile.layouts import (
    AllTokens,
    CacheLayout,
    Full,
    Paged,
    Window,
    fp8,
    int8,
    model_dtype,
    nf4,
    per_channel,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.specs import BiasSpec, MaskSpec, RotaryForm, ScoreSpec
from tests.support.kernel_specs import H200, SHAPES, recipe_layouts
from tests.support.new_memory import nonsense_in_new_memory  # noqa: F401  (a fixture)
from tests.support.triton_attention import Case, cases, check
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

Decoded = tuple[int, Tensor, list[Tensor], list[Tensor]]  # rows, positions, the cache, what was made of it
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
# A text that begins, a step, one that goes on across groups, and a chunk that is within a tile.
CHUNKS = (21, 1, 18, 5)
HELD = [21, 40, 45]  # after each call of many tokens
KIVI = CacheLayout(per_channel(4, 8, 16), with_residual(uint(4, 8), 16))
PLAIN = Case(KIVI, dtype=torch.bfloat16, chunks=CHUNKS, pads=(0, 7, 30))
CASES = {
    "kivi, 4 bits": PLAIN,
    "2 bits, of float16": replace(
        PLAIN, layout=CacheLayout(per_channel(2, 8, 8), with_residual(uint(2, 8), 8)), dtype=torch.float16
    ),
    "sinks as well": replace(
        PLAIN, layout=CacheLayout(per_channel(4, 8, 16, sinks=3), with_residual(int8(), 5, 2))
    ),
    "keys alone": replace(PLAIN, layout=CacheLayout(per_channel(3, 4, 8), model_dtype()), dims=(16, 24)),
    "values alone": replace(PLAIN, layout=CacheLayout(model_dtype(), with_residual(fp8(), 9)), heads=(4, 2)),
    "more values in full than keys": replace(
        PLAIN, layout=CacheLayout(per_channel(4, 8, 8), with_residual(int8(), 32))
    ),
    "turned": replace(
        PLAIN,
        layout=CacheLayout(
            with_residual(with_hadamard(nf4(8)), 5), with_hadamard(with_residual(int8(), 0, 2))
        ),
        dims=(16, 24),
    ),
    "in pages": replace(PLAIN, layout=replace(KIVI, placement=Paged(16))),
    "in pages of one group": replace(PLAIN, layout=replace(KIVI, placement=Paged(8)), dtype=torch.float16),
    "alibi and a softcap": replace(PLAIN, score=ScoreSpec(softcap=5.0, bias=BiasSpec("alibi"))),
    "sink logits": replace(PLAIN, score=ScoreSpec(sinks=True)),
    "RoPE": replace(PLAIN, rotary=RotaryForm("half", 0, 16)),
}


def in_order(buffers: list[Tensor], spec: str, table: Tensor | None, _: Any) -> list[Tensor]:
    """Copies of the buffers, their slots in the order of tokens."""
    own = KernelSpec.from_json(spec)
    sizes = own.layout.buffers(own.num_kv_heads, own.head_dim, own.v_head_dim, own.torch_dtype, 1)
    return [
        x[table.long()].transpose(1, 2).flatten(2, 3) if size.paged and table is not None else x.clone()
        for x, size in zip(buffers, sizes, strict=True)
    ]


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Decoded]:
    """What is decoded to rows, call by call; any number of tiles of queries is enough for it."""
    found: list[Decoded] = []
    plain = ops_rows.decoded_rows

    def watching(
        buffers: list[Tensor], positions: Tensor, decoded: int, spec: str, *where: Any
    ) -> list[Tensor]:
        outs: list[Tensor] = plain(buffers, positions, decoded, spec, *where)
        found.append((decoded, positions, in_order(buffers, spec, *where), outs))
        return outs

    monkeypatch.setattr(ops_rows, "decoded_rows", watching)
    monkeypatch.setattr(decoded_once, "LEAST_TILES", 0)
    monkeypatch.setattr(over_rows, "ONE_GROUP_TILES", 0)
    return found


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Decoded]:
    return watched(monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_queries_read_rows_and_tokens_in_full(name: str, rows: list[Decoded]) -> None:
    check(CASES[name])
    assert [count for count, *_ in rows] == HELD  # a step reads slots


@pytest.mark.parametrize("most", [decoded_once.MOST, 0], ids=["rows", "slots"])
@pytest.mark.parametrize("name", ["kivi, 4 bits", "sink logits", "in pages"])
def test_where_a_graph_leaves_it_open_one_of_two_launches_ends_at_once(
    name: str, most: int, rows: list[Decoded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two have one result to write: NaN, until either has."""
    monkeypatch.setattr(decoded_once, "is_known", lambda _: False)
    monkeypatch.setattr(decoded_once, "MOST", most)
    check(CASES[name])
    assert [count for count, *_ in rows] == (HELD if most else [0, 0, 0])


@pytest.mark.parametrize("name", CASES)
def test_rows_are_what_is_read_of_the_slots(name: str, rows: list[Decoded]) -> None:
    """Bit for bit, of all that any query reads so; of slots that hold no token nothing is written."""
    case = replace(CASES[name], chunks=(24, 13), pads=(0, 3))
    check(case)
    assert [count for count, *_ in rows] == [24, 37]
    layout = case.layout
    for count, positions, buffers, decoded in rows:
        held = positions[:, -1] + 1
        split = layout.num_key_parts
        for storage, parts, got in (
            (layout.keys, buffers[:split], decoded[0]),
            (layout.values, buffers[split:], decoded[1]),
        ):
            # In the basis that the storage keeps.
            expected = decode_settled(storage.without_hadamard, parts, count, case.dtype)
            for row, length in enumerate(held.tolist()):
                settled = length - (length % storage.residual if storage.channelwise else storage.residual)
                own = slice(storage.sinks, max(storage.sinks, settled))
                assert torch.equal(got[row, :, own], expected[row, :, own])
                assert got[row, :, length:].isnan().all()


@settings(max_examples=25)
@given(cases(), st.sampled_from((torch.float16, torch.bfloat16)))
def test_any_site_reads_rows_as_it_reads_slots(case: Case, dtype: torch.dtype) -> None:
    layout = replace(case.layout, retention=Full(), selection=AllTokens(), before_rope=False)
    assume(layout.check() is None and layout.in_full and not layout.in_keys)
    case = replace(case, layout=layout, dtype=dtype, mask=MaskSpec("causal"))
    with pytest.MonkeyPatch.context() as patch:
        found = watched(patch)
        check(case)
    coded = any(side.element.kind != "float" for side in (layout.keys, layout.values))
    assert len(found) == (sum(chunk > 1 for chunk in case.chunks) if coded else 0)


def roles(layout: CacheLayout, tokens: int, shape: str = "llama") -> list[str]:
    return [one.spec.role for one in SHAPES[shape].kernels(layout, H200, tokens)]


def test_for_whom_rows_are_made() -> None:
    """From eight tiles of queries of a head on, as for codes of single tokens; in the dtypes that have such tiles."""
    kivi = recipe_layouts("kivi4")["causal"]
    least = 8 * 64 // 4
    slots, made = (
        ["append", "group", "prefill", "append"],
        ["append", "group", "decoded_rows", "prefill", "append"],
    )
    assert roles(kivi, least) == made and roles(kivi, least - 1) == slots
    (one,) = (one.spec for one in SHAPES["llama"].kernels(kivi, H200, least) if one.spec.role == "prefill")
    assert one.options == (ROWS,) and one.layout == kivi
    assert roles(replace(kivi, placement=Paged(64)), least) == made
    # Of 2 bits from the first tile on: 16 queries of slots.
    two = recipe_layouts("kivi2")["causal"]
    assert roles(two, 4) == made and roles(two, 3) == slots
    assert roles(replace(kivi, before_rope=True), least) == slots
    wide = replace(SHAPES["llama"], dtype="float32")
    assert [found.spec.role for found in wide.kernels(kivi, H200, least)] == slots
    for layout in (
        CacheLayout(),
        CacheLayout(int8(), int8(), retention=Window(64)),
        CacheLayout(with_residual(model_dtype(), 32), with_residual(model_dtype(), 32)),
    ):
        assert "decoded_rows" not in roles(layout, least), layout


def test_sites_that_read_the_codes_of_another_read_rows() -> None:
    """They have no new tokens of their own that an append would decode."""
    site = SHAPES["llama"].site(CacheLayout(int8(), int8()))

    def of(share: str, tokens: int) -> list[str]:
        own = replace(site, share=share)  # type: ignore[arg-type]
        found = launches(own, (32, 8), (128, 128), torch.bfloat16, H200, tokens)
        return [one.spec.role for one in found]

    assert of("middle", 128) == of("last", 128) == ["decoded_rows", "prefill"]
    assert of("middle", 64) == ["prefill"]
