"""A graph run node by node, for who watches some of its nodes: plain calls, and each value gone with its last use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.fx import Graph, GraphModule, Node, map_arg

from kvcompile.passes.probe import few_rows
from kvcompile.passes.probe.evaluate import fetch_attr


class Steps:
    """Runs a graph. An `Interpreter` notes for each node where an error or a new node would come from; nobody asks
    for that here, and it takes longer than small operators do.

    also:  nodes that a node reads besides its arguments
    env:   values of nodes that are still needed, while it runs
    order: its nodes, each with those that nobody needs after it
    """

    def __init__(self, module: GraphModule, also: Mapping[Node, Iterable[Node]] | None = None):
        last = _last_uses(module.graph, also or {})
        self.env: dict[Node, Any] = {}
        self.order = [(node, last.get(node, ())) for node in module.graph.nodes]
        self._held = {
            node: fetch_attr(module, str(node.target)) for node, _ in self.order if node.op == "get_attr"
        }

    def run(self, *inputs: Any, after: Callable[[Node], None] | None = None) -> Any:
        """The graph's output for values of its placeholders, in order.

        after: called when a node has run; it may raise
        """
        given = iter(inputs)
        env = self.env
        try:
            for node, done in self.order:
                if node.op == "output":
                    return map_arg(node.args[0], env.__getitem__)
                env[node] = next(given) if node.op == "placeholder" else self.run_node(node)
                for used in done:
                    del env[used]
                if after is not None:
                    after(node)
            raise AssertionError("a graph has an output")
        finally:
            env.clear()

    def run_node(self, node: Node) -> Any:
        """The value of a node that is no placeholder."""
        if node.op == "get_attr":
            return self._held[node]
        assert node.op == "call_function" and callable(node.target), node.format_node()
        args, kwargs = self.arguments(node)
        target = few_rows.linear if node.target is few_rows.LINEAR else node.target
        return target(*args, **kwargs)

    def arguments(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The values that a node is called with."""
        value = self.env.__getitem__
        return map_arg(node.args, value), map_arg(node.kwargs, value) if node.kwargs else {}


def _last_uses(graph: Graph, also: Mapping[Node, Iterable[Node]]) -> dict[Node, list[Node]]:
    """By node, what nobody needs after it: a long text's values do not all fit into memory."""
    seen: set[Node] = set()
    last: dict[Node, list[Node]] = {}
    for user in reversed(graph.nodes):
        for node in dict.fromkeys((*user.all_input_nodes, *also.get(user, ()))):
            if node not in seen:
                seen.add(node)
                last.setdefault(user, []).append(node)
    return last
