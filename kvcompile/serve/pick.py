"""From the logits of a step to one token for each of its rows.

`pick` changes nothing: what a text has seen changes by `Picker.took` alone, so a step may be picked again, without the
rows that were refused. A draw is a number in [0, 1) made from the text's seed, its index and how many tokens it has:
it comes out the same whatever runs beside it, after a preemption, and on another machine.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvcompile.errors import LogitsError, ServeError
from kvcompile.serve.choose import Row, choose, likeliest, log_total
from kvcompile.serve.penalties import Penalties
from kvcompile.serve.request import TokenLogprob
from kvcompile.serve.sampling import Sampling


class Matcher(Protocol):
    """What a structure allows next (kvcompile/serve/structure.py)."""

    def mask(self, row: Row) -> None:
        """Set the logits of what is not allowed to -inf."""

    def took(self, token: int) -> None: ...

    def forked(self) -> Matcher: ...


class Picker:
    """What the choice of a text's next token depends on, beside its logits."""

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        index: int,
        device: torch.device | str = "cpu",
        matcher: Matcher | None = None,
    ):
        self.sampling = sampling
        self.device = torch.device(device)
        self._seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._index = index
        self._taken = 0
        self._penalties = Penalties(sampling, prompt) if sampling.penalizes else None
        self._matcher = matcher

    @property
    def plain(self) -> bool:
        """Whether the likeliest token is all that is asked for."""
        return self.sampling.greedy and self._penalties is None and self._matcher is None

    def took(self, token: int) -> None:
        """Note the token that the text goes on with."""
        self._taken += 1
        if self._penalties is not None:
            self._penalties.took(token)
        if self._matcher is not None:
            self._matcher.took(token)

    def forked(self, index: int) -> Picker:
        """The picker of another text with the same past, and a seed of its own."""
        other = object.__new__(Picker)
        other.__dict__.update(self.__dict__)
        other._index = index
        other._penalties = self._penalties and self._penalties.forked()
        other._matcher = self._matcher and self._matcher.forked()
        return other

    def changed(self, row: Row) -> Row:
        """The row with masks and penalties, itself where there are none: [V] float32."""
        if self._matcher is None and self._penalties is None:
            return row
        row = row.copy()
        if self._matcher is not None:
            self._matcher.mask(row)
        if self._penalties is not None:
            self._penalties.apply(row)
        return row

    def uniform(self) -> float:
        """The number in [0, 1) that draws the next token, of 53 random bits."""
        past = struct.pack("<qqq", self._seed, self._index, self._taken)
        word = hashlib.blake2b(past, digest_size=8, person=b"kvcompile.pick").digest()
        return float((int.from_bytes(word, "little") >> 11) * 2.0**-53)


@dataclass(frozen=True)
class Picked:
    """One token a row, and its log-probabilities where they were asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprob | None]


def pick(logits: Tensor, pickers: Sequence[Picker]) -> Picked:
    """Choose a token for every row.

    Args:
        logits:  [B, V] of any float dtype, on any device; computed with as float32, and not changed
        pickers: of the B rows

    Raises:
        LogitsError: rows with NaN, +inf or nothing to choose; `error.rows` are all of them, and no picker has changed.
    """
    if logits.dim() != 2 or logits.shape[0] != len(pickers):
        raise ValueError(f"expected logits of {len(pickers)} rows, got the shape {list(logits.shape)}")
    if not pickers:
        return Picked([], [])
    if logits.shape[1] == 0:
        raise LogitsError(dict.fromkeys(range(len(pickers)), "it has no entries"))
    closer = [i for i, p in enumerate(pickers) if not (p.plain and p.sampling.logprobs is None)]
    tokens, tops, rows = _on_host(logits.detach(), closer)
    wrong = {i: f"their largest is {top}" for i, top in enumerate(tops) if not math.isfinite(top)}
    logprobs: list[TokenLogprob | None] = [None] * len(pickers)
    for i, raw in zip(closer, rows, strict=True):
        if i in wrong:
            continue
        picker, best = pickers[i], tops[i]
        if not picker.plain:
            try:
                row = picker.changed(raw)
            except ServeError as error:
                wrong[i] = str(error)
                continue
            top = best if row is raw else float(row.max())
            if not math.isfinite(top):
                wrong[i] = f"their largest is {top} after masks and penalties"
                continue
            if picker.sampling.greedy:
                tokens[i] = int(row.argmax())
            else:
                tokens[i] = choose(row, top, picker.sampling, picker.uniform())
        if picker.sampling.logprobs is not None:
            logprobs[i] = _logprob(raw, best, tokens[i], picker.sampling.logprobs)
    if wrong:
        raise LogitsError(wrong)
    return Picked(tokens, logprobs)


def _on_host(logits: Tensor, closer: list[int]) -> tuple[list[int], list[float], Sequence[Row]]:
    """The first largest entry of every row, its value (NaN where there is one), and whole rows of those in `closer`."""
    if logits.device.type == "cpu":
        rows = logits.float().numpy()
        places = rows.argmax(-1)
        return (
            places.tolist(),
            rows[np.arange(len(rows)), places].tolist(),
            [np.ascontiguousarray(rows[i]) for i in closer],
        )
    return _from_device(logits, closer)


def _from_device(logits: Tensor, closer: list[int]) -> tuple[list[int], list[float], Sequence[Row]]:
    """As `_on_host`: only the largest entries are copied, and rows that are looked at more closely."""
    largest = logits.argmax(-1, keepdim=True)
    tops = logits.gather(-1, largest).double()
    found = torch.cat([largest.double(), tops], -1).cpu()  # one transfer; ids are exact
    whole = list(logits[closer].float().cpu().numpy())
    return [int(i) for i in found[:, 0].tolist()], found[:, 1].tolist(), whole


def _logprob(row: Row, best: float, token: int, count: int) -> TokenLogprob:
    total = log_total(row, best)
    top = likeliest(row, best, count) if count else ()
    return TokenLogprob(token, float(row[token]) - total, tuple((int(i), float(row[i]) - total) for i in top))
