"""The rewritten graph as a pure function of tensors: caches in, caches out. What every export traces.

    input_ids [B, S], positions [B, S], seq_lens [B], keep [K], (slots [T]), (page_table_i [B, pages]), caches...
    -> logits [B, K, V], caches...

All of them int64 but page tables (int32) and caches. Everything else that the graph takes follows from these:

    position_ids = positions, 0 for padding         span = how many `slots` there are (their values are 0 .. T - 1)
    past_length  = seq_lens of any row              logits_to_keep = keep
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from kvcompile.errors import ExportError
from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.kernels.ops import running_sum
from kvcompile.kernels.shared.dialect import Dialect, speaking
from kvcompile.layouts.storage import is_fp8
from kvcompile.passes.rewrite.insert_cache import ROWS
from kvcompile.pipeline import Front, absorbed, rewrite
from kvcompile.plan import Plan
from kvcompile.runtime.cache_spec import CacheShape
from kvcompile.targets import experts
from kvcompile.targets.manifest import Role
from kvcompile.targets.region_calls import RegionCalls
from kvcompile.util.tracing import quiet, uncollected

Phase = Literal["prefill", "decode", "step"]
# Sizes that stand for the dynamic ones while tracing: different, and none of 0, 1 or any size of a model.
_HINTS = {"batch": 11, "tokens": 61, "kept": 37, "slots": 59, "pages": 13}
_FEWER_SLOTS = (59, 47, 43, 31, 29, 23, 19, 17, 7, 5, 3, 2)  # of caches that hold no more


@dataclass(frozen=True)
class Argument:
    """One input of the function.

    shape: sizes, or the names of those that are dynamic
    """

    name: str
    role: Role
    shape: tuple[int | str, ...]
    dtype: torch.dtype


class Functional(nn.Module):
    """`forward(*arguments)` in the order of `arguments`; returns logits and the caches, in the order of `caches`."""

    def __init__(self, front: Front, plan: Plan, dialect: Dialect, *, in_place: bool = False):
        """
        in_place: whether caches are updated where they stand, and logits are all that is returned

        `once`, the arguments, is set by who translates equal regions once.
        """
        super().__init__()
        front = absorbed(front, plan)
        rewritten, constants = rewrite(front, plan)
        self.once: tuple[Argument, ...] = ()
        self.decoder = rewritten.graph_module
        self.dialect, self.in_place, self.device = dialect, in_place, front.device
        self.shape = CacheShape.of(plan, rewritten.caches, front.device, rewritten.states)
        self.plan = plan
        self.logits_index = front.captured.logits_index
        self._takes = [str(node.target) for node in self.decoder.graph.nodes if node.op == "placeholder"]
        self._keeps = front.captured.inputs.logits_to_keep
        self._constants = tuple(constants)
        for name, value in constants.items():
            self.register_buffer(name, value)
        self.caches = tuple(name for name in self._takes if name in self.shape.buffers)
        self.regions = RegionCalls(self.decoder, self.caches)
        for graph_module in (self.decoder, *self.regions.modules):
            _spell_out(graph_module)
        self.tables = tuple(pool.group.name for pool in self.shape.pools)
        self.has_slots = self.shape.span > 0

    def cache_dtype(self, name: str) -> torch.dtype:
        """The dtype that a cache has in the exported graph: bytes where the dialect has no other word for it."""
        dtype = self.shape.buffers[name].spec.dtype
        if self.shape.buffers[name].as_bytes:
            return torch.uint8
        if self.dialect.portable and (is_fp8(dtype) or dtype == torch.uint8):
            return self.dialect.byte
        return dtype

    def arguments(self, one: bool, alone: bool = False) -> tuple[Argument, ...]:
        """What forward takes; one: whether each sequence gets one token; alone: whether there is one sequence."""
        tokens, kept = (1, 1) if one else ("tokens", "kept")
        batch = 1 if alone else "batch"
        found = [
            Argument("input_ids", "input_ids", (batch, tokens), torch.int64),
            Argument("positions", "positions", (batch, tokens), torch.int64),
            Argument("seq_lens", "seq_lens", (batch,), torch.int64),
            Argument("keep", "keep", (kept,), torch.int64),
        ]
        if self.has_slots:
            found.append(Argument("slots", "slots", ("slots",), torch.int64))
        pages: dict[str, str] = {}
        for number, pool in enumerate(self.shape.pools):
            group = pool.group
            found.append(Argument(group.name, "page_table", (batch, group.pages_per_sequence), torch.int32))
            pages |= dict.fromkeys(pool.buffers, f"pages_{number}")
        for name in self.caches:
            rows = self.shape.buffers[name].spec.shape
            found.append(Argument(name, "cache", (pages.get(name, batch), *rows), self.cache_dtype(name)))
        return tuple(found)

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        _say_equal(self.once, given)
        input_ids, positions, seq_lens, keep, *rest = given
        slots = rest.pop(0) if self.has_slots else None
        tables, caches = rest[: len(self.tables)], rest[len(self.tables) :]
        if not self.in_place:
            caches = [cache.clone() for cache in caches]
        values: dict[str, Any] = {
            "input_ids": input_ids,
            "positions": positions,
            "seq_lens": seq_lens,
            "logits_to_keep": keep,
            "span": 1 if slots is None else slots.shape[0],
            "position_ids": positions.clamp(min=0),
            "past_length": seq_lens[0],
            ROWS: None,  # only modules that run as Python read it, and there are none here
            **dict(zip(self.tables, tables, strict=True)),
            **dict(zip(self.caches, caches, strict=True)),
            **{name: getattr(self, name) for name in self._constants},
        }
        if self.once:
            outputs, left = self.regions.run(values)
            caches = [left[name] for name in self.caches]
        else:
            outputs = self.decoder(*[values[name] for name in self._takes])
        logits = outputs[self.logits_index]
        if not self._keeps:
            logits = logits.index_select(1, keep)
        return (logits,) if self.in_place else (logits, *caches)


def _say_equal(arguments: tuple[Argument, ...], given: tuple[Tensor, ...]) -> None:
    """Sizes of one name are equal: known before the first region, or each would have symbols of its own."""
    known: dict[str, Any] = {}
    for argument, tensor in zip(arguments, given, strict=False):
        for name, size in zip(argument.shape, tensor.shape, strict=True):
            if isinstance(name, str):
                torch._check(known.setdefault(name, size) == size)


def _spell_out(graph_module: GraphModule) -> None:
    """Put functions in place of ops that targets do not know, so that tracing sees into them.

    The project's own ops would else be taken apart when the traced program is translated, outside of the dialect.
    """
    for node in graph_module.graph.nodes:
        node.target = _FUNCTIONS.get(str(node.target), node.target)
    graph_module.recompile()


_FUNCTIONS = {
    experts.NAME: experts.grouped_product,
    str(ops.cached_attention): ops.cached_attention_function,
    str(ops.cached_rows): ops.cached_rows_function,
    str(running_sum.cached_running_sum): running_sum.cached_running_sum_function,
}


def functional(front: Front, plan: Plan, dialect: Dialect, *, in_place: bool = False) -> Functional:
    """The plan's graph as a function.

    Raises:
        ExportError: the model has modules that run as Python, which no exported graph can hold, or max_tokens is too
            few to be a size.
    """
    if front.captured.opaques:
        names = [module.path for module in front.captured.opaques]
        others = "" if len(names) == 1 else f" and {len(names) - 1} more"
        raise ExportError(
            f"{names[0]}{others} run as Python inside the rewritten module, and an exported graph has no Python in it; "
            "export a model whose layers all trace, or use kvcompile.optimize"
        )
    function = Functional(front, plan, dialect, in_place=in_place)
    if 0 < function.shape.span <= _FEWER_SLOTS[-1]:
        raise ExportError(
            f"runtime.max_tokens: expected more than {_FEWER_SLOTS[-1]} for an exported graph, got "
            f"{function.shape.span}"
        )
    return function


def example(function: Functional, one: bool, alone: bool = False) -> tuple[Tensor, ...]:
    """Arguments to trace with: empty caches, and sizes that stand for the dynamic ones."""
    made = []
    for argument in function.arguments(one, alone):
        shape = [_hint(size, function.shape.span) for size in argument.shape]
        if argument.role in ("positions", "slots", "keep"):
            value = torch.arange(shape[-1], device=function.device).expand(shape).contiguous()
        else:
            value = torch.zeros(shape, dtype=argument.dtype, device=function.device)
        made.append(value)
    return tuple(made)


def traced(function: Functional, one: bool, alone: bool = False) -> ExportedProgram:
    """The function for one token per sequence, or for any number of them; alone: for one sequence.

    Raises:
        ExportError: torch.export refuses it.
    """
    names = [argument.shape for argument in function.arguments(one, alone)]
    dynamic = tuple(
        {i: Dim.DYNAMIC for i, size in enumerate(shape) if isinstance(size, str)} for shape in names
    )
    try:
        with speaking(function.dialect), torch.no_grad(), uncollected(), quiet():
            return torch.export.export(
                function, example(function, one, alone), dynamic_shapes=(dynamic,), strict=False
            )
    except Exception as error:  # torch.export raises many kinds
        reason = " ".join(str(error).split())[:600]
        raise ExportError(
            f"torch.export refused the rewritten graph of plan {function.plan.digest()}: {type(error).__name__}: "
            f"{reason}"
        ) from error


def _hint(size: int | str, span: int) -> int:
    if size == "slots":
        return next((fewer for fewer in _FEWER_SLOTS if fewer < span), span)
    return size if isinstance(size, int) else _HINTS[size.split("_")[0]]
