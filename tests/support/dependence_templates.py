"""How each operator with a transfer function is called in random graphs (`tests/support/dependence_graphs.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from kvcompile.passes.dependence.analysis import RULES
from kvcompile.passes.dependence.pointwise import NAMES
from kvcompile.passes.graph import shape
from tests.support.dependence_graphs import Args, Builder, NotHere, Template

aten = torch.ops.aten
Call = tuple[Callable[..., Any], Args, dict[str, Any]]


def _overload(name: str, *preferred: str) -> Callable[..., Any]:
    packet = getattr(aten, name)
    return getattr(
        packet, next(o for o in (*preferred, "default", *packet.overloads()) if o in packet.overloads())
    )  # type: ignore[no-any-return]


def _pointwise(name: str) -> Callable[[Builder], Call]:
    """Operands of whatever shapes broadcast."""

    def make(b: Builder) -> Call:
        x = b.any("float", "integer", "bool") if b.random.random() < 0.7 else b.floating()
        special: dict[str, Callable[[], Call]] = {
            "where": lambda: (
                aten.where.self,
                (b.one_of(b.any("bool"), _lifted(b)), b.floating(), b.floating()),
                {},
            ),
            "masked_fill": lambda: (aten.masked_fill.Scalar, (x, b.any("bool"), 3), {}),
            "addcmul": lambda: (aten.addcmul.default, (b.floating(), b.floating(), b.floating()), {}),
            "addcdiv": lambda: (aten.addcdiv.default, (b.floating(), b.floating(), b.floating()), {}),
            "lerp": lambda: (aten.lerp.Tensor, (b.floating(), b.floating(), b.floating()), {}),
            "to": lambda: (aten.to.dtype, (x, torch.float64), {}),
            "_to_copy": lambda: (aten._to_copy.default, (x,), {"dtype": torch.float64}),
            "type_as": lambda: (aten.type_as.default, (x, b.floating()), {}),
            "dropout": lambda: (aten.dropout.default, (b.floating(), 0.5, False), {}),
            "feature_dropout": lambda: (aten.feature_dropout.default, (b.floating(), 0.5, False), {}),
            "clamp": lambda: (aten.clamp.default, (x, -1, 2), {}),
            "clip": lambda: (aten.clip.default, (x, -1, 2), {}),
            "clamp_min": lambda: (aten.clamp_min.default, (x, 0), {}),
            "clamp_max": lambda: (aten.clamp_max.default, (x, 1), {}),
            "threshold": lambda: (aten.threshold.default, (x, 0, 1), {}),
            "prelu": lambda: (aten.prelu.default, (b.floating(), b.vector), {}),
            "copy": lambda: (aten.copy.default, (b.floating(), b.floating()), {}),
            "float_power": lambda: (aten.float_power.Tensor_Scalar, (x, 2), {}),
            "polar": lambda: (aten.polar.default, (b.floating(), b.floating()), {}),
            "complex": lambda: (aten.complex.default, (b.floating(), b.floating()), {}),
            "pow": lambda: (aten.pow.Tensor_Scalar, (x, 2), {}),
            "round": lambda: (aten.round.default, (b.floating(),), {}),
            "lift_fresh_copy": lambda: (aten.lift_fresh_copy.default, (x,), {}),
        }
        if name in special:
            return special[name]()
        packet = getattr(aten, name)
        tensors = [o for o in ("Tensor", "default", "self", "Tensor_Tensor") if o in packet.overloads()]
        if not tensors:
            raise NotHere
        target = getattr(packet, tensors[0])
        required = [a for a in target._schema.arguments if not a.has_default_value()]
        count = sum("Tensor" in str(a.type) for a in required)
        others = [b.any("float", "integer", "bool") for _ in range(count - 1)]
        if name.startswith("__") and "shift" in name:
            others = [1]  # type: ignore[list-item]
        return target, (x, *others, *([1] * (len(required) - count))), {}

    return make


def _lifted(b: Builder) -> Node:
    """A mask of tokens over channels."""
    return b.add(aten.unsqueeze.default, (b.any("bool"), -1))


def _view(b: Builder) -> Call:
    """Sizes taken from another tensor of as many elements, or joined from neighbours."""
    x = b.any()
    sizes: list[Any] = [aten_size(b, x, dim) for dim in range(len(shape(x)))]
    for _ in range(b.random.randrange(1, 3)):
        choice = b.random.randrange(3)
        if choice == 0 and len(sizes) > 1:
            place = b.random.randrange(len(sizes) - 1)
            sizes[place : place + 2] = [-1]
        elif choice == 1 and isinstance(sizes[place := b.random.randrange(len(sizes))], int):
            sizes[place : place + 1] = [2, sizes[place] // 2]
        else:
            b.random.shuffle(sizes)
    return aten.reshape.default, (x, sizes), {}


def aten_size(b: Builder, node: Node, dim: int) -> Any:
    size = shape(node)[dim]
    if isinstance(size, int):
        return size
    if str(size) == str(b.rows.meta["val"]):
        return b.rows
    return b.tokens if str(size) == str(b.tokens.meta["val"]) else -1


def _unary_dim(
    name: str, *more: Any, overload: str = "", kinds: tuple[str, ...] = ("float",)
) -> Callable[[Builder], Call]:
    def make(b: Builder) -> Call:
        x = b.any(*kinds)
        return _overload(name, overload), (x, b.dim(x), *more), {}

    return make


def _reduction(name: str) -> Callable[[Builder], Call]:
    def make(b: Builder) -> Call:
        x = b.any("float", "integer") if name not in ("any", "all") else b.any("bool", "integer")
        if name in (
            "mean",
            "nanmean",
            "logsumexp",
            "special_logsumexp",
            "var",
            "std",
            "norm",
            "linalg_vector_norm",
        ):
            x = b.floating()
        dim, keep = b.dim(x), b.one_of(True, False)
        packet = getattr(aten, name)
        wanted: dict[str, Call] = {
            "norm": (aten.norm.ScalarOpt_dim, (x, 2, [dim], keep), {}),
            "linalg_vector_norm": (aten.linalg_vector_norm.default, (x, 2, [dim], keep), {}),
            "kthvalue": (aten.kthvalue.default, (x, 1, dim, keep), {}),
            "count_nonzero": (aten.count_nonzero.dim_IntList, (x, [dim]), {}),
            "argmax": (aten.argmax.default, (x, dim, keep), {}),
            "argmin": (aten.argmin.default, (x, dim, keep), {}),
        }
        if name in wanted:
            return wanted[name]
        if name in ("sum", "mean", "amax") and b.random.random() < 0.1:
            return _overload(name), (x,), {}
        if name in ("var", "std", "var_mean", "std_mean"):
            return getattr(packet, "correction"), (b.floating(), [dim]), {"correction": 0, "keepdim": keep}  # noqa: B009
        listed = {
            "sum": "dim_IntList",
            "mean": "dim",
            "logsumexp": "default",
            "amax": "default",
            "amin": "default",
        }
        overload = listed.get(name, "dim")
        dims = [dim] if name in (*listed, "nansum", "nanmean", "special_logsumexp") else dim
        return getattr(packet, overload if overload in packet.overloads() else "default"), (x, dims, keep), {}

    return make


def _matmul(name: str) -> Callable[[Builder], Call]:
    def make(b: Builder) -> Call:
        x = b.floating()
        y = b.one_of(b.square, b.floating(), b.floating())
        if name in ("mv", "dot"):
            y = b.one_of(b.vector, b.floating())
        if name == "linear":
            return aten.linear.default, (x, b.one_of(b.square, y), b.one_of(None, b.vector)), {}
        if name in ("addmm", "baddbmm", "addmv"):
            return _overload(name), (b.one_of(b.vector, b.floating()), x, y), {}
        return _overload(name), (x, y), {}

    return make


def _einsum(b: Builder) -> Call:
    equation = b.one_of(
        "bsd,de->bse",
        "bsd,bsd->bs",
        "bsd,bte->bst",
        "bsd,bse->bde",
        "bsd,cs->bcd",
        "sd,de->se",
        "bsd->sb",
        "bsd->bd",
    )
    count = equation.count(",") + 1
    operands = [b.floating(), b.one_of(b.square, b.floating())][:count]
    return aten.einsum.default, (equation, operands), {}


def _cat(name: str) -> Callable[[Builder], Call]:
    def make(b: Builder) -> Call:
        x = b.floating()
        y = b.one_of(x, b.floating())
        return _overload(name), ([x, y], b.dim(x)), {}

    return make


def _stack(b: Builder) -> Call:
    x = b.floating()
    return aten.stack.default, ([x, b.one_of(x, b.floating())], b.dim(x)), {}


def _pad(name: str) -> Callable[[Builder], Call]:
    def make(b: Builder) -> Call:
        x = b.floating()
        amounts = [b.one_of(0, 0, 1, -1, 2) for _ in range(2 * len(shape(x)))]
        return _overload(name), (x, amounts), {}

    return make


def _index(b: Builder) -> Call:
    """A table by token ids or positions, tokens by whatever; the wanted tokens."""
    choice = b.random.randrange(5)
    if choice == 0:
        return aten.index.Tensor, (b.x, [None, b.keep]), {}
    if choice == 1:
        index = aten.arange.default, (b.rows,)
        rows = b.add(*index)
        return aten.index.Tensor, (b.any(), [rows]), {}
    x, index_node = b.one_of(b.table, b.any()), b.any("integer")
    small = b.add(aten.remainder.Scalar, (index_node, 3))
    return aten.index.Tensor, (x, [*([None] * b.random.randrange(2)), small]), {}


def _small(b: Builder, most: int = 3) -> Node:
    return b.add(aten.remainder.Scalar, (b.any("integer"), most))


def _embedding(b: Builder) -> Call:
    return aten.embedding.default, (b.one_of(b.table, b.square), _small(b, 4)), {}


def _index_select(b: Builder) -> Call:
    x = b.any()
    places = b.add(aten.remainder.Scalar, (b.add(aten.arange.default, (b.tokens,)), 3))
    return aten.index_select.default, (x, b.dim(x), b.one_of(_small(b), b.keep, places)), {}


def _gather(b: Builder) -> Call:
    x, dim = b.floating(), -1
    if b.random.random() < 0.5:
        dim = b.dim(x)
        index = b.add(aten.argsort.default, (x, dim))
        return aten.gather.default, (x, dim, index), {}
    index = b.add(aten.expand.default, (b.add(aten.unsqueeze.default, (_small(b), -1)), [-1, -1, 2]))
    return aten.gather.default, (b.one_of(x, b.x), b.one_of(dim, 1), index), {}


def _take_along(b: Builder) -> Call:
    x = b.floating()
    dim = b.dim(x)
    return aten.take_along_dim.default, (x, b.add(aten.argsort.default, (x, dim)), dim), {}


def _scatter(name: str) -> Callable[[Builder], Call]:
    def make(b: Builder) -> Call:
        x = b.floating()
        dim = b.dim(x)
        index = b.add(aten.argsort.default, (b.one_of(x, b.floating()), dim))
        y = b.one_of(x, b.floating())
        if b.one_of(True, False):
            lifted = b.add(aten.unsqueeze.default, (_small(b), -1))
            x, index, y = b.x, b.add(aten.expand.default, (lifted, [-1, -1, 4])), b.x
        if name == "scatter_reduce":
            return aten.scatter_reduce.two, (x, dim, index, y, "sum"), {}
        return _overload(name, "src"), (x, dim, index, y), {}

    return make


def _put(name: str) -> Callable[[Builder], Call]:
    def make(b: Builder) -> Call:
        x = b.any("float")
        if b.random.random() < 0.5:
            index = b.add(aten.arange.default, (b.rows,))
        else:
            index = b.add(aten.argsort.default, (b.vector,))
        y = b.one_of(x, b.floating())
        if "put" in name:
            return _overload(name), (x, [index], y, b.one_of(True, False)), {}
        return _overload(name), (x, 0, index, y), {}

    return make


def _routed(kind: str) -> Callable[[Builder], Call]:
    """A router: each token's rows in the order of their experts, a product for each, and back to their places."""

    def make(b: Builder) -> Call:
        x = b.floating()
        if len(shape(x)) != 3 or shape(x)[2] != 4:
            x = b.x
        flat = b.add(aten.reshape.default, (x, [-1, 4]))
        wrong = b.random.random() < 0.3
        chosen = b.add(aten.topk.default, (flat, 2, 1))
        ids = next(u for u in chosen.users if u.args[1] == 1)
        listed = b.add(aten.reshape.default, (ids, [-1]))
        sort = b.add(aten.sort.default, (listed,))
        ordered, places = (next(u for u in sort.users if u.args[1] == i) for i in (0, 1))
        own = b.add(aten.floor_divide.default, (places, 2))
        rows = b.add(aten.index.Tensor, (flat, [places if wrong and kind == "index" else own]))
        counts = b.add(aten.histc.default, (b.add(aten.to.dtype, (ordered, torch.float32)), 4, 0, 3))
        ends = b.add(aten.cumsum.default, (counts, 0), {"dtype": torch.int32})
        if kind == "histc":
            return aten.cumsum.default, (counts, 0), {"dtype": torch.int32}
        if kind == "sort":
            return aten.mul.Tensor, (ordered, b.one_of(ordered, listed)), {}
        product = b.add(torch.ops.transformers.grouped_mm_fallback.default, (rows, b.experts, ends))
        if kind == "grouped":
            shifted = b.add(aten.flip.default, (ends, [0])) if wrong else ends
            product = b.add(torch.ops.transformers.grouped_mm_fallback.default, (product, b.experts, shifted))
        if b.one_of(True, False):
            empty = b.add(aten.zeros_like.default, (flat,))
            return (
                aten.index_add.default,
                (empty, 0, own if not (wrong and kind == "put") else places, product),
                {},
            )
        count = b.add(aten.sym_size.int, (places, 0))
        steps = b.add(aten.arange.default, (count,))
        back = b.add(aten.index_put.default, (b.add(aten.zeros_like.default, (places,)), [places], steps))
        if b.one_of(True, False):
            back = b.add(aten.argsort.default, (places,))
        if wrong and kind == "put":
            back = places
        own_order = b.add(aten.index.Tensor, (product, [back]))
        pairs = b.add(aten.reshape.default, (own_order, [-1, 2, 4]))
        summed = b.add(aten.sum.dim_IntList, (pairs, [1]))
        return aten.reshape.default, (summed, [b.rows, b.tokens, 4]), {}

    return make


