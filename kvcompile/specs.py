"""Specs: what is known of a site or a state, as frozen plain values; no node of a graph is in them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from kvcompile.expression import ScoreMod

MaskKind = Literal["causal", "sliding", "chunked", "explicit"]
BiasKind = Literal["alibi", "relative", "columns", "table"]
# Metadata of fields that people read: a reworded reason, or a model whose source moved by a line, is the same plan.
PROSE = {"prose": True}
# Nor is where a layer's tensors stand a part of a plan's digest: it is the same plan on another device.
PLACE = PROSE


@dataclass(frozen=True)
class MaskSpec:
    """What a query at position i sees of the key at position j.

    causal:   j <= i
    sliding:  i - window < j <= i  (`window` tokens, the query's own included)
    chunked:  j <= i, and both in one chunk of `window` tokens: i // window == j // window
    explicit: j <= i, and the site's bias (a table) is not -inf there
    """

    kind: MaskKind
    window: int | None = None

    def __str__(self) -> str:
        return self.kind if self.window is None else f"{self.kind}({self.window})"


@dataclass(frozen=True)
class BiasSpec:
    """What is added to the scaled score of query i and key j; `values` is a tensor of the site, H is Hq or 1.

    alibi:    -values[h] * (i - j)           values fp32 [Hq]
    relative: values[h, i - j]               values fp32 [H, reach]
    columns:  values[h, j] - values[h, i]    values fp32 [H, reach]
    table:    values[h, i, j]                values fp32 [H, reach, reach]

    reach: distances (relative) or positions (columns, table) that have a value; None: all
    """

    kind: BiasKind
    reach: int | None = None

    def __str__(self) -> str:
        names = {
            "alibi": "ALiBi",
            "relative": "relative bias",
            "columns": "bias by key",
            "table": "bias table",
        }
        return names[self.kind] + ("" if self.reach is None else f" of {self.reach:,}")


@dataclass(frozen=True)
class ScoreSpec:
    """What happens to the scaled scores before the softmax, besides the mask.

    s = softcap * tanh(s / softcap), if there is one;  s = s + bias;  then, with `sinks`, the softmax runs over
    one more column per head, the sink logit, whose probability is dropped.
    """

    softcap: float | None = None
    bias: BiasSpec | None = None
    sinks: bool = False
    mod: ScoreMod | None = None  # what is carried as an expression: after softcap and bias

    @property
    def plain(self) -> bool:
        """Nothing but scale and mask."""
        return self == ScoreSpec()

    def __str__(self) -> str:
        cap = None if self.softcap is None else f"softcap {self.softcap:g}"
        return ", ".join(
            str(part) for part in (cap, self.bias, "sink logits" if self.sinks else None, self.mod) if part
        )


RopeStyle = Literal["half", "interleaved"]


@dataclass(frozen=True)
class RotaryForm:
    """Which channels a rotary embedding turns, and in which pairs: start .. start + rotary_dim - 1.

    half:        channel i of them with channel i + rotary_dim / 2
    interleaved: neighbours
    """

    style: RopeStyle
    start: int
    rotary_dim: int


@dataclass(frozen=True, kw_only=True)
class SiteShape:
    """The sizes of an attention site, and which tokens its model shows to it.

    q, out: [num_qo_heads, head_dim] and [num_qo_heads, v_head_dim] per token
    k, v:   [num_kv_heads, head_dim] and [num_kv_heads, v_head_dim] per token
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    mask: MaskSpec


@dataclass(frozen=True, kw_only=True)
class SiteFacts(SiteShape):
    """What is known of one attention site and stays true whatever is decided for it.

    A site of the graph (`AttentionSite`), what deciding is given (`KnownSite`) and what it returns (`Decision`) each
    add their own to it.

    source:    "file.py:123" of the attention call in the model's own code
    idiom:     which rule matched: "sdpa", "softmax"
    kv_source: the layer whose K/V this site reads (its own unless shared)
    """

    layer: int
    module_path: str
    source: str = field(metadata=PROSE)
    idiom: str = field(metadata=PROSE)
    sm_scale: float
    kv_source: int
    score: ScoreSpec = ScoreSpec()


# What a module with recurrent state takes exactly: any number of tokens at once; one at a time only; or two at least,
# because its form for one is another (a token that comes alone is then kept, and given again with the next).
Feed = Literal["together", "singly", "in pairs"]


@dataclass(frozen=True)
class StateSlot:
    """One tensor of recurrent state, per sequence; `dtype` by name, e.g. "float32"."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class RecurrentState:
    """What one module besides attention carries from token to token; its size does not depend on their number.

    feed:   how tokens that come after the first are given to it, see `Feed`
    device: where it stands, of a model over several devices; None: on the model's only one
    """

    module_path: str
    slots: tuple[StateSlot, ...]
    feed: Feed
    device: str | None = field(default=None, metadata=PLACE)

    @property
    def nbytes(self) -> int:
        """Bytes per sequence."""
        return sum(slot.nbytes for slot in self.slots)
