"""Where keys and queries are taken to be: their positions, or their places in the cache (StreamingLLM's `in_cache`).

| slots | a key's place | a query's |
|---|---|---|
| original positions | its position | its position |
| in_cache, one query | sinks stay, the others move up by the tokens that are gone | moves up as well |
| in_cache, many queries | sinks stay, the others move up by those gone at first | toward sinks at most budget - 1 |
| in_cache by scores | its rank among the tokens kept: `slots_place`; new ones stand behind | as new ones |

Only distances matter to RoPE and to a relative bias, so all keys but the sinks may be counted from one base, that of
the first query of the pass; toward sinks, queries then turn at another place (`q_sinks`).
"""

from __future__ import annotations

from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import Scored


def prologue(spec: KernelSpec, many: bool) -> list[str]:
    """Lines before the loops."""
    retention = spec.layout.retention
    if not retention.in_cache:
        return []
    budget = int(retention.budget())
    if many:
        return [f"gone = tl.maximum(tl.maximum(first, 0) - {budget}, 0)"]
    return [f"gone = tl.maximum(length - {budget}, 0)"]


def of_keys(spec: KernelSpec, new: bool, masked: bool) -> list[str]:
    """Lines that define `place` [BLOCK_N] where it is not `key`; new: of the tokens that are in no slot yet."""
    retention = spec.layout.retention
    if not retention.in_cache:
        return []
    if isinstance(retention, Scored):
        if new:
            return ["place = key - gone"]
        guard = ", mask=inside, other=0" if masked else ""
        return [f"place = tl.load(slots_place_ptr + {row_of_slots(spec)} + start + n{guard})"]
    return [f"place = tl.where(key < {retention.sinks}, key, key - gone)"]


def row_of_slots(spec: KernelSpec) -> str:
    """An expression: where in what a retention by scores notes of slots, [B, Hs, N], the row of a head begins."""
    heads = spec.score_heads
    return f"(batch * {heads} + {'0' if heads == 1 else 'head'}) * {spec.layout.slots(None)}"


def names(spec: KernelSpec, many: bool) -> dict[str, str]:
    """What a bias takes queries and keys to be at; "query" broadcasts against [BLOCK_M, BLOCK_N]."""
    retention = spec.layout.retention
    query = "position[:, None]" if many else "position"
    if not retention.in_cache:
        return {"query": query, "key": "key"}
    budget = int(retention.budget())
    if isinstance(retention, Scored):
        moved = f"({query} - gone)" if many else f"tl.minimum(position, {budget - 1})"
        return {"query": moved, "key": "place"}
    if many:
        toward = f"tl.minimum({query}, {budget - 1})"
        return {"query": f"tl.where((key < {retention.sinks})[None, :], {toward}, {query})", "key": "key"}
    return {"query": "(position - gone)", "key": "place"}


def two_queries(spec: KernelSpec, many: bool) -> bool:
    """Whether queries turn at other places toward sinks."""
    retention = spec.layout.retention
    return many and retention.in_cache and retention.sinks > 0 and not isinstance(retention, Scored)