def _conv(name: str) -> Callable[[Builder], Call]:
    def make(b: Builder) -> Call:
        x = b.one_of(b.floating(), b.add(aten.transpose.int, (b.floating(), 1, 2)))
        if name == "conv1d" or name == "convolution":
            weight = b.add(aten.slice.Tensor, (b.experts, 2, 0, b.one_of(1, 2, 3)))
            if name == "convolution":
                return aten.convolution.default, (x, weight, None, [1], [0], [1], False, [0], 1), {}
            return aten.conv1d.default, (x, weight, None, [1], [b.one_of(0, 1)]), {}
        lifted = b.add(aten.unsqueeze.default, (x, 2))
        weight = b.add(
            aten.unsqueeze.default, (b.add(aten.slice.Tensor, (b.experts, 2, 0, b.one_of(1, 3))), 2)
        )
        if name == "conv2d":
            return aten.conv2d.default, (lifted, weight), {}
        return (
            aten.conv3d.default,
            (b.add(aten.unsqueeze.default, (lifted, 2)), b.add(aten.unsqueeze.default, (weight, 2))),
            {},
        )

    return make


def _norm(name: str) -> Callable[[Builder], Call]:
    def make(b: Builder) -> Call:
        x = b.floating()
        if name in ("layer_norm", "rms_norm"):
            if b.random.random() < 0.5:  # tokens or rows are what is normalised
                x = b.add(aten.transpose.int, (x, b.dim(x), -1))
            last = aten_size(b, x, -1)
            return _overload(name), (x, [last], *([b.vector] if last == 4 else [])), {}
        if name == "group_norm":
            return aten.group_norm.default, (x, b.one_of(1, 2)), {}
        if len(shape(x)) < 2:  # which PyTorch does not check: it reads beyond the sizes
            raise NotHere
        return aten.batch_norm.default, (x, None, None, b.vector, b.vector, False, 0.1, 1e-5, False), {}

    return make


