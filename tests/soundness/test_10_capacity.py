"""Cause 10: counting over batch x sequence was taken for a router's sort."""

from __future__ import annotations

import pytest

from tests.soundness.checks import exact, held, mixed, refused

MIX = "mix|row|batch|capacity|cum|tokens|sequence"


@pytest.mark.few(2)
@pytest.mark.parametrize("most", [5, 40, 100, 200, 300])
def test_capacity_over_batch_and_sequence(most: int) -> None:
    refused(mixed("capacity", most), MIX)


@pytest.mark.parametrize("most", [40, 200])
def test_capacity_in_the_block(most: int) -> None:
    refused(mixed("capacity", most, in_block=True), MIX)


@pytest.mark.few(2)
@pytest.mark.parametrize("most", [5, 40, 100, 200])
def test_capacity_of_a_row(most: int) -> None:
    """A count that goes on could be carried."""
    held(mixed("capacity of a row", most), MIX)


@pytest.mark.parametrize("k", [1, 2])
def test_experts_without_capacity(k: int) -> None:
    exact(mixed("experts", k))


def test_tokens_sorted_by_expert_and_put_back() -> None:
    held(mixed("sorted experts"), "sort|mix|row|batch|index")
