"""Rule `latent`: keys and values that are projections of one small row per token (MLA, DeepSeek-V2 section 2.1).

    K[h] = [U_h c | p],  V[h] = W_h c,   c [B, S, r] a latent, p [B, S, d] channels that all heads share (RoPE)

    q[h] . K[h] = [U_h^T q_n[h] | q_p[h]] . [c | p],   sum_j w_j V[h]_j = W_h (sum_j w_j c_j)

So only the rows [c | p] need a cache: one head of r + d channels, whose first r are the values as well. The walk goes
up from K and V through operators that move elements to linear layers of one common input; which element of K and V
is which output of these layers, or which shared channel, is found by evaluating with numbered elements, and checked
with random ones. A bias of the layer of K adds the same to all scores of a query; one of V is added to the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.passes.graph import call, expr, shape, target_name
from kvcompile.passes.probe.probe import Prober, Refused
from kvcompile.passes.records import AttentionSite, LatentForm, NoMatch
from kvcompile.passes.rules.block import no_match
from kvcompile.passes.rules.repeat_kv import MOVES

NAME = "latent"
aten = torch.ops.aten
_COMPOSING = (
    *MOVES,
    "split",
    "split_with_sizes",
    "chunk",
    "getitem",
    "narrow",
    "cat",
    "slice_scatter",
    "copy",
)
_EMPTY = ("new_empty", "new_zeros", "empty", "zeros", "empty_like", "zeros_like")
_BATCH, _SEQ = 2, 5
_SMALLER = 2  # a latent row must be at least this many times smaller than the K and V it stands for


@dataclass(frozen=True)
class _Sources:
    """What K or V is composed of: outputs of linear layers [.., S, N] over the latent, and shared channels."""

    linears: tuple[Node, ...]
    shared: tuple[Node, ...]


@dataclass(frozen=True)
class _Rows:
    """Rows of a linear layer's weight that belong to head h: first + h * stride + 0 .. count - 1."""

    linear: Node
    first: int
    stride: int
    count: int


def match(site: AttentionSite, prober: Prober) -> LatentForm | NoMatch | None:
    """The site over latent rows; None where nothing suggests one, NoMatch where something is in the way.

    Adds nodes without users before the attention.
    """
    values = _sources(site.v, (), prober)
    whole = site.num_kv_heads * (site.head_dim + site.v_head_dim)
    if not values.linears or values.shared:
        return None
    latent = _latent(values.linears[0])
    rank = int(shape(latent)[-1])
    if rank * _SMALLER >= whole or any(_latent(linear) is not latent for linear in values.linears):
        return None
    keys = _sources(site.k, (latent,), prober)
    if not keys.linears:
        return no_match(NAME, "keys and values are not linear in the same row", site.k)
    if not all(_headless(node, prober) for node in keys.shared):
        return no_match(
            NAME, "some channels of the keys are neither from that row nor shared by the heads", site.k
        )
    if len(keys.shared) > 1:
        return no_match(NAME, f"the keys share channels of {len(keys.shared)} tensors between heads", site.k)
    width = rank + sum(int(shape(node)[-1]) for node in keys.shared)
    if width * _SMALLER >= whole:
        return no_match(
            NAME, f"rows of {width} channels would save little against K and V of {whole} channels", site.k
        )
    try:
        own, common = _composition(site.k, keys, prober)
        of_values, _ = _composition(site.v, values, prober)
    except Refused as refused:
        return no_match(NAME, str(refused), site.k)
    biased = any(_bias(rows.linear) is not None for rows in (own[1], of_values[1]))
    if biased and (site.score.sinks or site.score.softcap is not None):
        return no_match(
            NAME, "the projections have a bias, which softcap or sink logits do not let pass", site.k
        )
    return _form(site, latent, keys, own, common, of_values)


def _sources(operand: Node, latents: Sequence[Node], prober: Prober) -> _Sources:
    """What `operand` is composed of; a linear layer counts where its input is in `latents` (or there are none)."""
    linears: list[Node] = []
    shared: list[Node] = []
    seen, stack = {operand}, [operand]
    while stack:
        node = stack.pop()
        name = target_name(node)
        if name in _EMPTY:
            continue
        if _is_linear(node) and (not latents or _latent(node) in latents):
            linears.append(node)
        elif node is not operand and _headless(node, prober) and not _part_of_linear(node, latents):
            shared.append(node)
        elif node.op == "call_function" and name in _COMPOSING:
            parents = [p for p in node.all_input_nodes if p not in seen and not _is_size(p)]
            seen.update(parents)
            stack.extend(parents)
        else:
            shared.append(node)
    return _Sources(tuple(linears), tuple(shared))