def _filled(name: str) -> Callable[[Builder], Call]:
    def make(b: Builder) -> Call:
        x = b.any("float", "integer")
        sizes = [b.one_of(b.rows, b.tokens, 2, 4) for _ in range(b.random.randrange(1, 4))]
        if name.endswith("_like"):
            return _overload(name), ((x, 2) if name == "full_like" else (x,)), {}
        value = (2,) if "full" in name else ()
        if name.startswith("new_"):
            return _overload(name), (x, sizes, *value), {}
        return getattr(aten, name).default if name == "full" else _overload(name), (sizes, *value), {}

    return make


def _triangle(name: str) -> Callable[[Builder], Call]:
    def make(b: Builder) -> Call:
        ones = b.add(aten.ones.default, ([b.tokens, b.tokens],), {"dtype": torch.float64})
        return _overload(name), (b.one_of(ones, b.floating()), b.one_of(-1, 0, 1)), {}

    return make


def _sdpa(b: Builder) -> Call:
    x = b.floating()
    if len(shape(x)) != 3:
        raise NotHere
    over_tokens = b.add(aten.unsqueeze.default, (x, 1))
    over_heads = b.add(aten.reshape.default, (b.x, [b.rows, b.tokens, 2, 2]))
    q = b.one_of(over_tokens, over_heads)
    return aten.scaled_dot_product_attention.default, (q, q, q), {}


