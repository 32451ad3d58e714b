"""The records that detection produces and everything later reads: frozen, printable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import Node

MaskKind = Literal["causal", "sliding"]


@dataclass(frozen=True)
class MaskSpec:
    """What a query at position i sees of the key at position j.

    causal:  j <= i
    sliding: i - window < j <= i  (`window` tokens, the query's own included)
    """

    kind: MaskKind
    window: int | None = None

    def __str__(self) -> str:
        return self.kind if self.window is None else f"{self.kind}({self.window})"


@dataclass(frozen=True)
class RopeSpec:
    """A rotary embedding found in the graph: out = x * cos + rotate(x) * sin on both q and k.

    style:      "half": rotate((a, b)) = (-b, a) on the halves of the first `rotary_dim` channels
    rotary_dim: channels that are rotated (== head_dim unless partial)
    q_input, k_input: [B, H, S, D] before the rotation (k at KV-head size)
    cos, sin:   nodes [B or 1, S, rotary_dim] (no head axis), functions of the positions alone
    """

    style: Literal["half"]
    rotary_dim: int
    q_input: Node
    k_input: Node
    cos: Node
    sin: Node


@dataclass(frozen=True)
class AttentionSite:
    """One attention block of the captured graph; the call site, not the module, is the unit.

    q:   [B, num_qo_heads, S, head_dim]   as the scores use it (after RoPE)
    k:   [B, num_kv_heads, S, head_dim]   after RoPE, before repeat_kv
    v:   [B, num_kv_heads, S, v_head_dim] before repeat_kv
    out: [B, num_qo_heads, S, v_head_dim] the node whose value is the attention's result
    """

    layer: int
    module_path: str
    source: str  # "file.py:123" of the attention call in the model's own code
    idiom: str  # which rule matched: "sdpa", "softmax"
    q: Node
    k: Node
    v: Node
    out: Node
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    sm_scale: float
    mask: MaskSpec
    rope: RopeSpec | None
    dtype: torch.dtype
    kv_source: int  # the layer whose K/V this site reads (its own unless shared)

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True)
class NoMatch:
    """Why a rule did not match: failure is data."""

    rule: str
    reason: str
    node: str = ""
    source: str = ""  # "file.py:123" in the model's own code, where known
    module_path: str = ""

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.module_path, self.source, self.node) if part)
        return f"[{self.rule}] {self.reason}" + (f" ({where})" if where else "")
