"""What the decoder returns, and habits of its forward that are beside attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.expressions import Context
from tests.fuzz.parts import NONE, Rule


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


torch.utils._pytree.register_dataclass(Output, serialized_type_name="tests.fuzz.Output")


def head(c: Context, x: Tensor) -> Tensor:
    return x @ c.model.weight("head", x.shape[-1], c.model.spec.vocab, gain=x.shape[-1] ** -0.5)


def tied(c: Context, x: Tensor) -> Tensor:
    """The embedding's table is the head, where it has a row for each id."""
    whole = c.model.spec.embedding.name not in ("hashed", "split tables", "wrapped")
    weight = c.model.weight("embedding" if whole else "whole", c.model.spec.vocab, x.shape[-1])
    return x @ weight.mT * x.shape[-1] ** -0.5


def capped(c: Context, x: Tensor) -> Tensor:
    return 3 * torch.tanh(head(c, x) / 3)


def biased(c: Context, x: Tensor) -> Tensor:
    """Special tokens are never predicted."""
    banned = torch.arange(c.model.spec.vocab) == c.model.spec.special.pad
    return head(c, x).masked_fill(banned, -9.0)


def less_seen(c: Context, x: Tensor) -> Tensor:
    """A penalty for ids that stand in the text: every token's, then the future's too."""
    seen = torch.zeros(c.ids.shape[0], c.model.spec.vocab, dtype=x.dtype).scatter_add(
        1, c.ids, torch.ones_like(c.ids, dtype=x.dtype)
    )
    return head(c, x) - seen[:, None] * 0.01


def less_seen_before(c: Context, x: Tensor) -> Tensor:
    """The same with what came before only."""
    seen = torch.nn.functional.one_hot(c.ids, c.model.spec.vocab).to(x.dtype).cumsum(1)
    return head(c, x) - seen * 0.05


def by_length(c: Context, x: Tensor) -> Tensor:
    return head(c, x) * (c.n / 100)


def over_tokens(c: Context, x: Tensor) -> Tensor:
    return head(c, x).softmax(1)


OUTPUTS: dict[str, Rule] = {
    "logits": Rule(head, weight=12),
    "tied": Rule(tied, weight=3),
    "capped": Rule(capped, weight=2),
    "banned ids": Rule(biased, weight=1),
    "log-probabilities": Rule(lambda c, x: head(c, x).log_softmax(-1), weight=1),
    "float32": Rule(lambda c, x: head(c, x).float(), weight=1),
    "a tuple": Rule(lambda c, x: (head(c, x), x), weight=1),
    "a dictionary": Rule(lambda c, x: {"logits": head(c, x)}, weight=1),
    "a dictionary, hidden first": Rule(lambda c, x: {"hidden": x, "logits": head(c, x)}, weight=1),
    "a record": Rule(lambda c, x: Output(head(c, x), x), weight=1),
    "with no loss": Rule(lambda c, x: (head(c, x), None), weight=1),
    "the last token's": Rule(lambda c, x: head(c, x[:, -1:]), weight=1),
    "the last token's, flat": Rule(lambda c, x: head(c, x[:, -1]), weight=1),
    "states": Rule(lambda c, x: x, weight=1, held=None),
    "a mean": Rule(lambda c, x: head(c, x.mean(1)), weight=0.5, held=None),
    "less what is seen": Rule(less_seen, weight=0.5, held=False),
    "less what was seen": Rule(less_seen_before, weight=0.5, held=None),
    "by length": Rule(by_length, weight=0.5, held=None),
    "softmax over tokens": Rule(over_tokens, weight=0.5, held=False),
}


def logits_of(out: Any) -> Tensor:
    """The tensor to compare by: the logits."""
    if isinstance(out, Tensor):
        return out
    if isinstance(out, tuple):
        return out[0]
    return out["logits"] if isinstance(out, dict) else out.logits


# Habits: of the forward as a whole. (c, x) -> x after the embedding.


def vocabulary(c: Context, x: Tensor) -> Tensor:
    """A long dictionary that is only read."""
    return x * (c.model.words["word 3"] / 2)


def counter(c: Context, x: Tensor) -> Tensor:
    """A buffer that counts calls changes what is computed."""
    c.model.calls.add_(1)
    return x * (1 + 0.1 * c.model.calls.to(x.dtype))


def idle_counter(c: Context, x: Tensor) -> Tensor:
    c.model.calls.add_(1)
    return x


def token_counter(c: Context, x: Tensor) -> Tensor:
    """A buffer that counts tokens is the start of positions."""
    c.model.calls.add_(c.n)
    return x + torch.sin(c.model.calls.to(x.dtype) * 0.1)


def remembered(c: Context, x: Tensor) -> Tensor:
    """An attribute holds a tensor of the last call."""
    c.model.last = x[:, -1].detach()
    return x


def statistics(c: Context, x: Tensor) -> Tensor:
    """A running mean that is updated in evaluation, too."""
    c.model.mean.mul_(0.9).add_(x.detach().float().mean() * 0.1)
    return x - c.model.mean.to(x.dtype)


def in_place(c: Context, x: Tensor) -> Tensor:
    x = x.clone()
    x[..., :2] = x[..., :2].mul_(0.5)
    x += 0.1
    return x


def in_place_by_id(c: Context, x: Tensor) -> Tensor:
    x = x.clone()
    x[c.image()] = 0.5
    return x


def in_place_token(c: Context, x: Tensor) -> Tensor:
    """The first token of the text is set to zero."""
    x = x.clone()
    x[:, 0] = 0.0
    return x


HABITS: dict[str, Rule] = {
    NONE.name: Rule(lambda c, x: x, weight=14),
    "in place": Rule(in_place, weight=2),
    "in place by id": Rule(in_place_by_id, weight=1),
    "in place, one token": Rule(in_place_token, weight=1, held=None),
    "a vocabulary": Rule(vocabulary, weight=0.5),
    "an idle counter": Rule(idle_counter, weight=1, held=None),
    "a counter": Rule(counter, weight=1, held=False),
    "a counter of tokens": Rule(token_counter, weight=1, held=None),
    "an attribute": Rule(remembered, weight=1, held=None),
    "running statistics": Rule(statistics, weight=1, held=False),
    "autocast": Rule(lambda c, x: x, weight=2, held=None),
}
