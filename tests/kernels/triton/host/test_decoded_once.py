"""Prompts over codes: new tokens are decoded once, those before are read as they stand or as rows of numbers, and
together they are one softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcompile.kernels.reference.codec import as_stored, decode
from kvcompile.kernels.triton.host import decoded_once, ops_rows, ops_write
from kvcompile.kernels.triton.host.launches import launches
from kvcompile.layouts import (
    CacheLayout,
    Contiguous,
    Paged,
    SinkWindow,
    Storage,
    TopPages,
    Window,
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
from kvcompile.specs import BiasSpec, MaskSpec, RotaryForm, ScoreSpec
from tests.support.kernel_specs import H200, SHAPES
from tests.support.new_memory import nonsense_in_new_memory  # noqa: F401  (a fixture)
from tests.support.triton_attention import Case, check
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

Decoded = tuple[int, Tensor, list[Tensor], list[Tensor]]  # rows, tokens held, the cache, what was made of it
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
# A text that begins, one that goes on, a step between, and a chunk that is within a tile.
CHUNKS = (21, 1, 18, 5)
PLAIN = Case(CacheLayout(int8(), int8()), dtype=torch.bfloat16, chunks=CHUNKS, pads=(0, 7, 30))
STORED = (
    int8(),
    uint(4),
    uint(4, 16),
    uint(3, 8),
    uint(2, 16),
    fp8(),
    fp8("e5m2"),
    fp8(scale="none"),
    fp8(scale="head"),
    nf4(16),
    mxfp4(),
    model_dtype(),
)
CASES = {
    "int8": PLAIN,
    "in pages": replace(PLAIN, layout=CacheLayout(int8(), int8(), Paged(8))),
    "in pages of groups": replace(PLAIN, layout=CacheLayout(uint(4, 8), nf4(8), Paged(16)), dims=(16, 24)),
    "sinks, which count once": replace(PLAIN, score=ScoreSpec(sinks=True)),
    "softcap": replace(PLAIN, score=ScoreSpec(softcap=5.0)),
    "alibi": replace(PLAIN, score=ScoreSpec(bias=BiasSpec("alibi"))),
    "a window, behind which some see no older token": replace(PLAIN, mask=MaskSpec("sliding", 9)),
    "chunks": replace(PLAIN, mask=MaskSpec("chunked", 16)),
    "keys alone are codes": replace(PLAIN, layout=CacheLayout(uint(4, 8), model_dtype()), heads=(4, 2)),
    "values alone are codes": replace(PLAIN, layout=CacheLayout(model_dtype(), fp8()), dims=(16, 24)),
    "turned": replace(PLAIN, layout=CacheLayout(with_hadamard(nf4(8)), with_hadamard(int8())), dims=(16, 24)),
    "turned values alone": replace(PLAIN, layout=CacheLayout(int8(), with_hadamard(mxfp4())), dims=(32, 32)),
    "RoPE, of float16": replace(PLAIN, rotary=RotaryForm("half", 0, 16), dtype=torch.float16),
}


@pytest.mark.parametrize("name", CASES)
def test_two_launches_are_one_softmax(name: str) -> None:
    check(CASES[name])


def as_rows(case: Case) -> bool:
    """Whether tokens before the new ones are decoded to rows, if there are enough tiles of queries."""
    return case.mask.window is None


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Decoded]:
    """What was decoded to rows, call by call; any number of tiles of queries is enough for it."""
    found: list[Decoded] = []
    plain = ops_rows.decoded_rows

    def watched(
        buffers: list[Tensor], positions: Tensor, decoded: int, spec: str, *where: Any
    ) -> list[Tensor]:
        outs: list[Tensor] = plain(buffers, positions, decoded, spec, *where)
        found.append((decoded, positions[:, 0], [x.clone() for x in buffers], outs))
        return outs

    monkeypatch.setattr(ops_rows, "decoded_rows", watched)
    monkeypatch.setattr(decoded_once, "LEAST_TILES", 0)
    return found


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if as_rows(case)])
def test_older_tokens_are_read_as_rows_of_numbers(name: str, rows: list[Decoded]) -> None:
    check(CASES[name])
    # Of the text that begins there are none, nor of a step.
    assert [count for count, *_ in rows] == [22, 40]


@pytest.mark.parametrize("most", [decoded_once.MOST, 0], ids=["rows", "slots"])
def test_where_a_graph_leaves_it_open_one_of_two_launches_ends_at_once(
    most: int, rows: list[Decoded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two have one result to write: NaN, until either has."""
    monkeypatch.setattr(decoded_once, "is_known", lambda _: False)
    monkeypatch.setattr(decoded_once, "MOST", most)
    check(CASES["sinks, which count once"])
    assert [count for count, *_ in rows] == ([0, 22, 40] if most else [0, 0, 0])


