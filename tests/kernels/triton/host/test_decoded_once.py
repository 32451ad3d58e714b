"""Prompts over codes: new tokens are decoded once, those before are read as they stand, and together they are one
softmax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvcompile.kernels.reference.codec import as_stored
from kvcompile.kernels.triton.host import ops_write
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
from tests.support.triton_attention import Case, check
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

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


@pytest.fixture(autouse=True)
def nonsense_in_new_memory() -> Iterator[None]:
    """What nobody has written is NaN: the result over no older tokens, above all."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.mark.parametrize("name", CASES)
def test_two_launches_are_one_softmax(name: str) -> None:
    check(CASES[name])


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
    twice = ["append", "prefill", "prefill"]
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


def test_sites_that_read_the_cache_of_another_read_codes() -> None:
    """They have no new tokens of their own to decode, and the first of them decodes for itself."""
    site = SHAPES["llama"].site(CacheLayout(int8(), int8()))

    def of(share: str) -> list[str]:
        found = launches(replace(site, share=share), (32, 8), (128, 128), torch.bfloat16, H200, 64)  # type: ignore[arg-type]
        return [one.spec.role for one in found]

    assert of("middle") == of("last") == ["prefill"] and of("first") == ["append", "prefill", "prefill"]