def _part_of_linear(node: Node, latents: Sequence[Node]) -> bool:
    """Whether `node` is a piece of a linear layer's output that counts."""
    while target_name(node) in _COMPOSING:
        source = node.args[0]
        if not isinstance(source, Node):
            return False
        node = source
    return _is_linear(node) and (not latents or _latent(node) in latents)


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _is_linear(node: Node) -> bool:
    """aten.linear of a weight of the model."""
    if node.target is not aten.linear.default:
        return False
    weight = node.args[1]
    return isinstance(weight, Node) and weight.op == "get_attr"


def _bias(linear: Node) -> Node | None:
    bias = linear.args[2] if len(linear.args) > 2 else linear.kwargs.get("bias")
    return bias if isinstance(bias, Node) else None


def _latent(linear: Node) -> Node:
    """What a linear layer projects, before views that only add or drop dimensions of size one."""
    node = linear.args[0]
    assert isinstance(node, Node)
    while target_name(node) in ("reshape", "view", "unsqueeze", "squeeze", "clone", "contiguous"):
        source = node.args[0]
        assert isinstance(source, Node)
        if _dims(source) != _dims(node):
            break
        node = source
    return node


def _dims(node: Node) -> list[object]:
    return [expr(size) for size in shape(node) if expr(size) != 1]


def _headless(node: Node, prober: Prober) -> bool:
    """[B, 1, S, d] or [B, S, d] (in any place of the one): one row per token for all heads."""
    dims = _dims(node)
    return len(dims) == 3 and dims[:2] == [prober.batch, prober.seq] and not _is_linear(node)


def _composition(
    operand: Node, sources: _Sources, prober: Prober
) -> tuple[tuple[int, _Rows], tuple[int, int] | None]:
    """Where in the channels of `operand` [B, H, S, D] the projections stand, and where the shared channels.

    Returns ((first channel, rows of the weight), (first channel, count) of the shared ones); raises Refused.
    """
    nodes = [*sources.linears, *sources.shared]
    starts, total = [], 0
    for node in nodes:
        starts.append(total)
        total += int(shape(node)[-1])
    numbers, generator = {}, torch.Generator().manual_seed(0)
    random = {}
    for node, start in zip(nodes, starts, strict=True):
        size = prober.concrete(node, _BATCH, _SEQ)
        ramp = torch.arange(start, start + size[-1], dtype=torch.float64, device=prober.device)
        numbers[node] = ramp.expand(size).contiguous()
        random[node] = torch.randn(size, generator=generator, dtype=torch.float64).to(prober.device)
    found: Tensor = prober.run([operand], _BATCH, _SEQ, dict(numbers))[0]
    index = found[0, :, 0].long().cpu()  # [H, D]: which element of all sources
    every = torch.cat([random[node].reshape(_BATCH, _SEQ, -1) for node in nodes], dim=-1)
    again: Tensor = prober.run([operand], _BATCH, _SEQ, dict(random))[0]
    wanted = every[:, :, index.to(every.device)].permute(0, 2, 1, 3)  # [B, S, H, D] -> [B, H, S, D]
    if index.min() < 0 or index.max() >= total or not torch.equal(again, wanted):
        raise Refused("its channels are not copies of a projection's outputs")
    split = sum(int(shape(node)[-1]) for node in sources.linears)
    of_heads = index < split
    if not torch.equal(of_heads, of_heads[:1].expand_as(of_heads)):
        raise Refused("heads are composed in different ways")
    first, count = _range(of_heads[0])
    place = (first, _weight_rows(index[:, first : first + count], sources.linears, starts))
    if not sources.shared:
        return place, None
    start, number = _range(~of_heads[0])
    width = int(shape(sources.shared[0])[-1])
    row = torch.arange(width).expand(len(index), width)
    if number != width or not torch.equal(index[:, start : start + number] - split, row):
        raise Refused("the shared channels of the heads are not one row in its order")
    return place, (start, number)


def _range(chosen: Tensor) -> tuple[int, int]:
    places = chosen.nonzero().flatten()
    first, count = int(places[0]), len(places)
    if int(places[-1]) != first + count - 1:
        raise Refused("projected and shared channels are mixed")
    return first, count