@pytest.mark.parametrize("storage", STORED, ids=str)
def test_rows_are_what_is_read_of_the_cache(storage: Storage, rows: list[Decoded]) -> None:
    """Bit for bit; of slots that hold no token nothing is written."""
    case = replace(PLAIN, layout=CacheLayout(storage, int8()), dims=(32, 32), chunks=(9, 6), pads=(0, 3))
    check(case)
    ((count, first, buffers, (keys, values)),) = rows
    assert count == 9 and first.tolist() == [9, 6]
    own = len(storage.parts(32, case.dtype))
    for kept, parts, got in ((storage, buffers[:own], keys), (int8(), buffers[own:], values)):
        # A calibrated scale is a head's, and has no slots.
        parts = [
            x if part.fixed else x[:, :, :count]
            for x, part in zip(parts, kept.parts(32, case.dtype), strict=True)
        ]
        expected = decode(kept, parts, case.dtype)
        for row, held in enumerate(first.tolist()):
            assert torch.equal(got[row, :, :held], expected[row, :, :held])
            assert got[row, :, held:].isnan().all()


@pytest.mark.parametrize("storage", STORED, ids=str)
def test_what_is_attended_to_is_what_is_read_of_the_cache(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: what the append decodes is what the reference reads of what it wrote."""
    found: list[tuple[Tensor, Tensor, list[Tensor]]] = []
    plain = ops_write.append

    def watched(*given: object) -> list[Tensor]:
        outs = plain(*given)
        if '"decoded"' in str(given[8]):
            found.append((given[1], outs[-2], given[3]))  # type: ignore[arg-type]
        return outs

    monkeypatch.setattr(ops_write, "append", watched)
    case = replace(PLAIN, layout=CacheLayout(storage, int8()), dims=(32, 32), chunks=(9, 6), pads=(0, 3))
    check(case)
    assert len(found) == 2
    for k, decoded, buffers in found:
        parts = buffers[: len(storage.parts(32, k.dtype))]
        expected = as_stored(storage, storage, k, parts)
        real = decoded.abs().sum((1, 3), keepdim=True) != 0  # of padding zeros are written
        assert real.any() and torch.equal(torch.where(real, expected, 0), decoded)


def roles(layout: CacheLayout, tokens: int, shape: str = "llama") -> list[str]:
    return [one.spec.role for one in SHAPES[shape].kernels(layout, H200, tokens)]


def test_who_reads_new_tokens_as_numbers() -> None:
    """Codes of single tokens, all of which stay; each other layout has the launches that it had."""
    twice = ["append", "prefill", "prefill"]  # and few tiles of queries, for which no rows are made
    for storage in (int8(), uint(4, 32), fp8(), with_hadamard(nf4(32))):
        for placement in (Contiguous(), Paged(64)):
            assert roles(CacheLayout(storage, storage, placement), 64) == twice
    assert roles(CacheLayout(model_dtype(), int8()), 64) == twice
    others = (
        CacheLayout(),
        CacheLayout(int8(), int8(), retention=Window(64)),
        CacheLayout(int8(), int8(), retention=SinkWindow(4, 64)),
        CacheLayout(with_residual(int8(), 32), int8()),
        CacheLayout(per_channel(4, 32, 32), int8()),
        CacheLayout(int8(), int8(), Paged(16), selection=TopPages(16, 8)),
        CacheLayout(int8(), int8(), before_rope=True),
    )
    for layout in others:
        assert roles(layout, 64).count("prefill") == 1, layout
    assert roles(CacheLayout(int8(), int8()), 64, "mla").count("prefill") == 1
    assert roles(CacheLayout(int8(), int8()), 1).count("decode") == 1
    wide = replace(SHAPES["llama"], dtype="float32")
    found = wide.kernels(CacheLayout(int8(), int8()), H200, 64)
    assert [one.spec.role for one in found] == ["append", "prefill"]


def test_for_whom_rows_are_made() -> None:
    """From eight tiles of queries of a head on, of slots in the order of tokens, where no window hides them; and for no
    more sequences than rows of a gibibyte have room for."""
    layout, rows = CacheLayout(int8(), int8()), ["append", "decoded_rows", "prefill", "prefill"]
    least = 8 * 64 // 4
    assert roles(layout, least) == rows and roles(layout, least - 1) == ["append", "prefill", "prefill"]
    assert roles(replace(layout, placement=Paged(64)), least) == rows

    def of(limit: int, window: int | None = None) -> list[str]:
        mask = MaskSpec("causal") if window is None else MaskSpec("sliding", window)
        site = replace(SHAPES["llama"].site(layout), mask=mask)
        found = launches(site, (32, 8), (128, 128), torch.bfloat16, H200, least, limit)
        return [one.spec.role for one in found]

    most = decoded_once.MOST // (2 * 8 * 256 * 2)  # slots of each of two sequences
    assert of(least + most) == rows and of(least + most + 1) == ["append", "prefill", "prefill"]
    assert of(4096, 2048) == ["append", "prefill", "prefill"]
    assert of(least) == ["append", "prefill", "prefill"]  # a text that begins, for certain


def test_sites_that_read_the_cache_of_another_read_codes() -> None:
    """They have no new tokens of their own to decode, and the first of them decodes for itself."""
    site = SHAPES["llama"].site(CacheLayout(int8(), int8()))

    def of(share: str) -> list[str]:
        found = launches(replace(site, share=share), (32, 8), (128, 128), torch.bfloat16, H200, 64)  # type: ignore[arg-type]
        return [one.spec.role for one in found]

    assert of("middle") == of("last") == ["prefill"] and of("first") == ["append", "prefill", "prefill"]
