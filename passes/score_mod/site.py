"""One attention block's scores: from the expression of its softmax input to what the site has and carries."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcompile.expression import Expr, K, Q, ScoreMod, const, integer, program, walk
from kvcompile.kernels.shared.expression import Places, evaluate
from kvcompile.passes.detect.refused import Refused
from kvcompile.passes.graph import told
from kvcompile.passes.score_mod import classify
from kvcompile.passes.score_mod.classify import OWN, PAST
from kvcompile.passes.score_mod.leaves import LeafRef
from kvcompile.passes.score_mod.make import and_, equal, lt, not_, or_
from kvcompile.passes.score_mod.normal_form import Form, NoNormalForm, normal_form, summed, terms
from kvcompile.passes.score_mod.prove import Prover
from kvcompile.passes.score_mod.tables import Tables
from kvcompile.passes.score_mod.weights import Weights
from kvcompile.specs import MaskSpec

_FUTURE = lt(Q, K)
_NOT_OF_ROWS = {"k", "key", "pair", "score", "reduction", "n", "b", "nb"}


@dataclass(frozen=True)
class Scores:
    """What happens between the raw products and the weights of the values.

    slopes: ALiBi's, [H]; sinks: logits [H]; mod: what is carried, over `leaves`
    reach: in texts of how many tokens what the model adds hides what it means to
    """

    sm_scale: float
    mask: MaskSpec
    softcap: float | None
    slopes: Tensor | None
    sinks: Tensor | None
    mod: ScoreMod | None
    leaves: tuple[LeafRef, ...]
    reach: int


def scores_of(weights: Weights, num_heads: int, head_dim: int, prover: Prover, tables: Tables) -> Scores:
    """Raises Refused with what no cache serves, or what cannot be carried."""
    try:
        form = normal_form(weights.body, weights.sink, prover)
    except NoNormalForm as reason:
        raise Refused(str(reason)) from reason
    form = _sink_of_weights(form)
    _check_past(form, prover)
    empty = _may_be_empty(form, weights, prover)
    if "score" not in form.value.names:
        raise Refused("the product of queries and keys does not enter the softmax")
    masked = classify.mask_of(form.seen, prover)
    valued = classify.value_of(form.value, form.sink is not None, head_dim**-0.5, prover)
    others = [root for root in (valued.rest, weights.weight) if root is not None]
    if masked.mask.window is not None and any(root.names & {"key", "pair"} for root in others):
        # What tokens bring along is kept for all of them: a window would be of no use.
        masked = classify.Masked(MaskSpec("causal"), form.seen)
    sinks = (
        None if form.sink is None else _of_heads(form.sink, num_heads, tables, "the sink logits depend on")
    )
    slopes = None if valued.slope is None else _of_heads(valued.slope, num_heads, tables, "slopes depend on")
    roots = {"score": valued.rest, "mask": masked.rest, "weight": weights.weight}
    for name, root in roots.items():
        if root is not None:
            _check_carried(name, root)
    mod, leaves = None, list[LeafRef]()
    if any(root is not None for root in roots.values()) or empty:
        instructions, numbers = program(roots, lambda leaf: _number(leaf, leaves))
        mod = ScoreMod(
            instructions,
            tuple(leaf.kind for leaf in leaves),
            numbers["score"],
            numbers["mask"],
            numbers["weight"],
            weights.renormalise,
            all(root is None or _by_distance(root) for root in roots.values()),
            empty,
        )
    mask, cap = masked.mask, valued.softcap
    return Scores(valued.sm_scale, mask, cap, slopes, sinks, mod, tuple(leaves), form.reach)


def _sink_of_weights(form: Form) -> Form:
    """The form with sink logits of weights alone: softmax of [s, sink] is softmax of [s - sink, 0]."""
    if form.sink is None or not form.sink.names & {"query", "q"} or form.sink.names & _NOT_OF_ROWS:
        return form
    value = summed([*terms(form.value), *((-factor, term) for factor, term in terms(form.sink))])
    return replace(form, value=value, sink=const(0, torch.float32))


def _number(leaf: LeafRef, leaves: list[LeafRef]) -> int:
    if leaf not in leaves:
        leaves.append(leaf)
    return leaves.index(leaf)


def _check_past(form: Form, prover: Prover) -> None:
    """Raises Refused unless no query can see a later key."""
    if prover.never(form.seen, _FUTURE):
        return
    if prover.holds(form.seen):
        unread = [told(e.value.node) for e in walk(form.value) if e.op == "leaf" and e.value.kind == "pair"]
        if unread:
            names = ", ".join(dict.fromkeys(unread))
            raise Refused(
                f"the mask is bidirectional: query 3 sees key 7, unless {names} hides it, which is not read"
            )
        raise Refused("the mask is bidirectional: query 3 sees key 7")
    at = prover.counterexample(not_(form.seen), _FUTURE) or {}
    certain = bool(at) and _is_so(form.seen, at)
    where = f": query {at['q']} sees key {at['k']}" if certain else ""
    text = f"the mask shows the future{where}"
    for node in walk(form.seen):
        for number in node.value if node.op == "sum" else ():
            size = abs(int(number)) + 1
            prefix = or_(PAST, lt(K, integer(size)))
            if size > 1 and prover.holds(equal_claims(form.seen, prefix)):
                text += f" (prefix({size}): a chunk of a prompt cannot show keys that come with the next)"
                raise Refused(text)
    if not certain:
        text = (
            f"that the mask never shows the future is not proved{where} (it depends on {_names(form.seen)})"
        )
    raise Refused(text)


def equal_claims(a: Expr, b: Expr) -> Expr:
    return or_(and_(a, b), and_(not_(a), not_(b)))


def _is_so(claim: Expr, at: dict[str, int]) -> bool:
    """Whether a claim about positions is true at these: a solver knows nothing of functions that round."""
    if claim.names & {"leaf", "reduction", "n", "nb", "b"} or max(at["q"], at["k"]) > 2**40:
        return False
    instructions, numbers = program({"claim": claim}, lambda _: 0)
    number = numbers["claim"]
    assert number is not None
    query, key = (torch.tensor([[at[name]]]) for name in ("q", "k"))
    places = Places(query, key, (1, 1), (), at["h"])
    (found,) = evaluate(ScoreMod(instructions), [number], places)
    return bool(found)


def _names(e: Expr) -> str:
    found = sorted({node.value.name for node in walk(e) if node.op == "leaf"})
    return ", ".join(found) or f"functions that round: {e}"


def _may_be_empty(form: Form, weights: Weights, prover: Prover) -> bool:
    """Whether a query may see no key; where hidden scores are finite it would then see all, later ones, too."""
    if form.sink is not None or prover.holds(form.seen, OWN):
        return False
    first = equal(K, integer(0))
    if prover.never(form.seen, first, equal(Q, integer(0))):
        raise Refused("the mask hides the present: query 0 does not see its own key, and there is no other")
    if prover.holds(form.seen, first) or prover.some_key(form.seen):
        return False
    if form.infinite:
        return True
    at = prover.counterexample(form.seen, OWN) or {}
    certain = at and _is_so(not_(form.seen), at)
    who = f"query {at['q']} does not see its own key" if certain else "a query need not see its own key"
    raise Refused(
        f"the mask hides the present: {who}, and one that sees no key at all would see every key, later ones too, "
        "because hidden scores are finite"
    )


def _of_heads(e: Expr, num_heads: int, tables: Tables, what: str) -> Tensor:
    """The values [H], float64, of an expression of the head and weights alone."""
    names = e.names - {"h", "leaf", "table"}
    if names & {"query", "key", "pair", "reduction", "score"}:
        raise Refused(f"{what} the tokens or on activations, not on weights alone")
    if names:
        raise Refused(f"{what} the position, not on weights alone")
    leaves: list[LeafRef] = []
    instructions, numbers = program({"value": e}, lambda leaf: _number(leaf, leaves))
    mod = ScoreMod(instructions, tuple(leaf.kind for leaf in leaves))
    tensors = [tables.value(leaf.node) for leaf in leaves]
    device = tensors[0].device if tensors else torch.device("cpu")
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    number = numbers["value"]
    assert number is not None
    (found,) = evaluate(mod, [number], Places(zero, zero, (num_heads, 1), tensors))
    if not isinstance(found, Tensor):
        return torch.full((num_heads,), float(found), dtype=torch.float64)
    return found.double().expand(1, num_heads, 1, 1, 1).reshape(num_heads)


def _check_carried(name: str, root: Expr) -> None:
    """Raises Refused where an expression has what nothing can carry."""
    what = {"score": "the scores", "mask": "the mask", "weight": "the weights after the softmax"}[name]
    if root.names & {"n"}:
        raise Refused(f"{what} depend on the length of the sequence, which grows with every token")
    if root.names & {"b", "nb"}:
        raise Refused(f"{what} depend on which sequence of the batch it is")
    if "reduction" in root.names:
        raise Refused(f"{what} pass through a function of all keys of a query")
    if name == "mask" and "score" in root.names:
        raise Refused("whether a key is seen depends on its score")
    if name == "weight" and root.names & {"score"}:
        raise Refused("what weighs the values is not the softmax of the scores")


def _by_distance(root: Expr) -> bool:
    """Whether positions enter as q - k alone."""
    if root.names & {"query", "key", "pair"}:
        return False
    for node in walk(root):
        if node.op == "sum":
            factors = dict(zip(node.args, node.value[1:], strict=True))
            q, k = factors.get(Q, 0), factors.get(K, 0)
            if q + k:
                return False
        elif node.args and any(arg in (Q, K) for arg in node.args):
            return False
    return True
