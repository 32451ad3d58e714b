"""The rules of translation, by the operator's name: one family a file."""

from __future__ import annotations

from kvcompile.passes.score_mod.rules import creation, indexing, joins, pointwise, reductions, views
from kvcompile.passes.score_mod.translate import Rule

RULES: dict[str, Rule] = {
    **pointwise.RULES,
    **views.RULES,
    **indexing.RULES,
    **creation.RULES,
    **joins.RULES,
    **reductions.RULES,
}
