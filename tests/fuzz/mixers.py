"""What mixes tokens or batch rows outside attention, and what only looks like it. x [B, S, W] -> [B, S, W]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.expressions import Context
from tests.fuzz.parts import NONE, Rule, nothing

SHIFTS = (1, 2, 3, 8, 15, 20, 33, 64, 100)
DILATIONS = (1, 2, 4, 8, 16, 32, 64)


def earlier(x: Tensor, steps: int) -> Tensor:
    return F.pad(x, (0, 0, steps, 0))[:, : x.shape[1]]


def shift(c: Context, x: Tensor, steps: int) -> Tensor:
    gate = c.weight("shift", x.shape[-1]).sigmoid()
    return x * gate + earlier(x, steps) * (1 - gate)


def part_shift(c: Context, x: Tensor, steps: int) -> Tensor:
    """A quarter of the channels comes from an earlier token."""
    some = x.shape[-1] // 4
    return torch.cat([earlier(x[..., :some], steps), x[..., some:]], -1)


def sliced(c: Context, x: Tensor, steps: int) -> Tensor:
    """Pad and slice from the other end."""
    return x + 0.5 * torch.cat([torch.zeros_like(x[:, :1]).expand(-1, steps, -1), x], 1)[:, :-steps]


def convolution(c: Context, x: Tensor, dilation: int, size: int) -> Tensor:
    width = x.shape[-1]
    weight = c.weight("conv", width, 1, size, gain=0.5)
    y = F.conv1d(F.pad(x.mT, ((size - 1) * dilation, 0)), weight, dilation=dilation, groups=width)
    return x + y.mT


def padded_convolution(c: Context, x: Tensor, dilation: int, size: int) -> Tensor:
    """The convolution pads both sides; the tail is cut off."""
    width = x.shape[-1]
    pad = (size - 1) * dilation
    y = F.conv1d(x.mT, c.weight("conv", width, width, size, gain=0.1), padding=pad, dilation=dilation)
    return x + y[..., : x.shape[1]].mT


def open_convolution(c: Context, x: Tensor) -> Tensor:
    return x + F.conv1d(x.mT, c.weight("conv", x.shape[-1], 1, 3), padding=1, groups=x.shape[-1]).mT


def running_mean(c: Context, x: Tensor) -> Tensor:
    return x + x.cumsum(1) / torch.arange(1, c.n + 1)[:, None]


def lower_triangle(c: Context, x: Tensor) -> Tensor:
    """A learned mix over earlier tokens, as in gMLP."""
    longest = c.model.longest
    weight = c.weight("mix", longest, longest, gain=0.05)[: c.n, : c.n].tril()
    return x + weight @ x


def ema(c: Context, x: Tensor) -> Tensor:
    """An exponential mean, written as a product with powers."""
    decay = 0.9 ** c.of("d.clamp(min=0)").to(x.dtype)
    return x + (decay * c.of("d >= 0") * 0.1) @ x


def squeeze(c: Context, x: Tensor) -> Tensor:
    return x * torch.sigmoid(c.linear("squeeze", x.shape[-1], x.mean(1, keepdim=True)))


def whole_amax(c: Context, x: Tensor) -> Tensor:
    """Scaled by the largest value of the whole input, as when a tensor is quantized."""
    return x / x.abs().amax() * 4


def whole_norm(c: Context, x: Tensor) -> Tensor:
    """Normed over tokens: the wrong dimension."""
    return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-3)


def batch_norm(c: Context, x: Tensor) -> Tensor:
    return F.batch_norm(x.flatten(0, 1), None, None, training=True).view_as(x)


def rows(c: Context, x: Tensor) -> Tensor:
    return x + 0.3 * x.mean(0, keepdim=True)


def first_row(c: Context, x: Tensor) -> Tensor:
    return x + 0.3 * x[:1]


def row_roll(c: Context, x: Tensor) -> Tensor:
    return x + 0.3 * x.roll(1, 0)


def capacity(c: Context, x: Tensor, most: int) -> Tensor:
    """Two experts that take so many tokens of batch x sequence, the first that come."""
    flat = x.flatten(0, 1)
    chosen = F.one_hot(c.linear("router", 2, flat).argmax(-1), 2)
    place = (chosen.cumsum(0) * chosen).sum(-1)
    out = torch.stack([c.linear(f"expert{e}", x.shape[-1], flat) for e in range(2)], 1)
    out = (out * chosen[..., None]).sum(1) * (place <= most)[:, None]
    return x + out.view_as(x)


def row_capacity(c: Context, x: Tensor, most: int) -> Tensor:
    """The same, counted in each row."""
    chosen = (c.linear("router", 1)[..., 0] > 0).long()
    return x + c.linear("expert", x.shape[-1], x) * ((chosen.cumsum(1) <= most) & (chosen > 0))[..., None]


def router(c: Context, x: Tensor, k: int) -> Tensor:
    """A mixture of experts without capacity: each token by itself."""
    weight, chosen = c.linear("router", 4, x).softmax(-1).topk(k, -1)
    out = torch.stack([c.linear(f"expert{e}", x.shape[-1], x) for e in range(4)], -2)
    return x + (out.gather(-2, chosen[..., None].expand(*chosen.shape, x.shape[-1])) * weight[..., None]).sum(
        -2
    )


def sorted_router(c: Context, x: Tensor) -> Tensor:
    """Tokens sorted by expert, computed, and put back."""
    flat = x.flatten(0, 1)
    order = c.linear("router", 3, flat).argmax(-1).argsort(stable=True)
    back = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0]))
    return x + c.linear("expert", x.shape[-1], flat[order])[back].view_as(x)


def token_choice(c: Context, x: Tensor, k: int) -> Tensor:
    """Expert choice: the best tokens of the text are computed, the others are not."""
    score = c.linear("worth", 1, x)[..., 0]
    kept = torch.zeros_like(score, dtype=torch.bool).scatter(1, score.topk(min(k, c.n), 1).indices, True)
    return x + torch.where(kept[..., None], c.linear("expert", x.shape[-1], x), 0.0)


def seen(c: Context, x: Tensor) -> Tensor:
    """Changed once a special token has been seen."""
    return x * torch.where(c.hidden().cumsum(1) > 0, 1.5, 1.0)[..., None]


def seen_max(c: Context, x: Tensor) -> Tensor:
    return x + x.cummax(1).values * 0.2


def any_special(c: Context, x: Tensor) -> Tensor:
    """Changed if a special token is anywhere in the text."""
    return x * torch.where(c.hidden().any(1, keepdim=True), 1.5, 1.0)[..., None]


def since_separator(c: Context, x: Tensor) -> Tensor:
    return x + torch.sin(c.since()[..., None] * 0.1)


def first_token(c: Context, x: Tensor) -> Tensor:
    return x + 0.3 * x[:, :1]


def last_token(c: Context, x: Tensor) -> Tensor:
    return x + 0.3 * x[:, -1:]


def late_first(c: Context, x: Tensor, start: int) -> Tensor:
    """The first token, added from a position on."""
    return x + torch.where(torch.arange(c.n)[:, None] >= start, 0.3, 0.0) * x[:, :1]


def bigram(c: Context, x: Tensor) -> Tensor:
    """A hash of this id and the last."""
    last = F.pad(c.ids, (1, 0))[:, :-1]
    return x + F.embedding((c.ids * 31 + last) % 97, c.weight("bigram", 97, x.shape[-1]))


def other_if_same(c: Context, x: Tensor) -> Tensor:
    """Changed where the token is the one before again."""
    same = F.pad(c.ids[:, 1:] == c.ids[:, :-1], (1, 0))
    return x * torch.where(same, 2.0, 1.0)[..., None]


def rare_shift(c: Context, x: Tensor, steps: int) -> Tensor:
    """An earlier token, only where the id is rare."""
    return torch.where(c.hidden()[..., None], earlier(x, steps), x)


def pooled(c: Context, x: Tensor) -> Tensor:
    """The mean of each group of four tokens so far."""
    size = c.n
    y = F.pad(x, (0, 0, 0, -size % 4)).unflatten(1, (-1, 4)).mean(2).repeat_interleave(4, 1)[:, :size]
    return x + y


def fourier(c: Context, x: Tensor) -> Tensor:
    return x + torch.fft.fft(x, dim=1).real * 0.05


def swapped(c: Context, x: Tensor) -> Tensor:
    """Reshaped over batch x sequence in a way that changes nothing."""
    return (
        c.linear("swap", x.shape[-1], x.transpose(0, 1).reshape(-1, x.shape[-1]))
        .view(c.n, -1, x.shape[-1])
        .transpose(0, 1)
    )


def double_flip(c: Context, x: Tensor) -> Tensor:
    return x.flip(1).tanh().flip(1)


def channel_mix(c: Context, x: Tensor) -> Tensor:
    return x * torch.sigmoid(x.mean(-1, keepdim=True)) + x.cumsum(-1) * 0.1


def hidden_by_id(c: Context, x: Tensor) -> Tensor:
    return x.masked_fill(c.hidden()[..., None], 0.0) + torch.where(c.image()[..., None], 0.5, 0.0)


def windows_of_rows(c: Context, x: Tensor) -> Tensor:
    """Folded into groups of ids of the vocabulary: a lookup by id, twice."""
    return (
        x
        + F.embedding(c.ids, c.weight("again", c.model.spec.vocab, x.shape[-1]))
        * torch.sigmoid(c.ids % 2)[..., None]
    )


def decay_by_loop(c: Context, x: Tensor) -> Tensor:
    """Powers of a triangle: after six doublings each token has seen 64."""
    for steps in (1, 2, 4, 8, 16, 32):
        x = x + 0.2 * earlier(x, steps)
    return x


def as_numbers(c: Context, x: Tensor) -> Tensor:
    return x + c.ids[..., None].to(x.dtype) / c.model.spec.vocab * c.weight("id_scale", x.shape[-1])


def less_least(c: Context, x: Tensor) -> Tensor:
    """An id's rank among those of the text."""
    return x + F.embedding(
        c.ids - c.ids.amin(1, keepdim=True), c.weight("ranks", c.model.spec.vocab, x.shape[-1])
    )


