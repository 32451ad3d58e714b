"""Breaks of what runs over ranks: what is cut, what is summed, what is refused."""

from __future__ import annotations

from tests.breaks.broken import broken

FORMS = "tests/passes/shard/test_forms.py"
RANKS = "tests/runtime/parallel/test_ranks.py::test_ranks_that_do_not_have_the_same_do_not_begin"
STAGES = "tests/passes/stages/test_stages.py"
DEVICES = "tests/runtime/test_over_devices.py"
SHARD = "tests/passes/shard/test_shard.py"

PARALLEL = (
    broken(
        "ranks compare what nodes are called",
        "passes/graph_digest.py",
        "        known[node] = _hash((node.op, *what))",
        "        known[node] = _hash((node.name, *what))",
        "tests/passes/test_graph_digest.py",
    ),
    broken(
        "collectives may come in any order",
        "passes/graph_digest.py",
        "        if is_collective(node) or node.op",
        "        if node.op",
        "tests/passes/test_graph_digest.py",
    ),
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
        "layers on several stages may read one cache",
        "passes/stages/crossing.py",
        "if apart and self._of_tokens(value):",
        "if self._of_tokens(value):",
        f"{STAGES}::test_layers_that_read_one_cache_stay_together",
    ),
    broken(
        "a graph is cut where several values cross",
        "passes/stages/crossing.py",
        "if len(crossing) != 1:",
        "if not crossing:",
        f"{STAGES}::test_where_two_values_cross_nothing_is_cut",
    ),
    broken(
        "stages are as even as their sum",
        "passes/stages/balance.py",
        "_best(cost, stages, max, None)",
        "_best(cost, stages, operator.add, None)",
        f"{STAGES}::test_the_largest_stage_is_as_small_as_can_be",
    ),
    broken(
        "of equally large stages any way will do",
        "passes/stages/balance.py",
        "_best(cost, stages, operator.add, found[0])",
        "found",
        f"{STAGES}::test_the_largest_stage_is_as_small_as_can_be",
    ),
    broken(
        "a weight that two segments read is counted twice",
        "passes/stages/balance.py",
        "segment.weights - there)",
        "segment.weights)",
        f"{STAGES}::test_the_largest_stage_is_as_small_as_can_be",
    ),
    broken(
        "a stage has the rotary tables of the first one's layers",
        "kvcompile/pipeline.py",
        "table.cos_name: constants[cos], table.sin_name: constants[sin]",
        "table.cos_name: constants[table.cos_name], table.sin_name: constants[table.sin_name]",
        f"{STAGES}::test_each_stage_has_the_rotary_tables_of_its_own_layers",
    ),
    broken(
        "a stage has the pages of the first one's layers",
        "kvcompile/verify/cached.py",
        "for own, name in self.tables.items()",
        "for own, name in ()",
        f"{STAGES}::test_layers_that_differ_have_page_tables_of_their_own",
    ),
    broken(
        "all ranks take what the first stage gives for the logits",
        "kvcompile/runtime/parallel/group.py",
        "group_src=self.size - self.options.tensor",
        "group_src=0",
        "tests/runtime/parallel/test_stages.py::test_stages_give_what_one_process_gives",
    ),
    broken(
        "a pool grows where token ids come to, not on its layer's device",
        "kvcompile/runtime/cache.py",
        "new = torch.zeros((size, *spec.shape), dtype=spec.dtype, device=self._device_of(name))",
        "new = torch.zeros((size, *spec.shape), dtype=spec.dtype, device=self.device)",
        DEVICES,
    ),
    broken(
        "a cache stands where token ids come to",
        "kvcompile/runtime/cache_spec.py",
        "return first if of is None or of.device is None else of.device",
        "return first",
        DEVICES,
    ),
    broken(
        "what a layer on another device reads is not copied there",
        "passes/rewrite/places.py",
        "if device == self.first:",
        "if True:",
        DEVICES,
    ),
    broken(
        "each layer of a device has a copy of its own of what all read",
        "passes/rewrite/places.py",
        "if (node, device) not in self._done:",
        "if True:",
        DEVICES,
    ),
    broken(
        "layers on one device of several have rope tables of the first",
        "passes/rewrite/insert_cache.py",
        "table = (site.rope.table, device)",
        "table = (site.rope.table, on_devices.first)",
        DEVICES,
    ),
    broken(
        "a model that is over devices already is divided over ranks",
        "kvcompile/pipeline.py",
        "if ranks * stages > 1 and plan.devices:",
        "if False:",
        DEVICES,
    ),
    broken(
        "what is free on the devices is added up",
        "kvcompile/decide/auto.py",
        "return min(known) if",
        "return sum(known) if",
        DEVICES,
    ),
    broken(
        "a rank keeps views of the checkpoint",
        "kvcompile/util/copied.py",
        "made[name] = tensor.clone()",
        "made[name] = tensor",
        "tests/util/test_copied.py",
    ),
    broken(
        "a copy in another's copy begins where the original did",
        "kvcompile/util/copied.py",
        "+ tensor.storage_offset() - original.storage_offset()",
        "+ tensor.storage_offset()",
        "tests/util/test_copied.py",
    ),
    broken(
        "offloaded weights are called weights that are not there yet",
        "kvcompile/original/checks.py",
        "if away := offloaded(model):",
        "if away := []:",
        "tests/api/test_first_day.py::test_no_decoder_is_told_at_once",
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
