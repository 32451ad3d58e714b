"""`kvcompile::cached_attention`: the op that a rewritten graph has at each attention site.

Its schema says what it mutates; its body is the reference, into which torch.compile and make_fx see through
(CompositeImplicitAutograd), so Inductor fuses it with what stands around it. Sites of generated kernels go to
`kernels/triton/host/attention.py` or `kernels/ops/on_cpu.py`, the only ways to them from here: without such a site
neither is imported.
"""

from __future__ import annotations

import importlib
import json

import torch
from torch import Tensor

from kvcompile.expression import ScoreMod
from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference import attention as reference
from kvcompile.kernels.shared.expression import Places, evaluate
from kvcompile.kernels.spec import SiteSpec

_GENERATED = {
    "triton": "kvcompile.kernels.triton.host.attention",
    "cpp": "kvcompile.kernels.ops.on_cpu",
}
_LIB = torch.library.Library("kvcompile", "FRAGMENT")
_LIB.define(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor(a!)[] buffers, Tensor positions, Tensor seq_lens, "
    "Tensor[] rope, SymInt span, str spec, *, Tensor? sinks=None, Tensor? bias=None, Tensor[]? leaves=None, "
    "Tensor? page_table=None) -> Tensor"
)


def cached_attention_function(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: list[Tensor],
    positions: Tensor,
    seq_lens: Tensor,
    rope: list[Tensor],
    span: int,
    spec: str,
    *,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    leaves: list[Tensor] | None = None,
    page_table: Tensor | None = None,
) -> Tensor:
    site = SiteSpec.from_json(spec)
    x = AttendInputs(
        q, k, v, list(buffers), positions, seq_lens, list(rope), span, site, sinks, bias, leaves, page_table
    )
    if site.kernels != "reference":
        generated = importlib.import_module(_GENERATED[site.kernels])
        out: Tensor = generated.cached_attention(x)
        return out
    return reference.cached_attention(x)


_LIB.impl("cached_attention", cached_attention_function, "CompositeImplicitAutograd")
cached_attention = torch.ops.kvcompile.cached_attention.default


_LIB.define("cached_rows(Tensor x, Tensor(a!) buffer, Tensor positions, SymInt span) -> Tensor")


def cached_rows_function(x: Tensor, buffer: Tensor, positions: Tensor, span: int) -> Tensor:
    """Append x [B, S, ...] to `buffer` [B, 1, slots, ...] and give the first `span` slots [B, span, ...].

    positions: [B, S]; padding (negative) lands at the far end, as in `reference.append`.
    """
    slot = torch.remainder(positions, buffer.shape[2])
    batch = torch.arange(x.shape[0], device=x.device)[:, None]
    head = torch.zeros_like(slot)
    buffer.index_put_((batch, head, slot), x)
    return buffer[:, 0, :span]


_LIB.impl("cached_rows", cached_rows_function, "CompositeImplicitAutograd")
cached_rows = torch.ops.kvcompile.cached_rows.default


_LIB.define(
    "score_function(Tensor positions, SymInt span, Tensor[] tables, str program, int heads) -> Tensor"
)


def score_function_function(
    positions: Tensor, span: int, tables: list[Tensor], program: str, heads: int
) -> Tensor:
    """The score of a `ScoreMod` (JSON) of positions alone, for queries at `positions` [B, S] and slots 0 .. span - 1.

    Gives [B, heads, S, span]; padding (negative positions) counts as position 0.
    """
    mod = ScoreMod.from_dict(json.loads(program))
    assert mod.score is not None
    slots = torch.arange(span, device=positions.device)[None]
    places = Places(positions.clamp(min=0), slots, (heads, 1), tables)
    (found,) = evaluate(mod, [mod.score], places)
    dtype = mod.instructions[mod.score].torch_dtype
    if not isinstance(found, Tensor):
        found = torch.full((1, 1, 1, 1, 1), found, dtype=dtype, device=positions.device)
    shape = (positions.shape[0], heads, 1, positions.shape[1], span)
    out: Tensor = found.to(dtype).expand(shape).squeeze(2)
    return out


_LIB.impl("score_function", score_function_function, "CompositeImplicitAutograd")
score_function = torch.ops.kvcompile.score_function.default
