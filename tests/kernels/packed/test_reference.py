"""`cached_attention_packed` by the reference: what each sequence gives alone, over layouts and divisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from kvcompile.kernels.ops.cached_attention_packed import cached_attention_packed
from kvcompile.layouts import CacheLayout, Paged
from tests.support.packed import Packed, check, packed
from tests.support.triton_attention import Case


@settings(deadline=None, max_examples=60)
@given(one=packed())
def test_any_site_in_any_steps(one: Packed) -> None:
    check(one, "reference")


PLAIN = Case(CacheLayout(placement=Paged(8)), (4, 2), chunks=(24,), pads=(0, 0, 0))


def test_sequences_by_themselves_give_the_same_bits() -> None:
    """Without sequences that come first, every call is that of a sequence alone."""
    steps = (((0, 8), (1, 9), (2, 1)), ((2, 7), (0, 1), (1, 1)), ((1, 1), (0, 15), (2, 1)))
    check(Packed(PLAIN, steps, (0, 0, 0)), "reference", exact=True)


def test_heads_of_a_token_stand_side_by_side() -> None:
    """What follows attention takes the result as it lies."""
    out = call()
    assert out.shape == (1, 4, 5, 16) and out.transpose(1, 2).is_contiguous()


def call(**changed: Any) -> torch.Tensor:
    """One step of three sequences: two that decode, one with a chunk of 3."""
    q, k, v = (x[:1, :, :5] for x in PLAIN.qkv())
    x = {
        "positions": torch.tensor([[4, 2, 0, 1, 2]]),
        "query_start_loc": torch.tensor([0, 1, 2, 5]),
        "seq_lens": torch.tensor([4, 2, 0]),
        "num_decodes": 2,
        "max_query_len": 3,
    } | changed
    pools = [torch.zeros(4, 2, 8, 16) for _ in range(2)]
    return cached_attention_packed(
        q,
        k,
        v,
        pools,
        x["positions"],
        x["query_start_loc"],
        x["seq_lens"],
        [],
        x["num_decodes"],
        x["max_query_len"],
        5,
        replace(PLAIN.site).to_json(),
        page_table=torch.tensor([[1], [2], [3]], dtype=torch.int32),
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"query_start_loc": torch.tensor([0, 1, 2, 4])},
            "query_start_loc: expected it to rise from 0 to the 5",
        ),
        (
            {"query_start_loc": torch.tensor([1, 1, 2, 5])},
            "query_start_loc: expected it to rise from 0 to the 5",
        ),
        (
            {"query_start_loc": torch.tensor([0, 2, 1, 5])},
            "query_start_loc: expected it to rise from 0 to the 5",
        ),
        ({"max_query_len": 2}, "steps of at most max_query_len = 2"),
        ({"num_decodes": 3}, "num_decodes: 3 sequences shall have one new token each"),
    ],
)
def test_numbers_that_do_not_fit(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call(**changed)
