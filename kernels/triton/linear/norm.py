"""The norm of a token that role linear takes before its norm, as options of its spec.

| option | norm |
|---|---|
| rms[eps] | n * (y / sqrt(mean(y^2) + eps)): RMSNorm |
| layer[eps] | n * (z / sqrt(mean(z^2) + eps)) + m of z = y - mean(y): LayerNorm |
| wide | RMSNorm rounds what it writes alone, and not what n multiplies as well; LayerNorm always does |
| one | wide: 1 + n multiplies, and not n |
| plain | without n |
| shift | LayerNorm with m |

Llama rounds twice, Gemma (1 + n) and OLMo once. All is in float32 between.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_KIND = re.compile(r"(rms|layer)\[(.+)\]")
# Words that go together, of each kind.
_WORDS: dict[str, tuple[frozenset[str], ...]] = {
    "rms": tuple(map(frozenset, ((), ("wide",), ("wide", "one"), ("plain",)))),
    "layer": tuple(map(frozenset, ((), ("shift",), ("plain",), ("plain", "shift")))),
}
WORDS = frozenset({"wide", "one", "plain", "shift"})


class NormForm(NamedTuple):
    """A norm. words: of `WORDS`"""

    eps: float
    layer: bool = False
    words: frozenset[str] = frozenset()

    @property
    def options(self) -> set[str]:
        return {f"{'layer' if self.layer else 'rms'}[{self.eps!r}]", *self.words}

    @property
    def tensors(self) -> tuple[str, ...]:
        """What it reads beside the token: of as many channels each."""
        return (
            *(("norm",) if "plain" not in self.words else ()),
            *(("shift",) if "shift" in self.words else ()),
        )

    @property
    def twice(self) -> bool:
        """Whether what n multiplies is rounded as well."""
        return not self.layer and not self.words & {"wide", "plain"}


def is_option(option: str) -> bool:
    return option in WORDS or _KIND.fullmatch(option) is not None


def norm_form(options: Iterable[str]) -> NormForm | None:
    """The norm of a spec's options; None: they have none.

    Raises:
        ValueError: options do not go together.
    """
    options = list(options)
    kinds = [match for match in map(_KIND.fullmatch, options) if match]
    words = WORDS.intersection(options)
    if not kinds and not words:
        return None
    if len(kinds) != 1 or words not in _WORDS[kinds[0][1]]:
        raise ValueError(
            "a norm is rms[eps] with wide, with wide and one, or plain, or layer[eps] with plain or shift, "
            f"got {sorted(filter(is_option, options))}"
        )
    return NormForm(float(kinds[0][2]), kinds[0][1] == "layer", words)