def rolled(c: Context, x: Tensor, steps: int) -> Tensor:
    """The last tokens come around to the first."""
    return x + 0.5 * x.roll(steps, 1)


def reversed_sum(c: Context, x: Tensor) -> Tensor:
    return x + x.flip(1).cumsum(1).flip(1) / 50


def unfolded(c: Context, x: Tensor, size: int) -> Tensor:
    """The mean of the last tokens, by windows."""
    return x + F.pad(x, (0, 0, size - 1, 0)).unfold(1, size, 1).mean(-1)


def normed_whole(c: Context, x: Tensor) -> Tensor:
    """One norm for the whole input."""
    return x / x.square().mean().sqrt()


def group_norm(c: Context, x: Tensor) -> Tensor:
    return F.group_norm(x.mT, 2).mT


def guard(c: Context, x: Tensor) -> Tensor:
    """A check that never applies, over everything."""
    return torch.where(x.isnan().any(), 0.0, x)


def resized(c: Context, x: Tensor) -> Tensor:
    half = F.avg_pool1d(F.pad(x.mT, (0, c.n % 2)), 2)
    return x + half.repeat_interleave(2, -1)[..., : c.n].mT


def weighted_pool(c: Context, x: Tensor) -> Tensor:
    return x + (c.linear("pool", 1, x).softmax(1) * x).sum(1, keepdim=True)