def _slice(b: Builder) -> Call:
    x = b.any()
    return (
        aten.slice.Tensor,
        (x, b.dim(x), b.one_of(0, 0, 1, -1, -2), b.one_of(2**63 - 1, 2**63 - 1, 2, -1)),
        {},
    )


def _slice_scatter(b: Builder) -> Call:
    x = b.floating()
    dim = b.dim(x)
    piece = b.add(aten.slice.Tensor, (b.one_of(x, b.floating()), dim, 1, 2**63 - 1))
    return aten.slice_scatter.default, (x, piece, dim, b.one_of(1, 1, 0), 2**63 - 1), {}


def _select(b: Builder) -> Call:
    """A place from the beginning, from the end, or so far from the beginning as there are tokens."""
    if b.random.random() < 0.15:
        return aten.select.int, (b.table, 0, b.add_number(b.tokens, b.one_of(-1, 0))), {}
    x = b.any()
    x, dim = (b.x, 1) if b.random.random() < 0.4 else (x, b.dim(x))
    index = b.one_of(0, 1, -1, -2, b.add_number(b.tokens, -1), b.add_number(b.tokens, -2))
    return aten.select.int, (x, dim, index), {}


def _select_scatter(b: Builder) -> Call:
    x = b.floating()
    dim = b.dim(x)
    piece = b.add(aten.select.int, (b.one_of(x, b.floating()), dim, 0))
    return aten.select_scatter.default, (x, piece, dim, b.one_of(0, 1)), {}


