"""`kvcompile::cached_attention_packed`: `cached_attention` over the new tokens of several sequences in one row.

A packed step runs all tokens of all sequences through a decoder at once: a token for each sequence that decodes, then
the chunks of prompts. Only attention knows which tokens belong together. Inputs have the names and shapes that vLLM
gives them (`vllm/v1/attention/backends`), but for `seq_lens`: as in our other ops, the tokens *before* this step.

How many calls stand behind it depends on values, so no compiler sees through it: it is one call in a compiled graph.
`kernels/packed.py` says what it stands for; that, sequence by sequence, is what every implementation is held against.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.packed import PackedInputs, empty_result, in_parts
from kvcompile.kernels.reference import attention as reference
from kvcompile.kernels.spec import SiteSpec

_GENERATED = {
    "triton": "kvcompile.kernels.triton.host.packed",
    "cpp": "kvcompile.kernels.ops.on_cpu",
}
_LIB = torch.library.Library("kvcompile", "FRAGMENT")
_LIB.define(
    "cached_attention_packed(Tensor q, Tensor k, Tensor v, Tensor(a!)[] buffers, Tensor positions, "
    "Tensor query_start_loc, Tensor seq_lens, Tensor[] rope, SymInt num_decodes, SymInt max_query_len, SymInt span, "
    "str spec, *, Tensor? sinks=None, Tensor? bias=None, Tensor[]? leaves=None, Tensor? page_table=None) -> Tensor",
    # Vectors keep their channels side by side.
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def cached_attention_packed_function(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: list[Tensor],
    positions: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    rope: list[Tensor],
    num_decodes: int,
    max_query_len: int,
    span: int,
    spec: str,
    *,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    leaves: list[Tensor] | None = None,
    page_table: Tensor | None = None,
) -> Tensor:
    """Append the new tokens of R sequences to their pages (in place), and attend; returns [1, Hq, T, Dv].

    Args:
        q: [1, Hq, T, D]; k, v: [1, Hkv, T, D] and [1, Hkv, T, Dv]: the tokens of one sequence behind those of another.
        buffers: as for `cached_attention`: pools; what is in no page has R sequences.
        positions: int64 [1, T], of each token in its sequence: seq_lens, seq_lens + 1, ..; there is no padding.
        query_start_loc: int32 or int64 [R + 1]: sequence r has the tokens from query_start_loc[r] up to, and without,
            query_start_loc[r + 1].
        seq_lens: int64 [R]: tokens that each sequence has in the cache before this step.
        num_decodes: sequences that come first, with one new token each.
        max_query_len: new tokens of one sequence, at most.
        span: slots to read where slots stand in the order of tokens: at least the longest sequence with its new ones.
        page_table: int32 [R, pages].
        rope, spec, sinks, bias, leaves: as for `cached_attention`.

    Raises:
        ValueError: the numbers do not fit `query_start_loc` (where the tensors are on a CPU).
    """
    site = SiteSpec.from_json(spec)
    rows = AttendInputs(
        q, k, v, list(buffers), positions, seq_lens, list(rope), span, site, sinks, bias, leaves, page_table
    )
    x = PackedInputs(rows, query_start_loc, num_decodes, max_query_len)
    if site.kernels != "reference":
        out: Tensor = importlib.import_module(_GENERATED[site.kernels]).cached_attention_packed(x)
        return out
    return in_parts(x, reference.cached_attention)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: list[Tensor],
    positions: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    rope: list[Tensor],
    num_decodes: int,
    max_query_len: int,
    span: int,
    spec: str,
    **others: object,
) -> Tensor:
    return empty_result(q, v, SiteSpec.from_json(spec).layout)


_LIB.impl("cached_attention_packed", cached_attention_packed_function, "CompositeExplicitAutograd")
torch.library.register_fake("kvcompile::cached_attention_packed", _fake, lib=_LIB)
cached_attention_packed = torch.ops.kvcompile.cached_attention_packed.default