def differences(c: Context, x: Tensor) -> Tensor:
    return x + torch.diff(x, dim=1, prepend=x[:, :1])


def prepended(c: Context, x: Tensor) -> Tensor:
    """A state before the first token, cut off again: each token gets the one before."""
    start = c.weight("start", 1, 1, x.shape[-1]).expand(x.shape[0], -1, -1)
    return x + 0.5 * torch.cat([start, x], 1)[:, :-1]


def squared_rows(c: Context, x: Tensor) -> Tensor:
    """Attention without a softmax, written as two products."""
    k = c.linear("square", 8, x)
    return x + ((k @ k.mT) * c.of("d >= 0") / 100) @ x


def steps_of(*values: int):  # type: ignore[no-untyped-def]
    return lambda rng: (rng.choice(values),)


MIXERS: dict[str, Rule] = {
    NONE.name: Rule(lambda c, x: x, weight=20),
    "experts": Rule(router, steps_of(1, 2), 4),
    "channels": Rule(channel_mix, nothing, 3),
    "ids hide states": Rule(hidden_by_id, nothing, 3),
    "two lookups": Rule(windows_of_rows, nothing, 2),
    "sequence first": Rule(swapped, nothing, 2),
    "flipped twice": Rule(double_flip, nothing, 0.5, None),
    "sorted experts": Rule(sorted_router, nothing, 2, None),
    "shift": Rule(shift, steps_of(*SHIFTS), 2, None),
    "shift of some channels": Rule(part_shift, steps_of(*SHIFTS), 1, None),
    "pad and slice": Rule(sliced, steps_of(*SHIFTS), 1.5, None),
    "convolution": Rule(convolution, lambda rng: (rng.choice(DILATIONS), rng.choice((2, 3, 4))), 3, None),
    "convolution, padded": Rule(
        padded_convolution, lambda rng: (rng.choice(DILATIONS), rng.choice((2, 3))), 1, None
    ),
    "convolution, open": Rule(open_convolution, nothing, 1, False),
    "doubled shifts": Rule(decay_by_loop, nothing, 1, None),
    "running mean": Rule(running_mean, nothing, 1, None),
    "running maximum": Rule(seen_max, nothing, 1, None),
    "lower triangle": Rule(lower_triangle, nothing, 1, None),
    "exponential mean": Rule(ema, nothing, 1, None),
    "squeeze and excite": Rule(squeeze, nothing, 1, False),
    "the most of all": Rule(whole_amax, nothing, 1, False),
    "normed over tokens": Rule(whole_norm, nothing, 1, False),
    "batch norm": Rule(batch_norm, nothing, 1, False),
    "mean of rows": Rule(rows, nothing, 1, False),
    "first row": Rule(first_row, nothing, 0.5, False),
    "rolled rows": Rule(row_roll, nothing, 0.5, False),
    "capacity": Rule(capacity, steps_of(40, 100, 200, 300), 2, False),
    "capacity of a row": Rule(row_capacity, steps_of(40, 100, 200), 1, None),
    "expert choice": Rule(token_choice, steps_of(32, 64, 100, 200), 1, False),
    "once seen": Rule(seen, nothing, 1, None),
    "anywhere": Rule(any_special, nothing, 1, False),
    "since the separator": Rule(since_separator, nothing, 1, None),
    "first token": Rule(first_token, nothing, 1, None),
    "first token, late": Rule(late_first, steps_of(64, 100, 200), 1, None),
    "last token": Rule(last_token, nothing, 1, False),
    "bigrams": Rule(bigram, nothing, 1, None),
    "same as before": Rule(other_if_same, nothing, 1, None),
    "shift of rare ids": Rule(rare_shift, steps_of(1, 5, 20), 1, None),
    "groups of four": Rule(pooled, nothing, 1, False),
    "fourier": Rule(fourier, nothing, 0.5, False),
    "ids as numbers": Rule(as_numbers, nothing, 2),
    "ids less the least": Rule(less_least, nothing, 1, False),
    "rolled": Rule(rolled, steps_of(1, 20, 64), 1, False),
    "reversed sum": Rule(reversed_sum, nothing, 1, False),
    "unfolded": Rule(unfolded, steps_of(3, 40, 64), 1, None),
    "normed as a whole": Rule(normed_whole, nothing, 1, False),
    "group norm": Rule(group_norm, nothing, 1, False),
    "a guard": Rule(guard, nothing, 1, None),
    "groups of two": Rule(resized, nothing, 0.5, False),
    "weighted pool": Rule(weighted_pool, nothing, 1, False),
    "differences": Rule(differences, nothing, 1, None),
    "a state before": Rule(prepended, nothing, 1, None),
    "linear attention": Rule(squared_rows, nothing, 1, None),
}