def _weight_rows(index: Tensor, linears: tuple[Node, ...], starts: list[int]) -> _Rows:
    """Which rows of a weight make channels [H, count]."""
    heads, count = index.shape
    number = max(i for i in range(len(linears)) if starts[i] <= int(index[0, 0]))
    local = index - starts[number]
    first = int(local[0, 0])
    stride = int(local[1, 0]) - first if heads > 1 else count
    wanted = first + torch.arange(heads)[:, None] * stride + torch.arange(count)
    rows = int(shape(linears[number])[-1])
    fits = (first < stride and heads * stride <= rows) or first + heads * stride <= rows
    if stride < count or not fits or not torch.equal(local, wanted):
        raise Refused("the heads' rows do not stand one behind the other in the projection")
    return _Rows(linears[number], first, stride, count)


def _form(
    site: AttentionSite,
    latent: Node,
    keys: _Sources,
    own: tuple[int, _Rows],
    common: tuple[int, int] | None,
    of_values: tuple[int, _Rows],
) -> LatentForm:
    """The absorbed operands, inserted before the attention (without users yet)."""
    graph, like = site.out.graph, site.out
    rank = int(shape(latent)[-1])
    with graph.inserting_before(site.out):
        first, rows = own
        weight = _weight(rows, rows.linear.args[1], site.num_kv_heads, like)
        q = call(graph, aten.slice.Tensor, (site.q, -1, first, first + rows.count), like)
        parts = [per_head(q, weight, like)]
        pieces = [_one_head(latent, site, like)]
        if common is not None:
            first, count = common
            parts.append(call(graph, aten.slice.Tensor, (site.q, -1, first, first + count), like))
            pieces.append(_one_head(keys.shared[0], site, like))
        q = call(graph, aten.cat.default, (parts, -1), like)
        k = call(graph, aten.cat.default, (pieces, -1), like)
        v = call(graph, aten.slice.Tensor, (k, -1, 0, rank), like)
        up = _weight(of_values[1], of_values[1].linear.args[1], site.num_kv_heads, like)
        offset = _bias(of_values[1].linear)
        bias = None if offset is None else _weight(of_values[1], offset, site.num_kv_heads, like)
    width = int(shape(k)[-1])
    absorbed = replace(
        site, q=q, k=k, v=v, num_kv_heads=1, head_dim=width, v_head_dim=rank, rope=None, latent=None
    )
    return LatentForm(absorbed, up, bias)


def per_head(x: Node, weight: Node, like: Node) -> Node:
    """x [B, Hq, S, a] times weight [H, a, b], each head's own -> [B, Hq, S, b], at the graph's insertion point."""
    graph = like.graph
    heads, depth, width = (int(size) for size in shape(weight))
    group = int(shape(x)[1]) // heads
    batch, seq = (call(graph, aten.sym_size.int, (x, dim), like) for dim in (0, 2))
    # One product for all sequences: a batched one would copy the weight for each of them.
    x = call(graph, aten.reshape.default, (x, [batch, heads, group, seq, depth]), like)
    x = call(graph, aten.permute.default, (x, [1, 0, 2, 3, 4]), like)
    x = call(graph, aten.reshape.default, (x, [heads, -1, depth]), like)
    x = call(graph, aten.bmm.default, (x, weight), like)
    x = call(graph, aten.reshape.default, (x, [heads, batch, group, seq, width]), like)
    x = call(graph, aten.permute.default, (x, [1, 0, 2, 3, 4]), like)
    return call(graph, aten.reshape.default, (x, [batch, heads * group, seq, width]), like)


def _weight(rows: _Rows, weight: object, heads: int, like: Node) -> Node:
    """The rows of a weight [N, r] (or bias [N]) by head: a view [H, count, r] (or [H, count])."""
    assert isinstance(weight, Node)
    graph = like.graph
    size = heads * rows.stride
    start = 0 if rows.first < rows.stride and size <= int(shape(weight)[0]) else rows.first
    view = weight
    if (start, size) != (0, int(shape(weight)[0])):
        view = call(graph, aten.slice.Tensor, (view, 0, start, start + size), like)
    view = call(graph, aten.reshape.default, (view, [heads, rows.stride, *shape(weight)[1:]]), like)
    offset = rows.first - start
    return call(graph, aten.slice.Tensor, (view, 1, offset, offset + rows.count), like)


def _one_head(node: Node, site: AttentionSite, like: Node) -> Node:
    """A row per token as [B, 1, S, d]."""
    graph = like.graph
    sizes = shape(node)
    if len(sizes) == 4 and expr(sizes[1]) == 1:
        return node
    if len(sizes) == 3:
        return call(graph, aten.unsqueeze.default, (node, 1), like)
    batch, seq = (call(graph, aten.sym_size.int, (site.q, dim), like) for dim in (0, 2))
    return call(graph, aten.reshape.default, (node, [batch, 1, seq, int(sizes[-1])]), like)
