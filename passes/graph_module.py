"""A graph as a module whose Python is written when somebody calls it or asks for it.

Most graphs between two passes are read, changed and copied, and run node by node if at all: writing the code of each of
them is as much work as the passes are.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule


def module_of(root: nn.Module | dict[str, Any], graph: Graph, name: str) -> GraphModule:
    """`graph` with what it reads from `root`; as `GraphModule` in all but when its code is made."""
    return _LazyGraphModule(root, graph, name)
