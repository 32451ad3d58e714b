"""Breaks of what runs over ranks: what is cut, what is summed, what is refused."""

from __future__ import annotations

from tests.breaks.broken import broken

FORMS = "tests/passes/shard/test_forms.py"
RANKS = "tests/runtime/parallel/test_ranks.py::test_ranks_that_do_not_have_the_same_do_not_begin"
SHARD = "tests/passes/shard/test_shard.py"

PARALLEL = (
    broken(
        "every rank adds the bias to its part of a sum",
        "passes/shard/build.py",
        "(node.target, node.args) if form.bare is None else form.bare",
        "(node.target, node.args)",
        FORMS,
    ),
    broken(
        "a sum counts an index on two ranks twice",
        "passes/shard/build.py",
        "if cut is None or not cut.exact:",
        "if cut is None:",
        FORMS,
    ),
    broken(
        "two dimensions may be cut over the same ranks",
        "passes/shard/build.py",
        " or not covers(result)",
        "",
        FORMS,
    ),
    broken(
        "any part of a reshaped dimension is one",
        "passes/shard/ties.py",
        "if len(again) != len(flat) or bool((again != flat).any()):",
        "if False:",
        "tests/passes/shard/test_ties.py",
    ),
    broken(
        "a slice begins at the operand's own start on each rank",
        "passes/shard/ties.py",
        "offset = own - self.start",
        "offset = own - own[0]",
        "tests/passes/shard/test_ties.py",
    ),
    broken(
        "scores of a KV head on several ranks are not refused",
        "passes/shard/sites.py",
        "    if division.repeats:",
        "    if False:",
        f"{SHARD}::test_what_a_rank_cannot_choose_is_refused",
    ),
    broken(
        "scores of a layer are not refused",
        "passes/shard/sites.py",
        "if heads != {decision.num_kv_heads}:",
        "if False:",
        f"{SHARD}::test_what_a_rank_cannot_choose_is_refused",
    ),
    broken(
        "each rank has the scales of all heads",
        "passes/shard/shard.py",
        "if len(values) == keys.size",
        "if False",
        f"{SHARD}::test_each_rank_has_its_own_scales_and_the_plan_of_its_heads",
    ),
    broken(
        "ranks begin with other weights",
        "kvcompile/runtime/parallel/group.py",
        "        if problems:\n            self.failed",
        "        if False:\n            self.failed",
        RANKS,
    ),
    broken(
        "ranks may be called with other tokens",
        "kvcompile/runtime/parallel/group.py",
        "        if others:\n            raise InputError(",
        "        if False:\n            raise InputError(",
        RANKS,
    ),
)
