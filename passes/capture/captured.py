"""A captured model: its graph, what the graph takes and gives, and how it came to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from kvcompile.kernels.ops.opaque import OpaqueModule
from kvcompile.original.outputs import Outputs
from kvcompile.passes.capture.inputs import CapturedInputs
from kvcompile.passes.capture.last_token import LastToken
from kvcompile.passes.graph import expr


@dataclass(frozen=True)
class Captured:
    """A captured model.

    graph_module: placeholders `inputs.names`, output a flat tuple of tensors; cleaned
    out_spec:     pytree spec of what the model returned; `rebuild` applies it
    logits_index: which of the graph's outputs holds the logits
    constants:    leaves of the model's output that are not tensors, by leaf index
    max_seq_len:  the longest sequence the model's own tables and asserts allow; None: no limit in the graph
    route:        how it was captured, e.g. "export, sdpa" or "strict export, eager"
    reasons:      what failed before, one line each
    opaques:      the modules that run as Python; they live as long as this record
    state_problem: recurrent state that was seen and cannot be carried; empty: none
    last:         set where the model itself gives the last token's logits alone
    changing:     what a forward changes without harm, as (path of the module, attribute)
    """

    graph_module: GraphModule
    inputs: CapturedInputs
    out_spec: pytree.TreeSpec
    logits_index: int
    route: str
    reasons: tuple[str, ...]
    seconds: float
    constants: tuple[tuple[int, Any], ...] = ()
    max_seq_len: int | None = None
    opaques: tuple[OpaqueModule, ...] = ()
    state_problem: str = ""
    last: LastToken | None = None
    changing: frozenset[tuple[str, str]] = frozenset()

    @property
    def rebuild(self) -> Outputs:
        """The model's own output class around the graph's flat outputs."""
        flat = self.last is not None and self.last.flat
        return Outputs(self.out_spec, self.constants, self.logits_index if flat else None)


def limit_of(program: ExportedProgram, graph_module: GraphModule) -> int | None:
    input_ids = next(node for node in graph_module.graph.nodes if node.op == "placeholder")
    bound = program.range_constraints.get(expr(input_ids.meta["val"].shape[1]))
    if bound is None or not getattr(bound.upper, "is_Integer", False) or int(bound.upper) >= 2**31:
        return None
    return int(bound.upper)
