"""Which norm a graph computes: RMSNorm and LayerNorm as models write them, with the order in which they round.

| how | what |
|---|---|
| | w * to(h * rsqrt(mean(h^2) + eps)): Llama rounds what it has scaled, and then its product with w |
| wide | to(w * (h * rsqrt(..))), where w may be cast as well: OLMo, Helium; rounded once |
| wide one | to((1 + w) * (h * rsqrt(..))): Gemma, Qwen3-Next |
| plain | to(h * rsqrt(..)), without w |
| layer, with shift, plain | layer_norm(h, w, b) |
| centred | wide, of h - mean(h): Cohere |

h is in float32: cast, or as the model has it. `to` is `to.dtype`, or `type_as` the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

aten = torch.ops.aten
HELD = ("placeholder", "get_attr")
OWN = "own"


class NormNodes(NamedTuple):
    """A norm. token: h; tensors: w, then b, as far as it has them; between: its nodes, users first, y before all

    how: words of the table, of which it says those of a tensor as well
    dtype: what it is rounded to, by name, where it is computed in float32, OWN: the token's; "": it has no casts
    """

    token: Node
    tensors: tuple[Node, ...]
    eps: float
    how: str
    dtype: str
    between: tuple[Node, ...]


def norm_of(node: Node) -> NormNodes | None:
    """The norm whose root of a mean, or whose layer_norm, this is."""
    if node.target is aten.layer_norm.default:
        return _layer_norm(node)
    return _spelled(node) if node.target is aten.rsqrt.default else None


def is_call(node: Any, target: Any) -> bool:
    """Whether it is a call of that which nobody else reads."""
    return isinstance(node, Node) and node.target is target and len(node.users) == 1


def normed(x: Tensor, tensors: Sequence[Tensor], eps: float, how: str, dtype: str) -> Tensor:
    """A norm spelled out, as the graph had it; arguments: those of `NormNodes`."""
    words = how.split()
    own = x.float() if dtype else x

    def rounded(of: Tensor) -> Tensor:
        return of.to(x.dtype if dtype == OWN else getattr(torch, dtype)) if dtype else of

    if "layer" in words:
        weight = None if "plain" in words else tensors[0]
        return rounded(
            F.layer_norm(own, own.shape[-1:], weight, tensors[-1] if "shift" in words else None, eps)
        )
    if "centred" in words:
        own = own - own.mean(-1, keepdim=True)
    own = own * torch.rsqrt(own.pow(2).mean(-1, keepdim=True) + eps)
    if "plain" in words:
        return rounded(own)
    (weight,) = tensors
    if not {"wide", "centred"} & {*words}:
        return weight * rounded(own)
    weight = weight.float() if dtype else weight
    return rounded((1.0 + weight if "one" in words else weight) * own)


def _layer_norm(node: Node) -> NormNodes | None:
    """layer_norm of a token, or of one that is cast before it, and rounded behind it."""
    given = (*node.args, *(None, None, 1e-5)[max(0, len(node.args) - 2) :])
    token, shape, weight, shift, eps = given[:5]
    own = all(of is None or (isinstance(of, Node) and of.op in HELD) for of in (weight, shift))
    if node.kwargs or not isinstance(token, Node) or not isinstance(shape, list | tuple) or not own:
        return None
    if len(shape) != 1 or not isinstance(eps, float):
        return None
    tensors = tuple(of for of in (weight, shift) if isinstance(of, Node))
    how = ("layer", *(("plain",) if weight is None else ()), *(("shift",) if shift is not None else ()))
    if not (is_call(token, aten.to.dtype) and token.args[1] is torch.float32 and not token.kwargs):
        return NormNodes(token, tensors, eps, " ".join(how), "", (node,))
    of, made = token.args[0], next(iter(node.users), node)
    if not isinstance(of, Node) or len(node.users) != 1 or tensors:
        # Of weights in float32 nobody knows the kernel.
        return None
    dtype = _rounds(made, node, of)
    return None if dtype is None else NormNodes(of, (), eps, " ".join(how), dtype, (made, node, token))


def _spelled(root: Node) -> NormNodes | None:
    """A norm in steps, whose root this is."""
    shifted = _argument(root, aten.rsqrt.default, aten.add.Tensor)
    mean = _argument(shifted, aten.add.Tensor, aten.mean.dim)
    power = _argument(mean, aten.mean.dim, aten.pow.Tensor_Scalar)
    if shifted is None or mean is None or power is None:
        return None
    eps, own, scaled = shifted.args[1], power.args[0], next(iter(root.users))
    plain = tuple(mean.args[1:]) == ([-1], True) and power.args[1] == 2
    if not plain or scaled.target is not aten.mul.Tensor or set(scaled.args) != {own, root}:
        return None
    if not isinstance(eps, float) or not isinstance(own, Node) or scaled.kwargs:
        return None
    before: tuple[Node, ...] = (root, shifted, mean, power)
    centred = _centred(own)
    if centred is not None:
        before, own = (*before, *centred[0]), centred[1]
    token, cast = own, own.target is aten.to.dtype and own.args[1] is torch.float32 and not own.kwargs
    if cast:
        before, token = (*before, own), own.args[0]  # type: ignore[assignment]
        if len(own.users) != 2:
            return None
    found = _behind(scaled, token, cast) if isinstance(token, Node) else None
    if found is None:
        return None
    behind, tensors, dtype, words = found
    if centred is not None:
        if words != (("wide",) if cast else ()):
            return None
        words = ("centred",)
    return NormNodes(token, tensors, eps, " ".join(words), dtype, (*behind, *before))


def _centred(own: Node) -> tuple[tuple[Node, ...], Node] | None:
    """Nodes of h - mean(h), and h; None: it is no such difference."""
    if own.target is not aten.sub.Tensor or own.kwargs or len(own.users) != 2:
        return None
    of, mean = own.args
    if not is_call(mean, aten.mean.dim) or not isinstance(mean, Node) or not isinstance(of, Node):
        return None
    plain = mean.args[0] is of and tuple(mean.args[1:]) == ([-1], True) and not mean.kwargs
    return ((own, mean), of) if plain else None


def _behind(
    scaled: Node, token: Node, cast: bool
) -> tuple[tuple[Node, ...], tuple[Node, ...], str, tuple[str, ...]] | None:
    """What a norm does with what it has scaled: nodes, users first; w; what it is rounded to; and how."""
    nodes: list[Node] = [scaled]
    dtype: str | None = None
    weight: _Weight | None = None
    wide = False
    while len(nodes[0].users) == 1 and (dtype is None or weight is None):
        user = next(iter(nodes[0].users))
        rounded = _rounds(user, nodes[0], token) if cast and dtype is None else None
        if rounded is not None:
            dtype = rounded
        elif weight is None and (weight := _weight(user, nodes[0], cast, dtype is None)) is not None:
            wide = cast and dtype is None
            nodes = [*weight.nodes, *nodes]
        else:
            break
        nodes.insert(0, user)
    if cast and dtype is None:
        return None
    words = ("plain",) if weight is None else ("wide", "one") if weight.one else ("wide",) if wide else ()
    return tuple(nodes), () if weight is None else (weight.tensor,), dtype or "", words


class _Weight(NamedTuple):
    """w of a norm; one: whether 1 is added to it; nodes: that cast it, and add, users first"""

    tensor: Node
    one: bool
    nodes: tuple[Node, ...]


def _weight(product: Node, scaled: Node, cast: bool, wide: bool) -> _Weight | None:
    """What multiplies. cast: whether the norm is computed in float32 by casts; wide: and this product as well"""
    if product.target is not aten.mul.Tensor or product.kwargs:
        return None
    pair = [given for given in product.args if given is not scaled]
    of = pair[0] if len(pair) == len(product.args) - 1 else None
    nodes: tuple[Node, ...] = ()
    one = False
    if is_call(of, aten.add.Tensor) and wide:
        assert isinstance(of, Node)
        one = tuple(of.args[1:]) == (1.0,) and not of.kwargs
        # In the model's dtype 1 + w is rounded, which nobody does here.
        narrow = cast and not (isinstance(of.args[0], Node) and of.args[0].target is aten.to.dtype)
        if not one or narrow:
            return None
        nodes, of = (*nodes, of), of.args[0]
    if is_call(of, aten.to.dtype) and cast and wide:
        assert isinstance(of, Node)
        if of.args[1] is not torch.float32 or of.kwargs:
            return None
        nodes, of = (*nodes, of), of.args[0]
    return _Weight(of, one, nodes) if isinstance(of, Node) and of.op in HELD else None


def _rounds(node: Node, scaled: Node, token: Node) -> str | None:
    """What a cast of it rounds to."""
    if node.target is aten.type_as.default:
        return OWN if tuple(node.args) == (scaled, token) else None
    if node.target is not aten.to.dtype or node.kwargs or len(node.args) != 2:
        return None
    return str(node.args[1]).removeprefix("torch.")


def _argument(node: Node | None, target: Any, of: Any) -> Node | None:
    """The first argument of a call of `target` that nobody else reads, if it is a call of `of` that it alone reads."""
    given = node.args[0] if node is not None and is_call(node, target) and not node.kwargs else None
    return given if isinstance(given, Node) and is_call(given, of) else None