def _permute(b: Builder) -> Call:
    x = b.any()
    order = list(range(len(shape(x))))
    b.random.shuffle(order)
    return aten.permute.default, (x, order), {}


def _movedim(name: str) -> Callable[[Builder], Call]:
    def make(b: Builder) -> Call:
        x = b.any()
        overload = "intlist" if name in ("movedim", "moveaxis") else "default"
        if overload == "intlist":
            return _overload(name, "int"), (x, b.dim(x), b.dim(x)), {}
        return _overload(name, "int"), (x, b.dim(x), b.dim(x)), {}

    return make


def _alone(name: str, *more: Any, overload: str = "") -> Callable[[Builder], Call]:
    def make(b: Builder) -> Call:
        return _overload(name, overload), (b.any(), *more), {}

    return make


def _expand(name: str) -> Callable[[Builder], Call]:
    def make(b: Builder) -> Call:
        x = b.any("float")
        sizes = [b.one_of(-1, -1, b.rows, b.tokens, 4) for _ in shape(x)]
        if name == "expand_as":
            return aten.expand_as.default, (b.any(), x), {}
        return _overload(name), (x, [b.one_of(2, b.rows, b.tokens), *sizes]), {}

    return make


def _repeat(name: str) -> Callable[[Builder], Call]:
    def make(b: Builder) -> Call:
        x = b.floating()
        times = [b.one_of(1, 1, 2) for _ in shape(x)]
        if name == "repeat":
            times = [b.one_of(1, 2, b.rows), *times]
        return _overload(name), (x, times), {}

    return make


def _complex_pair(b: Builder) -> Call:
    x = b.add(aten.reshape.default, (b.x, [b.rows, b.tokens, 2, 2]))
    return aten.view_as_complex.default, (b.one_of(x, b.floating()),), {}


def _real_pair(b: Builder) -> Call:
    return aten.view_as_real.default, (b.add(aten.complex.default, (b.floating(), b.floating())),), {}


def _roll(b: Builder) -> Call:
    x = b.any()
    return aten.roll.default, (x, [1], b.one_of([b.dim(x)], [b.dim(x)], [])), {}


def _diff(b: Builder) -> Call:
    x = b.any("float", "integer")
    return aten.diff.default, (x, 1, b.dim(x)), {}


