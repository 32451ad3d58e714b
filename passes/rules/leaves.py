"""Rule `leaves`: what a carried expression reads, as nodes that a cache can serve."""

from __future__ import annotations

from kvcompile.passes.detect import dynamic_mask
from kvcompile.passes.graph import expr, shape
from kvcompile.passes.probe.probe import Prober, Refused
from kvcompile.passes.records import Leaf
from kvcompile.passes.score_mod.leaves import LeafRef


def leaves_of(refs: tuple[LeafRef, ...], prober: Prober) -> tuple[Leaf, ...]:
    """Raises Refused for a pair that cannot be computed again, or a key's tensor that is not one size per token."""
    found = []
    for ref in refs:
        again = None
        if ref.kind == "pair":
            again = dynamic_mask.find(ref.node, ref.dims, prober)
        elif ref.kind in ("query", "key"):
            rest = [size for dim, size in enumerate(shape(ref.node)) if dim not in ref.dims]
            if any(not expr(size).is_Integer for size in rest):
                raise Refused(
                    f"the scores depend on {ref.name} of shape {tuple(map(str, shape(ref.node)))}: no fixed size"
                )
        dims = ref.dims
        found.append(Leaf(ref.kind, ref.node, dims, again))
    return tuple(found)
