"""Which attention sites are divided over ranks by their heads, and how.

    Hkv % ranks == 0   each rank has Hkv / ranks KV heads and the query heads that read them
    ranks % Hkv == 0   a KV head is on ranks / Hkv ranks, each with its part of the query heads (so is a latent row)

Anything else is refused. A site whose scores know the number of the query's head in a way that no slice gives, stays
whole: every rank computes all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from kvcompile.errors import PlanError
from kvcompile.passes.records import AttentionSite
from kvcompile.passes.shard.cuts import Cut, Placement, blocks, repeated, whole
from kvcompile.passes.shard.form import sizes
from kvcompile.plan import Decision, Plan


@dataclass(frozen=True)
class Division:
    """A site's heads over ranks; None: all ranks have all of them.

    because: why it is whole, where it is
    """

    queries: Cut | None
    keys: Cut | None
    because: str = ""

    @property
    def divided(self) -> bool:
        return self.queries is not None

    @property
    def repeats(self) -> bool:
        """Whether several ranks keep the same KV head."""
        return self.divided and (self.keys is None or not self.keys.exact)

    def of_heads(self, placed: int, cut: Cut | None) -> Placement:
        """The placement of a tensor [B, heads, S, D]."""
        return tuple(cut if dim == 1 else None for dim in range(placed))


def divide(sites: Sequence[AttentionSite], plan: Plan, ranks: int) -> tuple[Division, ...]:
    """How each site is divided over `ranks`.

    Raises:
        PlanError: head counts that do not divide, all of them told; or a layout that needs all heads of a layer.
    """
    reasons = {site.layer: _stays_whole(site) for site in sites}
    shared: dict[int, str] = {}
    for site in sites:  # sites that read one cache are divided alike
        if reasons[site.layer]:
            shared.setdefault(site.kv_source, reasons[site.layer])
    check_heads(
        ((site.num_qo_heads, site.num_kv_heads) for site in sites if site.kv_source not in shared), ranks
    )
    found = []
    for site, decision in zip(sites, plan.decisions, strict=True):
        if reason := shared.get(site.kv_source):
            found.append(Division(None, None, reason))
            continue
        keys = site.num_kv_heads
        cut = blocks(keys, ranks) if keys % ranks == 0 else repeated(keys, ranks)
        division = Division(blocks(site.num_qo_heads, ranks), cut)
        _check_layout(decision, division, plan)
        found.append(division)
    return tuple(found)


def check_heads(heads: Iterable[tuple[int, int]], ranks: int) -> None:
    """Refuse query and KV heads that do not divide over `ranks`.

    Raises:
        PlanError: with all of them, and the numbers of ranks that would do.
    """
    counts = sorted(set(heads))
    if all(fits(q, kv, ranks) for q, kv in counts):
        return
    most = max((q for q, _ in counts), default=1)
    good = [n for n in range(1, most + 1) if all(fits(q, kv, n) for q, kv in counts)]
    told = ", ".join(f"{q} query and {kv} KV heads" for q, kv in counts)
    raise PlanError(
        f"parallel: tensor: {ranks}: this model's attention has {told}, which do not divide over {ranks} ranks: "
        "query heads must be a multiple of the ranks, and KV heads a multiple or a divisor of them. "
        f"Use tensor: {', '.join(map(str, good))}"
    )


def fits(queries: int, keys: int, ranks: int) -> bool:
    """Whether heads divide over ranks, KV heads repeated where the ranks are more."""
    return queries % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)


def _stays_whole(site: AttentionSite) -> str:
    """Why a site cannot be divided, or an empty string."""
    mod = site.score.mod
    if mod is not None and any(instruction.op == "h" for instruction in mod.instructions):
        return "its scores depend on the number of the head by an expression"
    if site.rerun and any(part.heads > 1 for mask in site.rerun for part in mask.static):
        return "its mask, which is computed from activations, tells heads apart"
    leaves = [leaf for leaf in site.leaves if leaf.kind == "pair"]
    if any(len(leaf.order) > 3 for leaf in leaves):
        return "what is added to its scores has a value for each head, computed from activations"
    return ""


def _check_layout(decision: Decision, division: Division, plan: Plan) -> None:
    """Raises PlanError where what a layout keeps is chosen by heads that no rank has all of."""
    layout = decision.layout
    if layout.followed is None:
        return
    ranks = 0 if division.queries is None else len(division.queries.ranks)
    dtype, limit = plan.torch_dtype, plan.limits.max_tokens
    where = f"layer {decision.layer} ({decision.module_path}, {decision.source}): {layout}"
    heads = {spec.shape[0] for spec in decision.buffers(dtype, limit)}
    if heads != {decision.num_kv_heads}:
        raise PlanError(
            f"parallel: tensor: {ranks}: {where}: its scores are of a whole layer, over all heads, and a rank has some "
            "of them; use granularity: kv_head, or no tensor parallelism"
        )
    if division.repeats:
        raise PlanError(
            f"parallel: tensor: {ranks}: {where}: what stays, or is read, is chosen by all query heads of a KV head, "
            f"and here these are on several ranks ({decision.num_kv_heads} KV heads, {ranks} ranks); use as many ranks "
            "as divide the KV heads, or a layout that does not go by scores"
        )


def of_bias(node: Node, division: Division) -> Placement:
    """The placement of sinks [Hq], slopes [Hq], or a bias [Hq or 1, ..]: by the query's head."""
    own = sizes(node)
    cut = division.queries
    first = cut if cut is not None and own and own[0] == cut.size and cut.size > 1 else None
    return (first, *whole(len(own) - 1)) if own else ()
