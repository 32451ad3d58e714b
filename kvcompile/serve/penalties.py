"""Penalties: logits of tokens that came before become smaller (or larger).

    repetition  x < 0: x * penalty, else x / penalty; tokens of prompt and text
    presence    x - penalty; tokens of the text
    frequency   x - penalty * how often it came; tokens of the text

Source: transformers' RepetitionPenaltyLogitsProcessor; presence and frequency as OpenAI's API defines them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcompile.serve.choose import Row
from kvcompile.serve.sampling import Sampling


class Penalties:
    """What came before, each token once: a step costs what differs, not what is long."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]):
        self._sampling = sampling
        seen = np.unique(np.asarray(prompt, np.int64))
        self._place = {int(token): place for place, token in enumerate(seen)}
        self._tokens = seen
        self._counts = np.zeros(len(seen))  # in the text

    def took(self, token: int) -> None:
        """Count a token of the text."""
        place = self._place.setdefault(token, len(self._place))
        if place >= len(self._tokens):
            more = max(16, place)
            self._tokens = np.concatenate([self._tokens, np.zeros(more, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(more)])
        self._tokens[place] = token
        self._counts[place] += 1

    def forked(self) -> Penalties:
        """Another text's, with the same past."""
        other = object.__new__(Penalties)
        other._sampling = self._sampling
        other._place = self._place.copy()
        other._tokens, other._counts = self._tokens.copy(), self._counts.copy()
        return other

    def apply(self, row: Row) -> None:
        """Change the logits of one row, [V] float32, in place."""
        used, sampling = len(self._place), self._sampling
        tokens, counts = self._tokens[:used], self._counts[:used]
        values = row[tokens]
        with np.errstate(over="ignore"):
            if sampling.repetition_penalty != 1:
                by = np.float32(sampling.repetition_penalty)
                values = np.where(values < 0, values * by, values / by)
            if sampling.presence_penalty or sampling.frequency_penalty:
                off = sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts
                values = values - off.astype(np.float32)
        row[tokens] = values
