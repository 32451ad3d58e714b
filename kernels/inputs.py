"""AttendInputs: what one call of `kvcompile::cached_attention` is given, as one record.

The op has a flat signature, as PyTorch's schemas have it (`kernels/ops/cached_attention.py`). Right behind it this
record is made, and everything that computes the op takes it: the reference and the generated kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvcompile.kernels.spec import SiteSpec


@dataclass(frozen=True)
class AttendInputs:
    """New vectors, the layer's cache, and what the site needs besides.

    S new tokens come to sequences that have seen `seq_lens` tokens. Padding stands on the left of a sequence that has
    seen none: it has negative positions, its queries' results mean nothing, and no query ever sees its keys.

    q:          [B, Hq, S, D]
    k, v:       [B, Hkv, S, D], [B, Hkv, S, Dv]
    buffers:    the layout's parts, K's then V's, each [B, Hkv, slots, ...]; pools of them where it is paged; then
                what is noted of slots or pages (`CacheLayout.num_notes`). They are written in place
    positions:  int64 [B, S]
    seq_lens:   int64 [B]
    rope:       [cos, sin] tables [P, R] where keys are stored before RoPE, or `spec.rotates_on_append` (q and k are
                then before it), else []
    span:       slots to read where slots stand in the order of tokens, at least the longest sequence with its new ones
    spec:       the site's constants
    sinks:      a logit per query head [Hq] that takes part in the softmax and weighs no value, or None
    bias:       what `spec.score.bias` says is added to the scores, or None
    leaves:     what `spec.score.mod` reads, as `ScoreMod.leaves` says: by position, [.., span, ..], where it is of
                tokens; None where the site has no mod
    page_table: int32 [B, pages], where the layout is paged; see `kernels/reference/paged.py`
    """

    q: Tensor
    k: Tensor
    v: Tensor
    buffers: list[Tensor]
    positions: Tensor
    seq_lens: Tensor
    rope: list[Tensor]
    span: int
    spec: SiteSpec
    sinks: Tensor | None = None
    bias: Tensor | None = None
    leaves: list[Tensor] | None = None
    page_table: Tensor | None = None

    @property
    def new_lens(self) -> Tensor:
        """Tokens of each sequence with the new ones, int64 [B]."""
        return self.positions[:, -1] + 1

    @property
    def parts(self) -> list[Tensor]:
        """The buffers that hold vectors."""
        return self.buffers[: len(self.buffers) - self.spec.layout.num_notes]

    @property
    def notes(self) -> list[Tensor]:
        """The buffers that note something of slots or pages."""
        return self.buffers[len(self.buffers) - self.spec.layout.num_notes :]
