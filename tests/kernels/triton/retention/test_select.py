"""Which tokens stay after a pass over many: `stay.py` against a loop over tokens, and what it promises."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.kernels.shared.retention import held_in, ranks
from kvcompile.kernels.triton.retention.select import staying
from kvcompile.layouts import Scored

H2O = Scored(2, 3, 2)
RETENTIONS = (
    H2O,
    replace(H2O, score="mean_age"),
    Scored(0, 5, 1, "tova", "last"),
    Scored(0, 3, 3, "snapkv", "vote", rows=3, smooth=3),
    Scored(1, 0, 4),
)
UNIT = 0.75  # of scores: float32 holds sums of them, and their means over three


def by_hand(before: dict[int, float], gained: dict[int, float], retention: Scored) -> dict[int, float]:
    """Tokens that stay, with their scores, of those that were there and of `gained`, which has the new ones too."""
    last, order = max(gained), sorted(gained)
    if retention.score == "vote":
        votes = [gained[t] if t <= last - retention.recent else 0.0 for t in order]
        half = retention.smooth // 2
        means = [sum(votes[max(i - half, 0) : i + half + 1]) / retention.smooth for i in range(len(votes))]
        after = {
            t: 1 + mean if t <= last - retention.recent else 0.0 for t, mean in zip(order, means, strict=True)
        }
    elif retention.score == "last":
        after = gained
    else:
        after = {t: before.get(t, 0.0) + gain for t, gain in gained.items()}
    ages = {t: last + 1 - t if retention.score == "mean_age" else 1 for t in order}
    may_go = [t for t in order if retention.sinks <= t <= last - retention.recent]
    may_go.sort(key=lambda t: (after[t] / ages[t], t))  # of equals the oldest goes
    gone = may_go[: max(len(order) - retention.tokens, 0)]
    return {t: score for t, score in after.items() if t not in gone}


def state(retention: Scored, lengths: list[int], heads: int, levels: int, g: torch.Generator) -> list[Tensor]:
    """Token and score of each slot after `lengths` tokens: any that may be there, in any order once all are taken."""
    slots = retention.tokens
    token = torch.full((len(lengths), heads, slots), 99, dtype=torch.int32)
    for row, length in zip(token, lengths, strict=True):
        for own in row:
            must = {*range(min(retention.sinks, length)), *range(max(length - retention.recent, 0), length)}
            others = [t for t in range(length) if t not in must]
            more = torch.randperm(len(others), generator=g)[: min(slots, length) - len(must)].tolist()
            held = sorted([*must, *(others[i] for i in more)])
            order = torch.randperm(slots, generator=g).tolist() if len(held) == slots else range(len(held))
            own[: len(held)] = torch.tensor([held[i] for i in order], dtype=torch.int32)
    return [token, torch.randint(0, levels, token.shape, generator=g) * UNIT]


@settings(max_examples=80, deadline=None)
@given(
    retention=st.sampled_from(RETENTIONS),
    lengths=st.lists(st.integers(0, 14), min_size=1, max_size=3),
    new=st.integers(2, 12),
    pad=st.integers(0, 3),
    heads=st.sampled_from((1, 2)),
    levels=st.sampled_from((1, 2, 1000)),
    seed=st.integers(0, 999),
)
def test_those_stay_that_the_rules_say(
    retention: Scored, lengths: list[int], new: int, pad: int, heads: int, levels: int, seed: int
) -> None:
    """With many equal scores, slots that are free, and padding before the first tokens."""
    g = torch.Generator().manual_seed(seed)
    token, score = state(retention, lengths, heads, levels, g)
    slots, before = retention.tokens, torch.tensor(lengths)
    # Padding stands before the first tokens only.
    first = before - torch.where(before == 0, pad, 0)
    positions = first[:, None] + torch.arange(new)
    gained = torch.randint(0, levels, (len(lengths), heads, slots + new), generator=g) * UNIT
    to, scores, tokens = staying(token, score, gained, positions, before[:, None], retention)
    assert (to.dtype, tokens.dtype) == (torch.int32, torch.int32)

    held = torch.where(torch.arange(slots) < before[:, None, None], token.long(), -1)
    own = torch.where(positions < 0, -1, positions)[:, None].expand(-1, heads, -1)
    every = torch.cat([held, own], 2)
    for row, length in enumerate((positions[:, -1] + 1).clamp(min=0).tolist()):
        count = min(length, slots)
        for head in range(heads):
            mine = dict(
                zip(tokens[row, head, :count].tolist(), scores[row, head, :count].tolist(), strict=True)
            )
            gains = dict(zip(every[row, head].tolist(), gained[row, head].tolist(), strict=True))
            old = dict(zip(held[row, head].tolist(), score[row, head].tolist(), strict=True))
            gains.pop(-1, None)
            assert mine == (by_hand(old, gains, retention) if gains else {})
            # Who was there keeps its slot; new ones go where they are then found.
            kept = [slot for slot, t in enumerate(held[row, head].tolist()) if t >= 0 and t in mine]
            assert torch.equal(tokens[row, head, kept].long(), held[row, head, kept])
            for at, slot in zip(positions[row].tolist(), to[row, head].tolist(), strict=True):
                assert (slot >= 0) == (at >= 0 and at in mine)
                assert slot < 0 or int(tokens[row, head, slot]) == at


def test_of_equals_the_oldest_goes() -> None:
    retention = Scored(1, 2, 1)
    token = torch.tensor([[[0, 3, 1, 2]]], dtype=torch.int32)
    gained = torch.ones(1, 1, 6)
    to, _, tokens = staying(
        token, torch.zeros(1, 1, 4), gained, torch.tensor([[4, 5]]), torch.tensor([[4]]), retention
    )
    # 1 and 2 go, in the order of their slots; 4 and 5 come, in theirs.
    assert tokens.tolist() == [[[0, 3, 4, 5]]] and to.tolist() == [[[2, 3]]]


def test_a_place_is_counted_over_what_is_kept() -> None:
    token = torch.tensor([[[5, 0, 9, 2], [7, 7, 3, 8]]], dtype=torch.int32)
    assert ranks(held_in(token, torch.tensor([12]))).tolist()[0][0] == [2, 0, 3, 1]
    found = ranks(held_in(token, torch.tensor([2])))[0, :, :2]  # what stands in the other slots means nothing
    assert found[0].tolist() == [1, 0] and sorted(found[1].tolist()) == [0, 1]
