"""RoPE on append: the op turns new queries and keys itself, so that RoPE, rounding and the write are one kernel.

    q, k = rotate(q), rotate(k); append(k, v); attend(q)    ->    cached_attention(q, k before RoPE, tables)

Only the plan changes: `insert_cache` then gives the op what detection found before the rotation, and the tables [P, R]
of all positions that the plan allows. What turned them in the graph is dead and goes. Verification compares with the
model's own rotation, which stays in the oracle's graph.

| not done | why |
|---|---|
| the reference runs the site | Inductor fuses the graph's own rotation as well |
| keys are stored before RoPE | they are turned when they are read |
| no rotary embedding was recognised | there is none to take over |
| layers share the keys and values | the others would turn queries alone |
| nothing limits the tokens | a table of all positions has no end |

KVCOMPILE_DISABLE=rope_on_append leaves it out, to bisect.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from kvcompile.passes.table import disabled, graph_pass
from kvcompile.plan import Decision, Plan

log = logging.getLogger(__name__)
NAME = "rope_on_append"


@graph_pass("rope_on_append")
def rope_on_append(plan: Plan) -> Plan:
    """The plan with RoPE in the op of every site that takes it."""
    if disabled(NAME):
        return plan
    decisions = tuple(
        replace(decision, rope_on_append=True) if refusal(decision, plan) is None else decision
        for decision in plan.decisions
    )
    log.info("%s: %d of %d sites", NAME, sum(d.rope_on_append for d in decisions), len(decisions))
    return replace(plan, decisions=decisions)


def refusal(decision: Decision, plan: Plan) -> str | None:
    """Why a site's rotation stays in the graph, or None."""
    if decision.kernels == "reference":
        return "the reference runs the site"
    if decision.layout.rotates_on_read:
        return "keys are stored before RoPE"
    if decision.rope is None:
        return "no rotary embedding was recognised"
    if sum(other.kv_source == decision.kv_source for other in plan.decisions) > 1:
        return "layers share the keys and values"
    if plan.limits.max_tokens is None:
        return "nothing limits the tokens"
    return None
