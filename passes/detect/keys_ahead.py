"""A mask must not bring together keys that a query does not see yet: a cache has none of them.

What works along the keys (a sparse indexer's topk, a softmax) may go over later ones only where they are proved to be
hidden, as -inf, or as what a topk takes last.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from kvcompile.expression import B, Expr, H, K, Q, const, integer
from kvcompile.passes.detect.query_key_dims import REDUCE, Axes, Axis
from kvcompile.passes.graph import expr, shape, source_line, target_name
from kvcompile.passes.probe.probe import Prober, Refused
from kvcompile.passes.records import DynamicMask
from kvcompile.passes.score_mod.leaves import Untranslatable
from kvcompile.passes.score_mod.make import cast, lt, make
from kvcompile.passes.score_mod.normal_form import NoNormalForm, normal_form

# Operators that bring the elements along a dimension together, in which hidden ones (-inf) change nothing.
_ALONG = {
    "topk": 2,
    "sort": 1,
    "argsort": 1,
    "softmax": 1,
    "_softmax": 1,
    "log_softmax": 1,
    "_log_softmax": 1,
}
_EXTREMES = ("amax", "max", "argmax", "logsumexp")
_FAR = 1e30  # no score is that large


def check_past(found: DynamicMask, axes: Axes, query: Axis, key: Axis, prober: Prober) -> None:
    """Raises Refused where an operator brings keys together that a query does not see yet, or queries with each other.

    A cache has no later keys, and slots behind the last token hold anything: what works along the keys must get those
    hidden. Of a chunk there are the chunk's queries alone.
    """
    for node in found.region:
        name = target_name(node)
        dims = _along(node, name)
        for dim in dims:
            source = node.args[0]
            assert isinstance(source, Node)
            if not axes.is_seq(source, dim):
                continue
            if axes.find(source, dim) == query:
                raise Refused(f"the mask brings queries together in {node.target} ({source_line(node)})")
            if axes.find(source, dim) != key or name == "cumsum":
                continue
            passes_over = (name in _ALONG or name in _EXTREMES) and not _takes_the_least(node)
            if not passes_over or not _hidden_ahead(source, axes, query, key, prober, chosen=name == "topk"):
                raise Refused(
                    f"the mask of a query depends on later keys in {node.target} ({source_line(node)}), which a cache "
                    "does not have; hide them with -inf before"
                )
        if (
            name in ("matmul", "bmm", "mm")
            and isinstance(node.args[0], Node)
            and axes.is_seq(node.args[0], -1)
        ):
            raise Refused(f"the mask sums over tokens in {node.target} ({source_line(node)})")


def _along(node: Node, name: str) -> list[int]:
    """The dimensions along which an operator brings elements together."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or not shape(source):
        return []
    rank = len(shape(source))
    if name in _ALONG:
        place = _ALONG[name]
        dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", -1)
        return [dim % rank] if isinstance(dim, int) else list(range(rank))
    if name in REDUCE or name in ("cumsum", "cumprod", "cummax", "mean", "std", "var", "norm"):
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        if dims is None or dims == []:
            return list(range(rank))
        return [int(d) % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])]  # type: ignore[arg-type]
    return []


def _takes_the_least(node: Node) -> bool:
    """topk(source, k, dim, largest=False), sort(source, dim, descending=False): what is hidden comes first."""
    name = target_name(node)
    if name == "topk":
        return (node.args[3] if len(node.args) > 3 else node.kwargs.get("largest", True)) is not True
    if name in ("sort", "argsort"):
        return (node.args[2] if len(node.args) > 2 else node.kwargs.get("descending", False)) is not True
    return False


def _hidden_ahead(
    source: Node, axes: Axes, query: Axis, key: Axis, prober: Prober, chosen: bool = False
) -> bool:
    """Whether the elements of later keys are proved to be -inf, or as good as that.

    chosen: by a topk, which takes what is below every score after all that the query sees, whatever it is
    """
    named: dict[int, Expr] = {}
    for dim, size in enumerate(shape(source)):
        if axes.is_seq(source, dim):
            named[dim] = Q if axes.find(source, dim) == query else K
        elif expr(size) == prober.batch:
            named[dim] = B
        elif expr(size) == 1:
            named[dim] = integer(0)
        else:
            named[dim] = H
    t = prober.reader.translator(1)
    try:
        element = t.element(source, tuple(named[dim] for dim in range(len(named))))
        element = cast(element, torch.float32)
        if chosen:  # what hides even so is below every score
            element = make("add", torch.float32, element, const(_FAR, torch.float32))
        form = normal_form(element, None, t.prover)
    except (Untranslatable, NoNormalForm):
        return False
    return (chosen or form.infinite) and t.prover.never(form.seen, lt(Q, K))
