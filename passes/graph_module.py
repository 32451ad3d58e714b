"""A graph as a module whose Python is written when somebody calls it or asks for it.

Most graphs between two passes are read, changed and copied, and run node by node if at all: writing the code of each of
them is as much work as the passes are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _PyTreeCodeGen


def module_of(root: nn.Module | dict[str, Any], graph: Graph, name: str) -> GraphModule:
    """`graph` with what it reads from `root`; as `GraphModule` in all but when its code is made."""
    return _LazyGraphModule(root, graph, name)


@contextmanager
def unwritten() -> Iterator[None]:
    """What PyTorch makes of graphs meanwhile has its code written when it is called first, and never before.

    An export changes its graph in a dozen steps, and writes and compiles the code after each.
    """
    recompile = GraphModule.recompile

    def forward(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
        recompile(self)  # which puts the code in this function's place
        return self(*args, **kwargs)

    def later(self: GraphModule) -> None:
        codegen = self.graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):
            self._in_spec, self._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        type(self).forward = forward

    GraphModule.recompile = later  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        GraphModule.recompile = recompile  # type: ignore[method-assign]