def _arange(b: Builder) -> Call:
    ends: list[Args] = [(b.tokens,), (2, b.add_number(b.tokens, 2)), (0, b.tokens, 1), (6,), (b.rows,)]
    args = b.one_of(*ends)
    overload = {1: "default", 2: "start", 3: "start_step"}[len(args)]
    return getattr(aten.arange, overload), args, {"dtype": b.one_of(torch.int64, torch.float64)}


def _one_hot(b: Builder) -> Call:
    return aten.one_hot.default, (_small(b, 4), 4), {}


def _bincount(b: Builder) -> Call:
    return aten.bincount.default, (b.any("integer"), None, 4), {}


def _running_sum(b: Builder) -> Call:
    return torch.ops.kvcompile.running_sum.default, (b.any("integer"), "sum"), {}


def _reduced(b: Builder) -> Call:
    return aten.max.default, (b.any("integer", "float"),), {}


def _split(name: str) -> Callable[[Builder], Call]:
    def make(b: Builder) -> Call:
        x = b.any()
        dim = b.dim(x)
        if name == "unbind":
            return aten.unbind.int, (x, dim), {}
        if name == "split_with_sizes":
            return aten.split_with_sizes.default, (x, [1, 3], dim), {}
        if name == "tensor_split":
            return aten.tensor_split.sections, (x, 2, dim), {}
        return _overload(name, "Tensor"), (x, 2, dim), {}

    return make


def _meshgrid(b: Builder) -> Call:
    return aten.meshgrid.default, ([b.any("float", "integer"), b.vector],), {}


def _topk(b: Builder) -> Call:
    x = b.floating()
    return aten.topk.default, (x, 2, b.dim(x)), {}


# Some of those that torch itself calls pointwise.
TAGGED = (
    *(
        "add",
        "mul",
        "sub",
        "div",
        "exp",
        "sin",
        "cos",
        "tanh",
        "sigmoid",
        "neg",
        "abs",
        "sign",
        "pow",
        "rsqrt",
        "sqrt",
    ),
    *(
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "bitwise_and",
        "bitwise_or",
        "bitwise_not",
        "log",
        "reciprocal",
        "round",
    ),
)
_REDUCED = (
    *(
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "any",
        "all",
        "logsumexp",
        "prod",
        "argmax",
        "argmin",
        "nansum",
    ),
    *(
        "nanmean",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "norm",
        "linalg_vector_norm",
        "median",
        "nanmedian",
        "mode",
    ),
    *("count_nonzero", "special_logsumexp", "kthvalue"),
)
_MADE: dict[str, Callable[[Builder], Call]] = {
    **{name: _pointwise(name) for name in NAMES if hasattr(aten, name)},
    **{name: _pointwise(name) for name in TAGGED},
    **{name: _reduction(name) for name in _REDUCED},
    **{
        name: _matmul(name)
        for name in (
            "matmul",
            "bmm",
            "mm",
            "mv",
            "dot",
            "linear",
            "addmm",
            "baddbmm",
            "addmv",
            "linalg_matmul",
        )
    },
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), _view),
    **{name: _cat(name) for name in ("cat", "concat", "concatenate")},
    **{name: _pad(name) for name in ("constant_pad_nd", "pad")},
    **{name: _scatter(name) for name in ("scatter", "scatter_add", "scatter_reduce")},
    **{name: _put(name) for name in ("index_put", "_unsafe_index_put", "index_add", "index_copy")},
    **{name: _conv(name) for name in ("conv1d", "conv2d", "conv3d", "convolution")},
    **{name: _norm(name) for name in ("layer_norm", "rms_norm", "group_norm", "batch_norm")},
    **{name: _triangle(name) for name in ("tril", "triu")},
    **{name: _movedim(name) for name in ("transpose", "swapaxes", "swapdims", "movedim", "moveaxis")},
    **{
        name: _alone(name)
        for name in ("t", "mT", "adjoint", "numpy_T", "ravel", "atleast_1d", "atleast_2d", "atleast_3d")
    },
    **{name: _expand(name) for name in ("expand", "expand_as", "broadcast_to")},
    **{name: _repeat(name) for name in ("repeat", "tile")},
    **{name: _split(name) for name in ("split", "split_with_sizes", "chunk", "unbind", "tensor_split")},
    **{
        name: _filled(name)
        for name in (
            "zeros",
            "ones",
            "full",
            "zeros_like",
            "ones_like",
            "full_like",
            "new_zeros",
            "new_ones",
            "new_full",
        )
    },
    **{name: _unary_dim(name) for name in ("cumsum", "cumprod", "logcumsumexp")},
    **{name: _unary_dim(name, kinds=("float", "integer")) for name in ("cummax", "cummin")},
    **{name: _unary_dim(name, overload="int") for name in ("softmax", "log_softmax")},
    **{name: _unary_dim(name, False) for name in ("_softmax", "_log_softmax")},
    "glu": _unary_dim("glu"),
    "argsort": _unary_dim("argsort"),
    "sort": lambda b: (aten.sort.default, (b.one_of(b.x, b.any("float", "integer")), b.one_of(-1, 1, 0)), {}),
    "topk": _topk,
    "einsum": _einsum,
    "outer": _matmul("outer"),
    "ger": _matmul("ger"),
    "stack": _stack,
    "index": _index,
    "_unsafe_index": lambda b: (aten._unsafe_index.Tensor, (b.one_of(b.table, b.any()), [_small(b)]), {}),
    "embedding": _embedding,
    "index_select": _index_select,
    "gather": _gather,
    "take_along_dim": _take_along,
    "one_hot": _one_hot,
    "bincount": _bincount,
    "slice": _slice,
    "narrow": lambda b: (aten.narrow.default, (x := b.any(), b.dim(x), b.one_of(0, 1), b.one_of(1, 2)), {}),
    "select": _select,
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    "permute": _permute,
    "flatten": lambda b: (aten.flatten.using_ints, (b.any(), b.one_of(0, 1), -1), {}),
    "unflatten": lambda b: (aten.unflatten.int, (b.any(), -1, [2, 2]), {}),
    "squeeze": lambda b: (aten.squeeze.dim, (x := b.any(), b.dim(x)), {}),
    "unsqueeze": lambda b: (aten.unsqueeze.default, (b.any(), b.one_of(0, 1, -1)), {}),
    "view_as": lambda b: (aten.view_as.default, (b.any(), b.any()), {}),
    "reshape_as": lambda b: (aten.reshape_as.default, (b.any(), b.any()), {}),
    "repeat_interleave": lambda b: (aten.repeat_interleave.self_int, (x := b.any(), 2, b.dim(x)), {}),
    "diagonal": lambda b: (aten.diagonal.default, (b.floating(), 0, b.one_of(0, 1), -1), {}),
    "broadcast_tensors": lambda b: (aten.broadcast_tensors.default, ([b.floating(), b.floating()],), {}),
    "view_as_complex": _complex_pair,
    "view_as_real": _real_pair,
    "roll": _roll,
    "flip": lambda b: (aten.flip.default, (x := b.any(), [b.dim(x)]), {}),
    "fliplr": lambda b: (aten.fliplr.default, (b.any(),), {}),
    "flipud": lambda b: (aten.flipud.default, (b.any(),), {}),
    "diff": _diff,
    "arange": _arange,
    "scalar_tensor": lambda b: (aten.scalar_tensor.default, (b.one_of(3, b.tokens),), {}),
    "linspace": lambda b: (aten.linspace.default, (0, 1, 4), {}),
    "logspace": lambda b: (aten.logspace.default, (0, 1, 4), {}),
    "eye": lambda b: (aten.eye.default, (b.one_of(4, b.tokens),), {"dtype": torch.float64}),
    "tril_indices": lambda b: (aten.tril_indices.default, (4, 4), {}),
    "hann_window": lambda b: (aten.hann_window.default, (4,), {}),
    "meshgrid": _meshgrid,
    "scaled_dot_product_attention": _sdpa,
}
TEMPLATES: list[Template] = [
    *(Template(f"aten::{name}", make) for name, make in _MADE.items()),
    Template("aten::max", _reduced),
    Template("aten::sort", _routed("sort")),
    Template("aten::histc", _routed("histc")),
    Template("aten::index", _routed("index")),
    Template("aten::index_put", _routed("put")),
    Template("transformers::grouped_mm_fallback", _routed("grouped")),
    Template("kvcompile::running_sum", _running_sum),
]
# Uninitialised memory, and what the tests have no module or kernel for.
WITHOUT = {
    *(
        f"aten::{name}"
        for name in (
            "empty",
            "empty_strided",
            "empty_permuted",
            "empty_like",
            "new_empty",
            "new_empty_strided",
        )
    ),
    *("aten::_grouped_mm", "kvcompile::attention", "kvcompile::opaque"),
}
MISSING = {name for name in RULES if name not in {t.key for t in TEMPLATES}} - WITHOUT
